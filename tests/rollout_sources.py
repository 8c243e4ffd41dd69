"""Sources of rollouts with the engine of a test."""

from __future__ import annotations

from typing import Any

from megatron_rl.config.method import load_method
from megatron_rl.data.loader import PromptLoader, WeightedLoader
from megatron_rl.loss import Method
from megatron_rl.rollouts.backends.colocated import ColocatedEngines, LaunchSampler
from megatron_rl.rollouts.demonstrations import Demonstrations
from megatron_rl.rollouts.hooks.resampling import NO_RESAMPLING, Resampling
from megatron_rl.rollouts.jobs import GenerationJob
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
    hooks: Resampling = NO_RESAMPLING,
    demonstrations: Demonstrations | None = None,
    max_excluded_share: float = 1.0,
    **plan: Any,
) -> GenerationJob:
    """``rules``: None for those of the method with ``prompts_per_step``; ``plan``: more of the
    ``SamplingPlan``."""
    method = method or load_method("grpo")
    return GenerationJob(
        rules=rules or step_rules(method, prompts_per_step, sampling.num_responses),
        stream=PromptStream(loader),
        plan=SamplingPlan(sampling, seed, hooks=hooks, **plan),
        wants_group=method.wants_group,
        verdicts=VerdictRules(method.config.min_group, max_excluded_share),
        demonstrations=demonstrations,
    )


def rollouts_of(
    sampler: LaunchSampler, job: GenerationJob, post: PostRollout | None = None
) -> Rollouts:
    """Steps of ``job`` by the engines of ``sampler``."""
    no_training: Any = None
    engines = ColocatedEngines(sampler.backend, sampler.world, job, no_training)
    post = post or PostRollout(sampler.shown)
    return Rollouts(sampler.world, no_training, engines, job, post)
