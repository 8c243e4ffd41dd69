"""Partial rollouts in whole runs on real Megatron-Core and real vLLM: a run that is killed and goes
on is the undisturbed one bit for bit; with nothing that goes on it is a run without them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.toy import overrides, untimed_rows, without
from tests.launch import REPO, end, launch, torchrun

pytestmark = pytest.mark.full
STEPS = 6
LIMIT_S = 500
# Two replicas; responses of 1 to 24 tokens, of which the first counts.
SETTINGS = (
    "rollout.tensor=1",
    "rollout.max_response_tokens=24",
    "batch.responses_per_prompt=4",
    "method.mismatch.kind=tis",
    "method.mismatch.cap=2.0",
    "mismatch_limits.abort_above=null",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    f"trainer.num_steps={STEPS}",
)
PARTIAL = (*SETTINGS, "source.partial.groups_in_flight=14", "source.partial.max_age=2")


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in (run_dir / "export").glob("*.safetensors"):
        found |= load_file(file)
    return found


def train(folder: Path, name: str, *settings: str) -> Path:
    launch("megatron_rl.train", 2, overrides(folder, folder / name, *settings), timeout=LIMIT_S)
    return folder / name


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    return train(folder, "undisturbed", *PARTIAL)


def test_responses_go_on_in_the_next_step(undisturbed: Path) -> None:
    found = untimed_rows(undisturbed)
    assert [row["rollout/num_responses"] for row in found] == [32] * STEPS
    assert found[0]["source/staleness_max"] == 0
    assert max(row["source/staleness_max"] for row in found) in (1, 2)
    assert sum(row["source/mixed_share"] > 0 for row in found) >= 2
    # Tokens of the newest weights are those of the policy; else the two differ as ratios correct.
    assert found[0]["mismatch/logprob_abs_diff_max"] < 1e-4


def killed_behind(folder: Path, run_dir: Path, step: int) -> None:
    command = torchrun("megatron_rl.train", 2)
    command += overrides(folder, run_dir, *PARTIAL, "checkpoint.every_steps=1")
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(command, cwd=REPO, env=environment, stdout=subprocess.DEVNULL)
    try:
        manifest = run_dir / "checkpoints" / f"step_{step:06d}" / "manifest.json"
        deadline = time.monotonic() + LIMIT_S
        while not manifest.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    finally:
        end(process)


def test_a_killed_run_goes_on_as_the_undisturbed_one(folder: Path, undisturbed: Path) -> None:
    run_dir = folder / "killed"
    killed_behind(folder, run_dir, 2)
    assert len(untimed_rows(run_dir)) < STEPS, "it was killed in the middle"
    train(folder, "killed", *PARTIAL)
    # How much is sampled in vain depends on when scores arrive.
    both = [
        [without(row, "tokens/discarded") for row in untimed_rows(each)]
        for each in (run_dir, undisturbed)
    ]
    assert both[0] == both[1]
    found, expected = weights(run_dir), weights(undisturbed)
    assert found.keys() == expected.keys() and expected
    assert not [name for name in found if not found[name].equal(expected[name])]


def test_with_no_more_groups_than_a_step_takes_it_is_a_run_without(folder: Path) -> None:
    none_open = train(folder, "none_open", *SETTINGS, "source.partial.groups_in_flight=8")
    plain = train(folder, "plain", *SETTINGS)
    found = [
        {key: value for key, value in row.items() if not key.startswith("source/")}
        for row in untimed_rows(none_open)
    ]
    assert found == untimed_rows(plain)
    assert all(weights(none_open)[name].equal(each) for name, each in weights(plain).items())


def test_a_checkpoint_of_another_source_is_refused(folder: Path, undisturbed: Path) -> None:
    more = [*SETTINGS, f"trainer.num_steps={STEPS + 1}"]
    failed = launch(
        "megatron_rl.train",
        2,
        overrides(folder, undisturbed, *more),
        timeout=LIMIT_S,
        check=False,
    )
    assert failed.returncode
    assert "source.partial" in failed.stdout + failed.stderr
