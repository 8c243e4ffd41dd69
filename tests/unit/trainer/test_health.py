"""Loss, gradient and weights that are not finite, on the bandit: warned, skipped, counted, and the
end of the run."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config.sections import MismatchLimits, NonFiniteConfig
from megatron_rl.errors import NonFiniteError
from megatron_rl.passes import UpdateResult
from megatron_rl.rollouts.rows.metrics import update_metrics
from megatron_rl.trainer.health import Health
from tests.unit.trainer.runs import rows
from tools.replay.read_bundle import read_bundle

THIRD_STOPS = (
    "nonfinite.stop_after=3",
    "evaluation.every_steps=0",
    "evaluation.at_start=false",
)


def health(write, *, stop_after=None, abort_above=None) -> Health:
    nonfinite = NonFiniteConfig(stop_after=stop_after, bundle_step=None)
    return Health(nonfinite, MismatchLimits(warn_above=None, abort_above=abort_above), write)


def with_bad_references(trainer, bad):
    """The reference says NaN in the steps ``bad``: so do the KL term and the loss."""
    policy = trainer.learner.policy
    score = policy.score
    reference_passes = 0

    def bad_score(batch, outputs=(), *, reference=False):
        nonlocal reference_passes
        result = score(batch, outputs, reference=reference)
        reference_passes += reference
        if reference and reference_passes in bad:
            result.logprobs.fill_(math.nan)
        return result

    policy.score = bad_score
    return trainer


def test_a_loss_that_is_not_a_number_is_warned_skipped_and_counted_and_a_good_step_ends_the_row(
    build, caplog
):
    trainer = build("trainer.num_steps=4", *THIRD_STOPS)
    with_bad_references(trainer, bad={2, 4}).run()
    metrics = rows(trainer)
    assert [row["optim/skipped"] for row in metrics] == [0, 2, 0, 2], "two minibatches a step"
    assert metrics[1]["loss/total"] is None and metrics[1]["optim/grad_norm"] is None
    said = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert [text.split(":")[0] for text in said] == [
        f"step {step}, minibatch {m}" for step in (2, 4) for m in (1, 2)
    ]
    assert (
        "loss nan, gradient norm nan" in said[0]
        and said[1].endswith("(2 in a row)")
        and said[2].endswith("(1 in a row)")
    )


def test_a_row_of_skipped_steps_stops_the_run_with_a_bundle(build):
    trainer = with_bad_references(build("trainer.num_steps=9", *THIRD_STOPS), set(range(2, 99)))
    with pytest.raises(
        NonFiniteError,
        match=(
            r"step 3, minibatch 1: loss nan.*3 optimizer steps in a row.*replay_step\.py"
            r" .*step_000003"
        ),
    ):
        trainer.run()
    folder = trainer.folder.path / "nonfinite" / "step_000003"
    assert trainer.learner.policy.exported == folder / "weights"
    (folder / "weights").mkdir()
    bundle = read_bundle(folder)
    assert (bundle.step, bundle.number, bundle.world_size) == (3, 1, 1)
    assert math.isnan(bundle.loss) and math.isnan(bundle.grad_norm)
    assert bundle.config.model.path == str(folder / "weights")
    assert sorted(row for split in bundle.splits for rows in split for row in rows) == bundle.rows
    sequences = bundle.experience.sequences
    assert sequences.num_responses == 32 and len(bundle.uids) == 32
    assert (
        bundle.experience.ref.logprobs.isnan().all() and bundle.credit.advantages.isfinite().all()
    )


def test_no_bundle_can_be_written_and_the_reason_is_told_all_the_same():
    def full_disk(minibatch, result):
        raise OSError(28, "No space left on device")

    bad = SimpleNamespace(skipped=True, loss=math.inf, grad_norm=1.0)
    with pytest.raises(
        NonFiniteError, match=r"loss inf, gradient norm 1; .*could not be written: .*No space left"
    ):
        health(full_disk, stop_after=1).after(SimpleNamespace(step=1, number=1), bad)


def test_weights_that_are_not_finite_reach_neither_engine_nor_checkpoint_nor_export(build):
    trainer = build("trainer.num_steps=4", "checkpoint.every_steps=1", "evaluation.every_steps=0")
    policy = trainer.learner.policy
    engine = trainer.source.engines.colocation.engine
    update = policy.update
    num_updates = 0

    def fifth_breaks(*args, **more):
        nonlocal num_updates
        num_updates += 1
        result = update(*args, **more)
        if num_updates == 5:
            policy.logits[0] = math.inf
        return result

    policy.update = fifth_breaks
    with pytest.raises(NonFiniteError, match="step 3"):
        trainer.run()
    assert engine.logits.isfinite().all() and engine.weight_version == 2
    checkpoints = sorted(path.name for path in (trainer.folder.path / "checkpoints").iterdir())
    assert checkpoints == ["step_000001", "step_000002"] and policy.exported is None


@pytest.mark.parametrize(("skipped", "stops"), [(False, True), (True, False)])
def test_a_mismatch_that_is_no_number_is_above_every_limit(skipped, stops):
    said = pytest.raises(ValueError, match=r"= nan is above mismatch_limits.abort_above = 1")
    mismatch = {f"mismatch/logprob_abs_diff_{name}": math.nan for name in ("max", "mean")}
    with said if stops else nullcontext():
        health(None, abort_above=1.0).check_mismatch(4, mismatch, skipped=skipped)


def test_a_bundle_that_is_asked_for_holds_the_inputs_of_the_first_minibatch(build):
    trainer = build("trainer.num_steps=2", "nonfinite.bundle_step=2", "evaluation.every_steps=0")
    trainer.run()
    folder = trainer.folder.path / "nonfinite" / "step_000002"
    (folder / "weights").mkdir()
    bundle = read_bundle(folder)
    assert (bundle.step, bundle.number, bundle.loss) == (2, 1, None)
    assert torch.equal(bundle.credit.keep, torch.ones(32, dtype=torch.bool))
    assert json.loads((folder / "config.json").read_text())["nonfinite"]["bundle_step"] == 2


def test_the_largest_of_several_steps_does_not_pass_over_a_nan():
    results = [
        UpdateResult(1.0, 1.0, 0.1, False, {"policy/ratio_max": value})
        for value in (1.0, math.nan, 2.0)
    ]
    assert math.isnan(update_metrics(results)["policy/ratio_max"])
    assert update_metrics(results[::2])["policy/ratio_max"] == 2.0
