"""Numbers that are not finite, through the command line a user types: what is said, what is kept,
and the replay of a step."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.e2e.toy import overrides, rows
from tests.launch import launch, run

REPLAY = "tools/replay_step.py"


def replayed(folder: Path, bundle: Path, processes: int) -> tuple[str, dict[str, Any]]:
    result = folder / f"{bundle.name}.{processes}.json"
    if processes == 1:
        done = run([str(warm.python()), REPLAY, str(bundle), "--json", str(result)], 120)
    else:
        done = launch(REPLAY, processes, [bundle, "--json", result], 120)
    return done.stdout, json.loads(result.read_text())


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_rate_far_too_large_is_told_step_by_step_and_ends_with_a_bundle_that_replays(folder):
    run_dir = folder / "large"
    settings = [
        "optim.learning_rate=1e30",
        "trainer.num_steps=9",
        "batch.prompts_per_minibatch=8",
        "evaluation.at_start=false",
    ]
    settings += [
        "nonfinite.stop_after=2",
        "nonfinite.bundle_step=1",
        "checkpoint.export_at_end=true",
    ]
    done = launch("megatron_rl.train", 2, overrides(folder, run_dir, *settings), 240, check=False)
    said = done.stdout
    assert done.returncode != 0
    for step in (2, 3):
        # The loss itself may be finite or not: that depends on the order in which a processor adds.
        warned = (
            rf"step {step}, minibatch 1: loss \S+, gradient norm nan; not finite, so the optimizer"
            r" step is skipped"
        )
        assert len(re.findall(warned, said)) == 1
    bundle = run_dir / "nonfinite" / "step_000003"
    assert (
        "2 optimizer steps in a row were skipped (nonfinite.stop_after). To see where it comes"
        f" from: python {REPLAY} {bundle}" in said
    )
    metrics = rows(run_dir)
    assert [row["optim/skipped"] for row in metrics] == [0, 1]
    assert metrics[1]["optim/grad_norm"] is None
    assert not (run_dir / "export").exists()
    _check_finite_bundle(folder, run_dir / "nonfinite" / "step_000001", metrics[0])
    text, numbers = replayed(folder, bundle, 2)
    assert re.search(r"in the run: loss \S+, gradient norm nan \(equal\)", text)
    assert any(facts["not_finite"] for facts in numbers["gradients"])


def _check_finite_bundle(folder: Path, bundle: Path, row: dict[str, float]) -> None:
    """The layout of the run gives its loss and gradient bit for bit; one process gives them but for
    rounding."""
    _, same = replayed(folder, bundle, 2)
    assert (same["whole"]["loss"], same["whole"]["grad_norm"]) == (
        row["loss/total"],
        row["optim/grad_norm"],
    )
    _, single = replayed(folder, bundle, 1)
    for numbers in (same, single):
        assert numbers["whole"]["grad_norm"] == pytest.approx(row["optim/grad_norm"], rel=1e-4)
        assert math.hypot(*(facts["norm"] for facts in numbers["gradients"])) == pytest.approx(
            row["optim/grad_norm"], rel=1e-4
        )
        assert sum(part["loss"] for part in numbers["parts"]) == pytest.approx(
            row["loss/total"], abs=1e-6
        )
        assert sorted(row for part in numbers["parts"] for row in part["rows"]) == list(range(128))
        assert not any(
            facts["not_finite"]
            for facts in [*numbers["weights"], *numbers["inputs"], *numbers["gradients"]]
        )
