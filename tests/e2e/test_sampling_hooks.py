"""The sampling hooks of the package in the real trainer, all in one run; and what they remember
goes on with a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.toy import overrides, untimed_rows
from tests.launch import launch

pytestmark = pytest.mark.full
SETTINGS = (
    "method.mismatch.kind=tis",
    "method.mismatch.cap=2.0",
    "mismatch_limits.abort_above=null",
    "batch.responses_per_prompt=8",
    "batch.prompts_per_step=4",
    "batch.prompts_per_minibatch=2",
    "rollout_hooks.vcrl.kappa=0.2",
    "rollout_hooks.dars.schedule=hw",
    "rollout_hooks.dars.max_responses=12",
    "rollout_hooks.erpo.increase=0.2",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
)


# Of the hooks that remember responses: settings, and what says that some were given.
REPLAYS = {
    "ar3po": ("batch.responses_per_prompt=2", "rollout_hooks.ar3po.stages=2"),
    "exgrpo": ("batch.responses_per_prompt=4", "rollout_hooks.exgrpo.start=0.0"),
}
GIVEN = {"ar3po": "reused_responses", "exgrpo": "replayed_groups"}


def train(
    folder: Path, name: str, num_steps: int, settings: Sequence[str] = SETTINGS
) -> list[dict]:
    words = overrides(folder, folder / name, *settings, f"trainer.num_steps={num_steps}")
    launch("megatron_rl.train", 2, words, timeout=400)
    return untimed_rows(folder / name)


def test_steps_are_trained_and_hooks_go_on_with_a_checkpoint(folder: Path) -> None:
    whole = train(folder, "whole", 4)
    assert sum(row["hook/vcrl/refused_groups"] for row in whole) > 0
    assert sum(row["hook/vcrl/replayed_groups"] for row in whole) > 0
    assert sum(row["hook/dars/hard_groups"] for row in whole) > 0
    sizes = [row["rollout/num_responses"] for row in whole]
    assert len(set(sizes)) > 1 and max(sizes) > 8, "groups have grown"
    assert all("hook/erpo/residual_groups" in row for row in whole)
    train(folder, "parts", 2)
    assert train(folder, "parts", 4) == whole


def test_hinted_prompts_are_sampled_and_trained(folder: Path) -> None:
    """The policy finds as likely what the sampler drew, so it reads the prompt with the hint."""
    lines = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    rows = "".join(json.dumps({**line, "steps": line["answer"] * 4}) + "\n" for line in lines)
    (folder / "solved.jsonl").write_text(rows)
    settings = ("method=ghpo", "rollout_hooks.ghpo={}", f"data.train={folder / 'solved.jsonl'}")
    settings += ("data.columns.solution=steps", "data.hint_text=h", "logging.log_samples=64")
    settings += ("batch.responses_per_prompt=2", *SETTINGS[-2:])
    found = train(folder, "hinted", 2, settings)
    hinted = [row["hook/ghpo/hinted_groups"] for row in found]
    assert min(hinted) > 0 and all(row["hook/ghpo/unsolved_groups"] <= 8 for row in found)
    assert all(row["mismatch/logprob_abs_diff_max"] < 1e-4 for row in found)
    shown = [
        json.loads(line) for line in (folder / "hinted/samples.jsonl").read_text().splitlines()
    ]
    of_step = [row for row in shown if row["step"] == 1]
    prompts = {row["prompt"] for row in of_step if "+" in row["prompt"]}
    assert len(prompts) == hinted[0]
    assert {uid.partition("+")[2] for uid in prompts} <= {"0.25", "0.5", "0.75"}
    texts = [row["prompt_text"] for row in of_step if row["prompt"] in prompts]
    # The letter that is asked for, the text before the hint, and of the solution 1, 2 or 3 letters.
    assert all(text[1] == "h" and {text[0]} == set(text[2:-1]) for text in texts)
    assert len(of_step) == found[0]["rollout/num_responses"] == 16


def test_groups_that_are_all_wrong_are_guided(folder: Path) -> None:
    """By two of the three responses that their prompt brings; the policy finds as likely what the
    sampler drew."""
    lines = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    for line in lines:
        letter = line["answer"]
        line["extra"]["given_responses"] = [letter, letter * 2, letter * 3]
    rows = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "guided.jsonl").write_text(rows)
    settings = ("method=ampo", "rollout_hooks.ampo={}", f"data.train={folder / 'guided.jsonl'}")
    settings += ("batch.responses_per_prompt=4", "logging.log_samples=64", *SETTINGS[-2:])
    settings += ("rollout.max_response_tokens=4", "seed=3")
    found = train(folder, "guided", 2, settings)
    for row in found:
        guided = row["hook/ampo/guided_groups"]
        assert guided == row["hook/ampo/unsolved_groups"] > 0
        # Of a guided group of 4: two sampled ones, three given ones of which one takes no part.
        assert row["rollout/num_responses"] == 32 + guided
        assert row["credit/none_correct_group_share"] == 0
        assert row["mismatch/logprob_abs_diff_max"] < 1e-4
        assert row["credit/advantage_positive_sum"] > 0 and row["optim/grad_norm"] > 0


@pytest.mark.parametrize("method", REPLAYS)
def test_responses_of_earlier_steps_are_trained_again(folder: Path, method: str) -> None:
    plain = (*SETTINGS[4:6], *SETTINGS[-2:], "reward.timeout_s=60")
    settings = (f"method={method}", *plain, *REPLAYS[method])
    whole = train(folder, method, 6, settings)
    assert sum(row[f"hook/{method}/{GIVEN[method]}"] for row in whole) > 0
    assert all(row["mismatch/logprob_abs_diff_max"] < 1e-3 for row in whole)
    train(folder, f"{method}_parts", 3, settings)
    assert train(folder, f"{method}_parts", 6, settings) == whole
