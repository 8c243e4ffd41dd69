"""The table of a sweep, against numbers worked out by hand."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.cli.command_line import Root
from megatron_rl.sweeping.summary import summary
from megatron_rl.sweeping.trials import Trial, make_trials

NEEDED = ["model.path=m", "data.train=t", "data.eval=e"]
ACCURACY = ["eval/accuracy"]


def runs(out: Path, scores: Sequence[float], *overrides: str) -> list[Trial]:
    """Cells of which the first ones have metrics that end in these scores."""
    trials = make_trials([*NEEDED, *overrides], out, Root())
    for trial, score in zip(trials, scores, strict=False):
        trial.folder.mkdir()
        lines = [{"step": 0, "eval/accuracy": 0.0}, {"step": 1, "eval/accuracy": score}]
        lines += [{"step": 2, "loss/kl": score / 1000}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (trial.folder / "metrics.jsonl").write_text(text)
        (trial.folder / "config.json").write_text(trial.config.model_dump_json())
    return trials


def names(trials: Sequence[Trial]) -> list[str]:
    return [trial.name for trial in trials]


def rows(text: str) -> list[list[str]]:
    return [re.split("  +", line) for line in text.splitlines()[3:]]


def test_the_table_averages_over_seeds(tmp_path):
    trials = runs(tmp_path, (0.2, 0.4, 0.9), "method=grpo,dapo", "seed=1,2")
    text = summary(trials, names(trials), ACCURACY)
    assert [row[:4] for row in rows(text)] == [
        ["method=grpo", "2", "0.300", "0.200 to 0.400"],
        ["method=dapo", "1", "0.900", "0.900 to 0.900"],
    ]


def test_pairs_are_compared_at_equal_seed(tmp_path):
    """Differences 0.1, 0.2 and 0.3: mean 0.2, deviation 0.1, so that Student's interval with 2
    degrees of freedom is 0.2 -+ 4.303 * 0.1 / sqrt(3) = 0.2 -+ 0.248."""
    scores = (0.1, 0.5, 0.3, 0.4, 0.6, 0.5)
    trials = runs(tmp_path, scores, "method=grpo,dapo", "seed=1,2,3")
    text = summary(trials, names(trials), ACCURACY)
    first, second = rows(text)
    assert first[4:] == ["baseline", "-", "-", "-"]
    # 0.4 - 0.1 = 0.3, 0.6 - 0.5 = 0.1, 0.5 - 0.3 = 0.2
    assert second[4:] == ["+0.2000", "3", "-0.0484 to +0.4484", "not shown"]


def test_what_is_not_finished_is_named_and_not_averaged(tmp_path):
    trials = runs(tmp_path, (0.2, 0.4, 0.9, 0.7), "method=grpo,dapo", "seed=1,2")
    finished = [name for name in names(trials) if name != "method-dapo_seed-1"]
    text = summary(trials, finished, ACCURACY)
    assert rows(text)[1][:3] == ["method=dapo", "1", "0.700"]
    assert text.endswith("not in the table, because not finished: method-dapo_seed-1")


def test_the_same_run_has_one_row_and_counts_for_the_seeds_of_its_own(tmp_path):
    trials = runs(tmp_path, (0.2, 0.4), "optim.clip_grad=1,1.0", "seed=1,2")
    text = summary(trials, names(trials)[:2], ACCURACY)
    assert [row[:2] for row in rows(text)[:1]] == [["optim.clip_grad=1", "2"]]
    assert text.splitlines()[-2:] == [
        f"optim.clip_grad-1.0_seed-{seed}: the same run as optim.clip_grad-1_seed-{seed}"
        for seed in (1, 2)
    ]


def test_several_metrics_are_several_tables_and_one_that_is_missing_is_a_dash(tmp_path):
    trials = runs(tmp_path, (0.2, 0.4), "method=grpo", "seed=1,2")
    metrics = ["loss/kl", "eval/pass_at_4"]
    kl, missing = summary(trials, names(trials), metrics).split("\n\n")
    assert rows(kl)[0][:4] == ["method=grpo", "2", "0.000300", "0.000200 to 0.000400"]
    assert rows(missing)[0][:4] == ["method=grpo", "2", "-", "-"]


def test_pass_at_k_is_that_of_an_evaluation_after_the_training(tmp_path):
    trials = runs(tmp_path, (0.2,), "seed=1")
    later = trials[0].folder / "evaluation" / "metrics.jsonl"
    later.parent.mkdir()
    later.write_text('{"step": 1, "eval/accuracy": 0.9, "eval/pass_at_4": 0.75}\n')
    text = summary(trials, names(trials), [*ACCURACY, "eval/pass_at_4"])
    assert [rows(part)[0][2] for part in text.split("\n\n")] == ["0.200", "0.750"]


def test_an_evaluation_that_is_damaged_is_named_and_the_training_counts(tmp_path):
    trials = runs(tmp_path, (0.2,), "seed=1")
    later = trials[0].folder / "evaluation" / "metrics.jsonl"
    later.parent.mkdir()
    later.write_text('{"step": 1, "eval/pass_at_4": "much"}\n')
    part, note = summary(trials, names(trials), ACCURACY).split("\n\n")
    assert rows(part)[0][2] == "0.200"
    assert note == (
        f"{trials[0].name}: its evaluation is not shown: metrics.jsonl is damaged: eval/pass_at_4"
        " of step 1 is 'much', no number"
    )
