"""Runs with a bandit in the roles of policy and engine, and what they write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatron_rl.config.load import compose, validate
from megatron_rl.config.method import load_method
from megatron_rl.config.schema import Config
from megatron_rl.data.loader import PromptLoader
from megatron_rl.evaluation.evaluator import Evaluator
from megatron_rl.rollouts.backends.colocated import ColocatedEngines, Colocation, LaunchSampler
from megatron_rl.rollouts.demonstrations import Demonstrations
from megatron_rl.rollouts.hooks.resampling import resampling_of
from megatron_rl.rollouts.post_rollout import PostRollout
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.rollouts.sampling import rollout_sampling
from megatron_rl.run.run_folder import RunFolder
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.memory import Ledger, memory_in_use
from megatron_rl.runtime.profiling import Profiler
from megatron_rl.signals import signals_of
from megatron_rl.trainer.bundle import write_bundle
from megatron_rl.trainer.health import Health
from megatron_rl.trainer.learner import Learner, MinibatchPlan
from megatron_rl.trainer.placement import Placement
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.types import Prompt, Sampling
from tests.rollout_sources import training_job
from tests.unit.trainer.fakes import (
    BanditEngine,
    BanditPolicy,
    BanditSync,
    FirstTokenIsAnswer,
    prompts,
)

WORLD = World(rank=0, size=1, local_rank=0, launch_id="test")
DISPLAY = Display(shown=False)
SIZES = (
    "batch.prompts_per_step=4",
    "batch.prompts_per_minibatch=2",
    "batch.responses_per_prompt=8",
    "batch.tokens_per_microbatch=64",
    "trainer.num_steps=3",
)


def words(ids: Sequence[int]) -> str:
    """A text for every token."""
    return " ".join(map(str, ids))


def bandit_config(run_dir: Path, overrides: Sequence[str]) -> Config:
    common = [
        "model.path=m",
        "data.train=t",
        "data.eval=e",
        f"run_dir={run_dir}",
        "evaluation.pass_at=[1]",
        "logging.trackers=[]",
        "logging.console=false",
    ]
    return validate(Config, compose("config", [*common, *SIZES, *overrides]), "test")


def build_bandit(
    folder: Path,
    *overrides: str,
    method: str = "grpo",
    method_overrides: Sequence[str] = (),
    answers: str = "2",
    stop: Callable[[], bool] = lambda: False,
    run: str = "run",
    train: Sequence[Prompt] = (),
    demonstrations: Demonstrations | None = None,
) -> Trainer:
    """A trainer whose run goes to ``folder/run``; ``answers``: the right one to every prompt."""
    config = bandit_config(folder / run, overrides)
    limit = config.rollout.max_response_tokens
    chosen = load_method(method, method_overrides, limit)
    signals = signals_of(chosen, config.seed)
    policy = BanditPolicy(config.batch.tokens_per_microbatch)
    engine = BanditEngine()
    sampler = LaunchSampler(engine, FirstTokenIsAnswer(), words, WORLD, DISPLAY)
    run_folder = RunFolder(config, WORLD, DISPLAY, signals)
    job = training_job(
        PromptLoader(train or prompts(16, answers), seed=config.seed, shuffle=True),
        rollout_sampling(config, ()),
        seed=config.seed,
        prompts_per_step=4,
        method=chosen,
        demonstrations=demonstrations,
        hooks=resampling_of(config.rollout_hooks, train),
        response_limit=config.rollout.response_limit,
        max_excluded_share=config.reward.max_excluded_share,
    )
    post = PostRollout(
        sampler.shown,
        log_samples=run_folder.log_samples,
        num_samples=config.logging.log_samples,
    )
    ledger = Ledger(lambda: memory_in_use(engine.memory_bytes))
    sync = BanditSync(policy, engine)
    colocation = Colocation(policy, engine, sync, config.memory.offload, ledger)
    engines = ColocatedEngines(sampler.backend, WORLD, job, colocation)
    write = partial(write_bundle, config, WORLD, policy)
    health = Health(config.nonfinite, config.mismatch_limits, write)
    plan = MinibatchPlan(
        prompts_per_minibatch=config.batch.prompts_per_minibatch,
        epochs_per_rollout=config.trainer.epochs_per_rollout,
        seed=config.seed,
    )
    placement = Placement(policy.batching, WORLD)
    greedy = Sampling(1, 3, temperature=0.0)
    return Trainer(
        config=config.trainer,
        source=Rollouts(WORLD, policy, engines, job, post),
        learner=Learner(policy, chosen, signals, health, plan, placement, True),
        evaluator=Evaluator(config, sampler, prompts(4), greedy),
        folder=run_folder,
        world=WORLD,
        display=DISPLAY,
        profiler=Profiler(config.profile.steps, "torch", run_folder.path / "profile", 0),
        stop_requested=stop,
    )


def rows(trainer: Trainer) -> list[dict]:
    """The metrics of the run so far."""
    lines = (trainer.folder.path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def samples(trainer: Trainer) -> list[dict]:
    lines = (trainer.folder.path / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def timeless(row: dict) -> dict:
    """What two equal runs have in common."""
    # How much dynamic sampling samples ahead depends on when scores arrive.
    passing = ("time/", "throughput/", "memory/", "tokens/discarded")
    return {key: value for key, value in row.items() if not key.startswith(passing)}
