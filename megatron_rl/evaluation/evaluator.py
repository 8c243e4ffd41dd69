"""Held-out evaluation with the rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_rl.config.schema import Config
from megatron_rl.data.reading import Data
from megatron_rl.loss import Method
from megatron_rl.reporting.evaluation import Judged, evaluation_metrics
from megatron_rl.rollouts.demonstrations import without_demonstrations
from megatron_rl.rollouts.rows.experience import Responses
from megatron_rl.rollouts.rows.verdicts import excluded_share
from megatron_rl.rollouts.sampling import evaluation_sampling
from megatron_rl.types import Prompt, Sampling


class AnswersPrompts(Protocol):
    """Scored responses to prompts that are no part of training."""

    def run(self, prompts: Sequence[Prompt], sampling: Sampling, what: str) -> Responses:
        """Collective; see ``rollouts.Rollouts``."""


class Evaluator:
    """Answers a fixed set of prompts and reports the ``eval/`` metrics."""

    def __init__(
        self, config: Config, sampler: AnswersPrompts, prompts: Sequence[Prompt], sampling: Sampling
    ) -> None:
        self.config = config.evaluation
        self._max_excluded_share = config.reward.max_excluded_share
        self._sampler = sampler
        self._prompts = prompts
        self._sampling = sampling

    def due(self, step: int, num_steps: int) -> bool:
        """Whether an evaluation follows ``step``; step 0 is the state before training."""
        if step == 0:
            return self.config.at_start
        if step == num_steps:
            return self.config.at_end
        every = self.config.every_steps
        return every > 0 and step % every == 0

    def run(self) -> dict[str, float]:
        """Collective. What ``reporting.evaluation.evaluation_metrics`` says of the responses.

        Raises:
            ValueError: too many of them have no verdict.
        """
        what = "held-out evaluation"
        responses = self._sampler.run(self._prompts, self._sampling, what)
        excluded_share(responses.scores, self._max_excluded_share, what)
        return evaluation_metrics(judged(responses), self.config.pass_at)


def build_evaluator(
    config: Config, sampler: AnswersPrompts, data: Data, method: Method, stop_ids: tuple[int, ...]
) -> Evaluator:
    """Held-out prompts are answered by the engine alone."""
    prompts = data.held_out_prompts[: config.evaluation.num_prompts]
    if "is_demonstration" in method.reads:
        prompts = [without_demonstrations(prompt) for prompt in prompts]
    sampling = evaluation_sampling(config, stop_ids)
    return Evaluator(config, sampler, prompts, sampling)


def judged(responses: Responses) -> Judged:
    """The columns from which the metrics of an evaluation are computed."""
    scores = responses.scores
    return Judged(
        group_ids=responses.group_ids,
        data_sources=[prompt.data_source for prompt in responses.prompts],
        correct=np.array([score.correct for score in scores], dtype=bool),
        rewards=np.array([score.reward for score in scores], dtype=np.float64),
        lengths=responses.lengths,
        truncated=responses.truncated,
        extracted=[score.extracted for score in scores],
        has_verdict=np.array([score.problem is None for score in scores], dtype=bool),
    )
