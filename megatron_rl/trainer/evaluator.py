"""Held-out evaluation with the rollout engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Protocol

import numpy as np

from megatron_rl.config.schema import EvaluationConfig
from megatron_rl.reporting.pass_at_k import pass_at_k
from megatron_rl.trainer.experience import Responses
from megatron_rl.types import Prompt, Sampling


class AnswersPrompts(Protocol):
    """Scored responses to prompts that are no part of training."""

    def run(self, prompts: Sequence[Prompt], sampling: Sampling, what: str) -> Responses:
        """Collective; see ``rollouts.Sampler``."""


class Evaluator:
    """Answers a fixed set of prompts and reports the ``eval/`` metrics."""

    def __init__(
        self,
        config: EvaluationConfig,
        sampler: AnswersPrompts,
        prompts: Sequence[Prompt],
        sampling: Sampling,
    ) -> None:
        self.config = config
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
        """Collective. Accuracy (mean over responses), pass@k (unbiased, mean over prompts),
        response length in tokens, truncated share, and the accuracy of each data source."""
        responses = self._sampler.run(self._prompts, self._sampling, "held-out evaluation")
        return evaluation_metrics(responses, self.config.pass_at)


def evaluation_metrics(responses: Responses, pass_at: Sequence[int]) -> dict[str, float]:
    scores = responses.scores
    metrics = {
        "eval/accuracy": fmean(score.correct for score in scores),
        "eval/reward_mean": fmean(score.reward for score in scores),
        "eval/response_tokens_mean": fmean(responses.lengths.tolist()),
        "eval/truncated_share": fmean(responses.truncated.tolist()),
    }
    correct = np.array([score.correct for score in scores])
    sizes = np.bincount(responses.group_ids).tolist()
    num_correct = np.bincount(responses.group_ids, correct).astype(int).tolist()
    for k in pass_at:
        metrics[f"eval/pass_at_{k}"] = fmean(
            pass_at_k(size, right, k) for size, right in zip(sizes, num_correct, strict=True)
        )
    by_source: dict[str, list[bool]] = defaultdict(list)
    for prompt, score in zip(responses.prompts, scores, strict=True):
        by_source[prompt.data_source].append(score.correct)
    if len(by_source) > 1:
        for source, values in sorted(by_source.items()):
            metrics[f"eval/accuracy/{source}"] = fmean(values)
    return metrics
