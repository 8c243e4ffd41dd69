"""Sources of rollouts with the engine of a test."""

from __future__ import annotations

from typing import Any

from megatron_rl.config.method import load_method
from megatron_rl.data.loader import PromptLoader, WeightedLoader
from megatron_rl.loss import Method
from megatron_rl.rollouts.backends.colocated import LaunchEngines, LaunchSampler
from megatron_rl.rollouts.demonstrations import Demonstrations
from megatron_rl.rollouts.hooks.resampling import Resampling
from megatron_rl.rollouts.jobs import TrainingJob
from megatron_rl.rollouts.post_rollout import PostRollout
from megatron_rl.rollouts.prompts import PromptStream
from megatron_rl.rollouts.rollouts import Rollouts, step_rules
from megatron_rl.rollouts.rows.verdicts import VerdictRules
from megatron_rl.rollouts.sampling import SamplingPlan
from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.types import Sampling


def training_job(
    loader: PromptLoader | WeightedLoader,
    sampling: Sampling,
    *,
    seed: int,
    rules: StepRules | None = None,
    prompts_per_step: int = 0,
    method: Method | None = None,
    hooks: Resampling | None = None,
    demonstrations: Demonstrations | None = None,
    max_excluded_share: float = 1.0,
    **plan: Any,
) -> TrainingJob:
    """``rules``: None for those of the method with ``prompts_per_step``; ``plan``: more of the
    ``SamplingPlan``."""
    method = method or load_method("grpo")
    return TrainingJob(
        rules=rules or step_rules(method, prompts_per_step, sampling.num_responses),
        stream=PromptStream(loader),
        plan=SamplingPlan(sampling, seed, hooks=hooks, **plan),
        wants_group=method.wants_group,
        verdicts=VerdictRules(method.config.min_group, max_excluded_share),
        demonstrations=demonstrations,
    )


def rollouts_of(
    sampler: LaunchSampler, job: TrainingJob, post: PostRollout | None = None
) -> Rollouts:
    """Steps of ``job`` by the engines of ``sampler``."""
    engines: Any = LaunchEngines(sampler.backend, sampler.world, job)
    return Rollouts(sampler.world, engines, job, post or PostRollout(sampler.shown))
