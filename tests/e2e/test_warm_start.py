"""Supervised steps, then rollouts, on the real engines; a run that is cut in either phase."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.toy import LETTERS, overrides, rows, timeless, without, write_data, write_model
from tests.launch import launch

STEPS = 12  # supervised ones


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_warm_start_teaches_and_continues_where_it_was_cut(tmp_path: Path) -> None:
    """A model that knows nothing is shown each letter, and samples it; runs that end within the
    supervised steps, and within the others, continue to the same bits."""
    write_model(tmp_path / "model")
    write_data(tmp_path / "data.jsonl")
    given = [json.dumps({"prompt": letter, "response": letter}) for letter in LETTERS]
    (tmp_path / "given.jsonl").write_text("\n".join(given))

    def run(name: str, num_steps: int) -> list[dict]:
        more = (
            f"warm_start.steps={min(STEPS, num_steps)}",
            "resume.changed=allow",  # of warm_start.steps, which a cut within them lowers
            f"warm_start.data={tmp_path}/given.jsonl",
            "warm_start.rows_per_step=8",
            "warm_start.peak_learning_rate=1e-2",
            "method=grpo",
            "method.kl.coef=0.01",
            "batch.prompts_per_minibatch=8",  # one, so that the KL is that of before any update
            f"trainer.num_steps={num_steps}",
        )
        launch("megatron_rl.train", 2, overrides(tmp_path, tmp_path / name, *more), 400)
        # A cut run asks its engines at other steps: what a sync sends and checks is not the same.
        kept = [timeless(row) for row in rows(tmp_path / name) if row["step"]]
        return [without(row, "sync/") for row in kept]

    whole = run("whole", STEPS + 2)
    losses = [row["loss/policy"] for row in whole[:STEPS]]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.5 * losses[0]
    first = whole[STEPS]
    assert first["reward/accuracy"] > 0.5, "one letter of eight is right by chance"
    assert abs(first["loss/kl"]) < 1e-7, "the reference is what the warm start has made"
    for num_steps in (3, STEPS + 1, STEPS + 2):
        parts = run("parts", num_steps)
    assert parts == whole
