"""Held-out evaluation with the rollout engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.schema import Config
from megatron_rl.data.prompts import CATEGORIES
from megatron_rl.data.reading import Data
from megatron_rl.loss import Method
from megatron_rl.reporting.evaluation import ScoredResponses, evaluation_metrics
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.demonstrations import without_demonstrations
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.rollouts.rows.experience import Responses
from megatron_rl.rollouts.rows.verdicts import excluded_share
from megatron_rl.rollouts.sampling import evaluation_sampling
from megatron_rl.types import Prompt, Sampling


@dataclass
class Evaluator:
    """Answers a fixed set of prompts and reports the ``eval/`` metrics."""

    config: Config
    sampler: Rollouts | LaunchSampler
    prompts: Sequence[Prompt]
    sampling: Sampling

    def due(self, step: int, num_steps: int) -> bool:
        """Whether an evaluation follows ``step``; step 0 is the state before training."""
        when = self.config.evaluation
        if step == 0:
            return when.at_start
        if step == num_steps:
            return when.at_end
        every = when.every_steps
        return every > 0 and step % every == 0

    def run(self) -> dict[str, float]:
        """Collective. What ``reporting.evaluation.evaluation_metrics`` says of the responses.

        Raises:
            ValueError: too many of them have no verdict.
        """
        what = "held-out evaluation"
        responses = self.sampler.run(self.prompts, self.sampling, what)
        excluded_share(responses.scores, self.config.reward.max_excluded_share, what)
        return evaluation_metrics(scored(responses), self.config.evaluation.pass_at)


def build_evaluator(
    config: Config, sampler: Rollouts, data: Data, method: Method, stop_ids: tuple[int, ...]
) -> Evaluator:
    """Held-out prompts are answered by the engine alone."""
    prompts = data.held_out_prompts[: config.evaluation.num_prompts]
    if "is_demonstration" in method.reads:
        prompts = [without_demonstrations(prompt) for prompt in prompts]
    return Evaluator(config, sampler, prompts, evaluation_sampling(config, stop_ids))


def scored(responses: Responses) -> ScoredResponses:
    """The columns from which the metrics of an evaluation are computed."""
    scores = responses.scores
    return ScoredResponses(
        group_ids=responses.group_ids,
        data_sources=[prompt.data_source for prompt in responses.prompts],
        correct=np.array([score.correct for score in scores], dtype=bool),
        rewards=np.array([score.reward for score in scores], dtype=np.float64),
        lengths=responses.sampled_lengths,
        truncated=responses.truncated,
        extracted=[score.extracted for score in scores],
        has_verdict=np.array([score.problem is None for score in scores], dtype=bool),
        categories=[prompt.extra.get(CATEGORIES, []) for prompt in responses.prompts],
    )
