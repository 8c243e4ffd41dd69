"""Which runs a sweep makes: their product, their names, and which of them are the same."""

import shlex
from pathlib import Path

import pytest

from megatron_rl.config.cli.command_line import Root
from megatron_rl.config.load import compose
from megatron_rl.sweep import main
from megatron_rl.sweeping.trials import Trial, combinations, make_trials, run_names, tracked

NEEDED = ["model.path=m", "data.train=t", "data.eval=e"]


def trials(out: Path, *overrides: str) -> list[Trial]:
    return make_trials([*NEEDED, *overrides], out, Root())


def test_the_product_of_all_choices_in_the_order_given():
    runs = combinations(["experiment=x", "method=grpo,dapo", "seed=1,2"])
    assert runs == [
        ["experiment=x", f"method={method}", f"seed={seed}"]
        for method in ("grpo", "dapo")
        for seed in (1, 2)
    ]


def test_lists_are_values_and_not_choices():
    assert combinations(["evaluation.pass_at=[1,4]"]) == [["evaluation.pass_at=[1,4]"]]


def test_choices_keep_the_quotes_they_need():
    runs = combinations(["data.prompt_suffix='a, b','c=d'"])
    assert [compose("config", run)["data"]["prompt_suffix"] for run in runs] == ["a, b", "c=d"]


def test_names_hold_what_differs_and_nothing_that_needs_quotes():
    assert run_names([["a=1", "seed=1"], ["a=1", "seed=2"]]) == ["seed-1", "seed-2"]
    assert run_names(combinations(["method=grpo,dapo", "seed=1"])) == ["method-grpo", "method-dapo"]
    assert run_names([["x=1"]]) == ["run"]
    hostile = run_names([["p=a b"], ["p=a,b"], ["p=/a/b"], ["p=" + 300 * "x"], ["p=\u00fc"]])
    assert len(set(hostile)) == 5
    assert all(len(name) < 140 and name == shlex.quote(name) and name.isascii() for name in hostile)
    with pytest.raises(ValueError, match="seed-1 is listed twice"):
        run_names([["seed=1", "a=0"], ["seed=1", "a=0"], ["seed=2", "a=0"]])


def test_equal_configurations_are_one_run_under_several_names(tmp_path):
    """Whatever makes them equal: two spellings of a number, or an option of a group that sets what
    the other override sets anyhow."""
    numbers = trials(tmp_path, "optim.clip_grad=1,1.0,2")
    assert [trial.same_as for trial in numbers] == [None, "optim.clip_grad-1", None]
    layouts = trials(tmp_path, "parallel=single,tp2", "parallel.tensor=1,2")
    assert [trial.same_as for trial in layouts] == [
        None,
        None,
        "parallel-single_parallel.tensor-1",
        "parallel-single_parallel.tensor-2",
    ]


def test_a_folder_of_its_own_makes_no_difference_and_a_seed_does(tmp_path):
    first, second = trials(tmp_path, "seed=1,2")
    assert first.config.run_dir != second.config.run_dir
    assert (first.same_as, second.same_as) == (None, None)


def test_a_trial_is_labeled_by_what_its_seeds_share(tmp_path):
    labels = [trial.label for trial in trials(tmp_path, "method=grpo,dapo", "seed=1,2")]
    assert labels == ["method=grpo", "method=grpo", "method=dapo", "method=dapo"]
    assert [trial.label for trial in trials(tmp_path, "+seed=1,2", "method=rloo")] == 2 * [
        "method=rloo"
    ]


def test_the_same_run_is_said_and_not_started_in_a_dry_run(tmp_path, capsys):
    words = ["--out", str(tmp_path), "--nproc", "2", "--dry-run", *NEEDED, "optim.clip_grad=1,1.0"]
    assert main(words) == 0
    command, note = capsys.readouterr().out.splitlines()
    assert "optim.clip_grad=1 " in command
    assert note == "# optim.clip_grad-1.0: the same run as optim.clip_grad-1"


def test_trackers_group_the_seeds_of_a_combination(tmp_path):
    """And keeps the group and the tags of the user; without such a tracker nothing is added."""
    overrides = ["method=grpo,dapo", "seed=1,2"]
    plain = trials(tmp_path, "seed=1,2")
    assert [tracked(trial, "ablation") for trial in plain] == plain
    on = ["logging.trackers=[wandb]", "logging.tags=['a, b']", "experiment=quickstart_cpu"]
    grouped = [logging_of(tracked(trial, "abl=1")) for trial in trials(tmp_path, *overrides, *on)]
    assert [logging["group"] for logging in grouped] == [
        f"abl=1/method-{method}" for method in ("grpo", "grpo", "dapo", "dapo")
    ]
    tags = ["a, b", "abl=1", "experiment=quickstart_cpu"]
    assert all(logging["tags"] == tags for logging in grouped)
    for more, group in ([], "sweep"), (["logging.group=mine"], "mine"):
        seeds = [tracked(trial, "sweep") for trial in trials(tmp_path, "seed=1,2", *on, *more)]
        assert {logging_of(trial)["group"] for trial in seeds} == {group}


def logging_of(trial: Trial) -> dict:
    return compose("config", trial.overrides)["logging"]
