"""The loop around the roles, with a bandit in their place: schedule, resume, stop, alarm."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.reporting.metrics import metric
from megatron_rl.rollouts.post_rollout import of_different_prompts
from megatron_rl.types import SyncReport
from tests.e2e.toy import PHASES
from tests.unit.trainer.runs import rows, samples, timeless


def test_reward_rises_and_the_engine_follows_the_policy(build):
    trainer = build("trainer.num_steps=12")
    trainer.run()
    metrics = rows(trainer)
    assert metrics[0] == {"step": 0} | {key: metrics[0][key] for key in metrics[0] if key != "step"}
    assert metrics[-1]["reward/mean"] > metrics[1]["reward/mean"] + 0.3
    assert metrics[-1]["eval/accuracy"] == 1.0
    assert all(row["mismatch/logprob_abs_diff_max"] < 1e-6 for row in metrics[1:])
    assert torch.equal(
        trainer.source.engines.colocation.engine.logits, trainer.learner.policy.logits
    )


def test_every_metric_is_in_the_table(build):
    trainer = build(method="apo")
    trainer.run()
    assert [key for row in rows(trainer) for key in row if metric(key) is None] == []


def test_evaluation_and_checkpoints_come_on_schedule(build, figure):
    trainer = build(
        "trainer.num_steps=5",
        "evaluation.every_steps=2",
        "checkpoint.every_steps=2",
        "checkpoint.keep=5",
    )
    trainer.run()
    assert [row["step"] for row in rows(trainer) if "eval/accuracy" in row] == [0, 2, 4, 5]
    saved = sorted(path.name for path in (trainer.folder.path / "checkpoints").iterdir())
    assert saved == ["step_000002", "step_000004", "step_000005"]
    assert trainer.learner.policy.exported == trainer.folder.path / "export"
    assert (trainer.folder.path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("method", ["grpo", "dapo"])
def test_a_resumed_run_repeats_the_uninterrupted_one(build, method):
    """Also where steps take more prompts than they train, and sample some ahead."""
    few = "batch.responses_per_prompt=3"
    settings = {"method": method}
    if method == "dapo":
        settings["method_overrides"] = ["reward_shaping.overlong=null"]
    whole = build("trainer.num_steps=4", few, run="whole", **settings)
    whole.run()
    build("trainer.num_steps=2", few, run="parts", **settings).run()
    rest = build("trainer.num_steps=4", few, run="parts", **settings)
    rest.run()
    if method == "dapo":
        assert any(row["rollout/discarded_groups"] > 0 for row in rows(whole)[1:])
    assert torch.equal(whole.learner.policy.logits, rest.learner.policy.logits)
    expected = [timeless(row) for row in rows(whole)]
    got = [
        {key: row[key] for key in reference if key in row}
        for row, reference in zip(map(timeless, rows(rest)), expected, strict=True)
    ]
    assert got == expected


def test_steps_behind_the_checkpoint_are_dropped_from_the_log(build):
    build("trainer.num_steps=2", run="cut").run()
    path = build(run="cut").folder.path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "reward/mean": 9}\n{"step": 4, "rew')
    trainer = build("trainer.num_steps=3", run="cut")
    trainer.run()
    assert [row["step"] for row in rows(trainer)] == [0, 1, 2, 3]
    assert rows(trainer)[-1]["reward/mean"] <= 1


def test_a_stop_request_saves_marks_and_ends(build):
    asked = iter([False, True])
    trainer = build("trainer.num_steps=9", stop=lambda: next(asked), run="stopped")
    trainer.run()
    assert (trainer.folder.path / "requeue").read_text() == "2\n"
    assert trainer.learner.policy.exported is None
    rest = build("trainer.num_steps=3", run="stopped")
    rest.run()
    assert [row["step"] for row in rows(rest)] == [0, 1, 2, 3]
    assert not (rest.folder.path / "requeue").exists()


def test_never_resuming_refuses_a_used_folder(build):
    build("trainer.num_steps=1").run()
    with pytest.raises(ValueError, match="already holds a run"):
        build("resume=never").run()


def test_the_mismatch_alarm_names_step_value_and_key(build):
    trainer = build("mismatch_limits.abort_above=0.01")
    fresh = trainer.source.engines.colocation.weight_sync
    first_sync = fresh.sync

    def only_at_the_start(version):
        if version == 0:
            return first_sync(version)
        return SyncReport(version, 1, 0, 0, 0.0)  # the engine keeps the weights of the start

    fresh.sync = only_at_the_start
    with pytest.raises(
        ValueError, match=r"step 2: mismatch/logprob_abs_diff_max = .* mismatch_limits.abort_above"
    ):
        trainer.run()


def test_a_mismatch_above_the_warning_threshold_is_said_and_the_run_goes_on(build, caplog):
    trainer = build("mismatch_limits.warn_above=1e-9")
    fresh = trainer.source.engines.colocation.weight_sync
    stale = fresh.sync(0)
    fresh.sync = lambda version: stale  # the engine keeps the weights of the start
    trainer.run()
    warnings = [
        record.getMessage()
        for record in caplog.records
        if "mismatch_limits.warn_above" in record.getMessage()
    ]
    assert len(warnings) == 2
    assert warnings[0].startswith("step 2: mismatch/logprob_abs_diff_mean = ")


def test_the_memory_of_every_phase_is_in_the_metrics_and_offloading_changes_nothing_else(build):
    plain, lean = (
        build("trainer.num_steps=4"),
        build("trainer.num_steps=4", "memory.offload=[optimizer,gradients,weights]", run="lean"),
    )
    plain.run()
    lean.run()
    assert [timeless(row) for row in rows(plain)] == [timeless(row) for row in rows(lean)]
    assert all(row[f"memory/{phase}_host_gib"] > 0 for row in rows(lean)[1:] for phase in PHASES)
    assert lean.learner.policy.away == {}


def test_the_schedule_takes_its_values_from_the_config(build):
    trainer = build("evaluation.every_steps=7", "checkpoint.every_steps=3")
    assert trainer.config.num_steps == 3
    steps = range(1, 22)
    assert [step for step in steps if trainer.evaluator.due(step, 100)] == [7, 14, 21]
    assert [step for step in steps if trainer.folder.save_due(step, False)] == list(range(3, 22, 3))
    assert trainer.learner.plan.prompts_per_minibatch == 2
    assert trainer.learner.policy.batching.tokens_per_microbatch == 64


def test_dynamic_sampling_keeps_informative_groups_and_refills(build):
    trainer = build(
        method="dapo",
        method_overrides=["filters.dynamic_sampling.max_tries=20", "reward_shaping.overlong=null"],
    )
    trainer.run()
    last = rows(trainer)[-1]
    assert last["rollout/num_responses"] == 32
    assert last["credit/zero_spread_group_share"] == 0
    assert len(trainer.source.engines.colocation.engine.begun) > 4 * 3 * 8


def test_dynamic_sampling_without_any_informative_group_says_what_to_do(build):
    trainer = build(
        method="dapo", method_overrides=["reward_shaping.overlong=null"], answers="nothing"
    )
    with pytest.raises(ValueError, match="dynamic sampling: all 40 groups of step 1 were"):
        trainer.run()


def test_samples_are_of_different_prompts_and_hold_the_question(build):
    trainer = build("logging.log_samples=3", "trainer.num_steps=1")
    trainer.run()
    written = samples(trainer)
    assert len({row["prompt"] for row in written}) == 3
    assert [row["prompt_text"] for row in written] == [
        f"text of {row['prompt']}" for row in written
    ]
    assert {row["answer"] for row in written} == {"2"}


def test_more_samples_than_prompts_take_the_second_response_of_each():
    responses = [(uid, number) for uid in "ab" for number in (1, 2, 3)]
    uids = [uid for uid, _ in responses]
    chosen = of_different_prompts(uids, 3)
    assert [responses[row] for row in chosen] == [("a", 1), ("b", 1), ("a", 2)]
    assert of_different_prompts(uids, 0) == []
    assert len(of_different_prompts(uids, 99)) == 6


def test_a_run_that_gives_up_leaves_what_was_answered(build):
    trainer = build(
        method="dapo", method_overrides=["reward_shaping.overlong=null"], answers="never"
    )
    with pytest.raises(ValueError, match="dynamic sampling"):
        trainer.run()
    assert [(row["step"], row["correct"]) for row in samples(trainer)] == [(1, False), (1, False)]
