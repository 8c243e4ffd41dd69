"""The loop around the roles, with a bandit in their place: schedule, minibatches, dynamic sampling, resume, stop, alarm."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.data.loader import PromptLoader
from megatron_rl.loss import load_method
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.memory import Ledger, memory_in_use
from megatron_rl.trainer.bundle import write_bundle
from megatron_rl.trainer.evaluate import Evaluator
from megatron_rl.trainer.handover import HandOver
from megatron_rl.trainer.health import Health
from megatron_rl.trainer.metrics import defined
from megatron_rl.trainer.rollouts import Generator, Rollouts
from megatron_rl.trainer.run_folder import RunFolder, of_different_prompts
from megatron_rl.trainer.settings import rollout_sampling
from megatron_rl.trainer.settings import schedule as schedule_of
from megatron_rl.trainer.trainer import Parts, Trainer
from megatron_rl.types import Sampling
from tests.unit.trainer.fakes import BanditEngine, BanditPolicy, BanditSync, FirstTokenIsAnswer, prompts

WORLD = World(rank=0, size=1, local_rank=0, launch_id="test")
DISPLAY = Display(shown=False)


@pytest.fixture
def build(tmp_path: Path):
    def build(*overrides: str, method: str = "grpo", method_overrides=(), answers="2", stop=lambda: False, run="run") -> Trainer:
        common = [
            "model.path=m",
            "data.train=t",
            "data.eval=e",
            f"run_dir={tmp_path / run}",
            "logging.tensorboard=false",
            "logging.console=false",
        ]
        sizes = ["batch.prompts_per_step=4", "batch.prompts_per_minibatch=2", "batch.responses_per_prompt=8", "trainer.num_steps=3"]
        sizes += ["batch.tokens_per_microbatch=64"]
        config = validate(Config, compose("config", [*common, *sizes, *overrides]), "test")
        policy, engine = BanditPolicy(), BanditEngine()
        method_object = load_method(method, method_overrides)
        generator = Generator(engine, FirstTokenIsAnswer(), lambda ids: " ".join(map(str, ids)), WORLD, DISPLAY)
        loader = PromptLoader(prompts(16, answers), seed=config.seed, shuffle=True)
        sizes_of_step = dict(prompts_per_step=4, share_prompts=config.batch.share_prompts, seed=config.seed)
        rollouts = Rollouts(generator, loader, method_object, rollout_sampling(config, ()), **sizes_of_step)
        evaluator = Evaluator(generator, prompts(4), Sampling(1, 3, temperature=0.0), (1,))
        folder = RunFolder(config, WORLD, DISPLAY)
        ledger = Ledger(lambda: memory_in_use(engine.memory_bytes), None)
        hand_over = HandOver(policy, engine, BanditSync(policy, engine), config.memory.offload, ledger)
        health = Health(config.nonfinite, config.mismatch_alarm, partial(write_bundle, config, WORLD, policy))
        parts = Parts(policy, hand_over, method_object, rollouts, evaluator, folder, WORLD, stop, DISPLAY, health)
        return Trainer(parts, schedule_of(config))

    return build


def rows(trainer: Trainer) -> list[dict]:
    return [json.loads(line) for line in (trainer.parts.folder.path / "metrics.jsonl").read_text().splitlines()]


def timeless(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith(("time/", "throughput/", "memory/"))}


def test_reward_rises_and_the_engine_follows_the_policy(build):
    trainer = build("trainer.num_steps=12")
    trainer.run()
    metrics = rows(trainer)
    assert metrics[0] == {"step": 0} | {key: metrics[0][key] for key in metrics[0] if key != "step"}
    assert metrics[-1]["reward/mean"] > metrics[1]["reward/mean"] + 0.3
    assert metrics[-1]["eval/accuracy"] == 1.0
    assert all(row["mismatch/logprob_abs_diff_max"] < 1e-6 for row in metrics[1:])
    assert torch.equal(trainer.parts.hand_over.engine.logits, trainer.parts.policy.logits)


def test_every_metric_is_in_the_table(build):
    trainer = build(method="apo")
    trainer.run()
    assert [key for row in rows(trainer) for key in row if not defined(key)] == []


def test_two_minibatches_a_step_each_of_whole_groups(build):
    trainer = build()
    trainer.run()
    assert [sum(sizes) for sizes in trainer.parts.policy.microbatch_sizes] == [16] * 6


def test_the_split_into_microbatches_does_not_change_the_run(build):
    coarse, fine = build("batch.tokens_per_microbatch=4096"), build("batch.tokens_per_microbatch=5", run="fine")
    coarse.run()
    fine.run()
    assert max(len(sizes) for sizes in fine.parts.policy.microbatch_sizes) == 16
    assert max(len(sizes) for sizes in coarse.parts.policy.microbatch_sizes) == 1
    torch.testing.assert_close(coarse.parts.policy.logits, fine.parts.policy.logits, rtol=1e-5, atol=1e-6)
    for a, b in zip(rows(coarse), rows(fine), strict=True):
        assert timeless(a) == pytest.approx(timeless(b), rel=1e-4, abs=1e-6)


def test_evaluation_and_checkpoints_come_on_schedule(build):
    trainer = build("trainer.num_steps=5", "evaluation.every_steps=2", "checkpoint.every_steps=2", "checkpoint.keep=5")
    trainer.run()
    assert [row["step"] for row in rows(trainer) if "eval/accuracy" in row] == [0, 2, 4, 5]
    saved = sorted(path.name for path in (trainer.parts.folder.path / "checkpoints").iterdir())
    assert saved == ["step_000002", "step_000004", "step_000005"]
    assert trainer.parts.policy.exported == trainer.parts.folder.path / "export"
    assert (trainer.parts.folder.path / "curves.png").stat().st_size > 10_000


def test_a_resumed_run_repeats_the_uninterrupted_one(build):
    whole = build("trainer.num_steps=4", run="whole")
    whole.run()
    build("trainer.num_steps=2", run="parts").run()
    rest = build("trainer.num_steps=4", run="parts")
    rest.run()
    assert torch.equal(whole.parts.policy.logits, rest.parts.policy.logits)
    expected = [timeless(row) for row in rows(whole)]
    got = [{key: row[key] for key in reference if key in row} for row, reference in zip(map(timeless, rows(rest)), expected, strict=True)]
    assert got == expected


def test_steps_behind_the_checkpoint_are_dropped_from_the_log(build):
    build("trainer.num_steps=2", run="cut").run()
    path = build(run="cut").parts.folder.path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "reward/mean": 9}\n{"step": 4, "rew')
    trainer = build("trainer.num_steps=3", run="cut")
    trainer.run()
    assert [row["step"] for row in rows(trainer)] == [0, 1, 2, 3]
    assert rows(trainer)[-1]["reward/mean"] <= 1


def test_a_stop_request_saves_marks_and_ends(build):
    asked = iter([False, True])
    trainer = build("trainer.num_steps=9", stop=lambda: next(asked), run="stopped")
    trainer.run()
    assert (trainer.parts.folder.path / "requeue").read_text() == "2\n"
    assert trainer.parts.policy.exported is None
    rest = build("trainer.num_steps=3", run="stopped")
    rest.run()
    assert [row["step"] for row in rows(rest)] == [0, 1, 2, 3]
    assert not (rest.parts.folder.path / "requeue").exists()


def test_never_resuming_refuses_a_used_folder(build):
    build("trainer.num_steps=1").run()
    with pytest.raises(ValueError, match="already holds a run"):
        build("resume=never").run()


def test_the_mismatch_alarm_names_step_value_and_key(build):
    trainer = build("mismatch_alarm.abort_above=0.01")
    trainer.parts.hand_over.weight_sync.sync = lambda version: (
        BanditSync(trainer.parts.policy, trainer.parts.hand_over.engine).sync(version) if version == 0 else stale
    )
    stale = BanditSync(trainer.parts.policy, BanditEngine()).sync(0)
    with pytest.raises(ValueError, match=r"step 2: mismatch/logprob_abs_diff_max = .* mismatch_alarm.abort_above"):
        trainer.run()


def test_a_mismatch_above_the_warning_threshold_is_said_and_the_run_goes_on(build, caplog):
    trainer = build("mismatch_alarm.warn_above=1e-9")
    fresh = trainer.parts.hand_over.weight_sync
    stale = fresh.sync(0)
    fresh.sync = lambda version: stale  # the engine keeps the weights of the start
    trainer.run()
    said = [record.getMessage() for record in caplog.records if "mismatch_alarm.warn_above" in record.getMessage()]
    assert len(said) == 2 and said[0].startswith("step 2: mismatch/logprob_abs_diff_mean = ")


def test_the_memory_of_every_phase_is_in_the_metrics_and_offloading_changes_nothing_else(build):
    plain, lean = build("trainer.num_steps=4"), build("trainer.num_steps=4", "memory.offload=[optimizer,gradients,weights]", run="lean")
    plain.run()
    lean.run()
    assert [timeless(row) for row in rows(plain)] == [timeless(row) for row in rows(lean)]
    phases = ("update", "offload", "wake_weights", "sync", "wake_kv_cache", "generate", "sleep", "reload")
    assert all(row[f"memory/{phase}_host_gib"] > 0 for row in rows(lean)[1:] for phase in phases)
    assert lean.parts.policy.away == {}


def test_dynamic_sampling_keeps_informative_groups_and_refills(build):
    trainer = build(method="dapo", method_overrides=["filters.dynamic_sampling.max_tries=20", "reward_shaping.overlong=null"])
    trainer.run()
    last = rows(trainer)[-1]
    assert last["rollout/num_responses"] == 32
    assert last["credit/zero_spread_group_share"] == 0
    assert trainer.parts.hand_over.engine.requests > 4 * 3


def test_dynamic_sampling_without_any_informative_group_says_what_to_do(build):
    trainer = build(method="dapo", method_overrides=["reward_shaping.overlong=null"], answers="nothing")
    with pytest.raises(ValueError, match=r"dynamic sampling: all 40 groups of step 1 .* 10 rounds"):
        trainer.run()


def test_dropped_rows_leave_the_update_and_an_empty_minibatch_takes_no_step(build):
    trainer = build(method="grpo", method_overrides=["filters.drop_all_correct=true"])
    trainer.parts.policy.logits[2] = 40.0
    trainer.run()
    assert trainer.parts.policy.microbatch_sizes == []
    assert [row["optim/empty_minibatches"] for row in rows(trainer)[1:]] == [2, 2, 2]


ONLY_UPDATE = ["batch.prompts_per_minibatch=4", "trainer.num_steps=2"]


@pytest.mark.parametrize("entropy", ["entropy.metric=true", "entropy.metric=false"])
def test_an_only_update_uses_its_own_forward_for_the_old_logprobs_and_changes_nothing(build, entropy):
    once, twice = (build(*ONLY_UPDATE, method_overrides=[entropy, "kl.coef=0"], run=run) for run in ("once", "twice"))
    twice.parts.policy.one_format = False
    once.run(), twice.run()
    assert once.parts.policy.passes == ["update"] * 2
    assert twice.parts.policy.passes == ["logprobs", "update"] * 2
    pairs = zip(rows(once)[1:], rows(twice)[1:], strict=True)
    for mine, other in pairs:
        timeless = [key for key in other if not key.startswith(("time/", "memory/", "throughput/"))]
        assert {key: mine[key] for key in timeless} == {key: other[key] for key in timeless}
        assert ("rollout/entropy" in mine) == ("true" in entropy)
    assert torch.equal(once.parts.policy.logits, twice.parts.policy.logits)


def test_old_logprobs_take_a_pass_of_their_own_where_an_update_cannot_give_them(build):
    several = build("trainer.num_steps=1", method_overrides=["kl.coef=0"], run="several")
    several.run()
    assert several.parts.policy.passes == ["logprobs", "update", "update"], "two minibatches"
    statistics = build(*ONLY_UPDATE, method_overrides=["kl.placement=reward", "kl.coef=0.1"], run="statistics")
    statistics.run()
    assert statistics.parts.policy.passes == ["reference", "logprobs", "update"] * 2, "the divergence is part of the reward"
    dropped = build(*ONLY_UPDATE, method_overrides=["filters.drop_all_correct=true", "kl.coef=0"], run="dropped")
    dropped.parts.policy.logits[2] = 3.0
    dropped.run()
    assert dropped.parts.policy.passes[:2] == ["logprobs", "update"], "rows without an update have a mismatch too"
    assert 0 < dropped.parts.policy.microbatch_sizes[0][0] < 32


def test_later_passes_over_a_rollout_visit_all_groups_in_another_order(build):
    trainer = build("trainer.updates_per_rollout=2", "batch.prompts_per_minibatch=1")
    experience = trainer.parts.rollouts.collect(1, _no_clock)
    keep = torch.ones(len(experience.responses), dtype=torch.bool)
    minibatches = list(trainer._minibatches(1, experience, keep))
    assert sorted(map(tuple, minibatches[:4])) == sorted(map(tuple, minibatches[4:]))
    assert minibatches[:4] == sorted(minibatches[:4])
    assert minibatches[:4] != minibatches[4:]
    assert minibatches == list(trainer._minibatches(1, experience, keep))


def test_schedule_takes_its_values_from_the_config(build):
    plan = build("evaluation.every_steps=7", "checkpoint.every_steps=3").schedule
    assert plan == replace(plan, num_steps=3, evaluate_every=7, save_every=3, prompts_per_minibatch=2, tokens_per_microbatch=64)


class _no_clock:
    def __init__(self, phase: str) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def samples(trainer) -> list[dict]:
    lines = (trainer.parts.folder.path / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_samples_are_of_different_prompts_and_hold_the_question(build):
    trainer = build("logging.log_samples=3", "trainer.num_steps=1")
    trainer.run()
    written = samples(trainer)
    assert len({row["prompt"] for row in written}) == 3
    assert [row["prompt_text"] for row in written] == [f"text of {row['prompt']}" for row in written]
    assert {row["answer"] for row in written} == {"2"}


def test_more_samples_than_prompts_take_the_second_response_of_each():
    responses = [SimpleNamespace(prompt=SimpleNamespace(uid=uid), number=n) for uid in "ab" for n in (1, 2, 3)]
    chosen = of_different_prompts(responses, 3)
    assert [(response.prompt.uid, response.number) for response in chosen] == [("a", 1), ("b", 1), ("a", 2)]
    assert of_different_prompts(responses, 0) == []
    assert len(of_different_prompts(responses, 99)) == 6


def test_a_run_that_gives_up_leaves_what_was_answered(build):
    trainer = build(method="dapo", method_overrides=["reward_shaping.overlong=null"], answers="never")
    with pytest.raises(ValueError, match="dynamic sampling"):
        trainer.run()
    assert [(row["step"], row["correct"]) for row in samples(trainer)] == [(1, False), (1, False)]
