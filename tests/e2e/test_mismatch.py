"""The parts of the gap between sampler and trainer, of runs on the real engines that have one cause
each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import warm
from tests.e2e.test_partial import PARTIAL
from tests.e2e.toy import overrides, rows
from tests.launch import launch, run

TOOL = "tools/mismatch.py"
FLOAT32 = 1e-5  # nats
SETTINGS = (
    "rollout.tensor=1",
    "rollout.max_response_tokens=8",
    "batch.responses_per_prompt=4",
    "mismatch_limits.abort_above=null",
    "weight_sync.logprob_check_tolerance=null",
    "evaluation.at_start=false",
)


def table_of(folder: Path, name: str, step: int, *settings: str) -> tuple[dict, str, dict]:
    """Of a run with a bundle of its last step: mean |d| and mean d by cause, all the text, and the
    metrics of that step."""
    more = (*settings, f"trainer.num_steps={step}", f"nonfinite.bundle_step={step}")
    run_dir = folder / name
    launch("megatron_rl.train", 2, overrides(folder, run_dir, *more), timeout=400)
    words = [str(run_dir), "--step", str(step), "--responses", "10000"]
    text = run([str(warm.python()), TOOL, *words], 500).stdout
    number = r"(-?[\d.e+-]+)"
    found = re.findall(rf"(?m)^(.+?)  +\S.* -> .*?  +{number} +{number} +{number} +{number}$", text)
    causes = {cause: (float(size), float(mean)) for cause, size, mean, *_ in found}
    (row,) = [row for row in rows(run_dir) if row["step"] == step]
    return causes, text, row


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_engine_in_16_bits_is_the_cause(folder: Path) -> None:
    """The parts add up to the gap that the run has logged, of all its tokens."""
    one_update = "batch.prompts_per_minibatch=8"
    settings = (*SETTINGS, one_update, "rollout.dtype=bfloat16")
    causes, text, row = table_of(folder, "bf16", 1, *settings)
    size, mean = causes["all"]
    assert size == pytest.approx(row["mismatch/logprob_abs_diff_mean"], rel=0.01)
    parts = ("decoding", "engine in 16 bits", "implementation")
    assert sum(causes[part][1] for part in parts) == pytest.approx(mean, abs=0.01 * size)
    assert causes["engine in 16 bits"][0] > 100 * causes["implementation"][0]
    assert causes["implementation"][0] < FLOAT32 and causes["attention kernel"][0] < FLOAT32
    assert causes["head in 16 bits"][0] > 10 * FLOAT32
    assert re.search("(?m)^largest: (engine in 16 bits|decoding), .*: ", text)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_mask_of_the_sampler_is_no_gap_and_would_be_one(folder: Path) -> None:
    settings = ("rollout.top_k=3", "rollout.top_p=0.7", "batch.prompts_per_minibatch=8")
    causes, text, _ = table_of(folder, "truncated", 1, *SETTINGS, *settings)
    assert causes["all"][0] < FLOAT32
    # A token loses the mass that was left out: its logprob over the whole vocabulary is lower.
    size, mean = causes["sampling mask"]
    assert size > 0.1 and mean == -size
    assert "decoding" not in causes and "decoding: not told apart" in text
    assert "rounding of float32" in text


@pytest.mark.full
@pytest.mark.timeout(900)
def test_older_weights_are_the_cause_of_what_they_sampled(folder: Path) -> None:
    """The second step continues responses that the model of the start has begun."""
    few = ("source.partial.groups_in_flight=10", "batch.prompts_per_minibatch=8")
    settings = (*PARTIAL, *few, "optim.learning_rate=0.01")
    causes, text, _ = table_of(folder, "partial", 2, *settings)
    assert causes["older weights"][0] > 100 * causes["implementation"][0]
    assert causes["decoding"][0] < FLOAT32 < causes["all"][0]
    assert "largest: older weights" in text
    refused = run(
        [str(warm.python()), TOOL, str(folder / "partial"), "--step", "1"], 60, check=False
    )
    assert refused.returncode == 1
    assert "nonfinite.bundle_step=1 writes it" in refused.stdout + refused.stderr
