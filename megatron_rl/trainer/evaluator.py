"""Held-out evaluation with the rollout engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from megatron_rl.config.schema import EvaluationConfig
from megatron_rl.reporting.pass_at_k import pass_at_k
from megatron_rl.trainer.experience import Groups
from megatron_rl.trainer.rollouts import Sampler
from megatron_rl.types import Prompt, Sampling


class Evaluator:
    """Answers a fixed set of prompts and reports the ``eval/`` metrics."""

    def __init__(
        self,
        config: EvaluationConfig,
        sampler: Sampler,
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
        sampled = self._sampler.run(self._prompts, self._sampling, "held-out evaluation")
        return evaluation_metrics(sampled.groups, self.config.pass_at)


def evaluation_metrics(groups: Groups, pass_at: Sequence[int]) -> dict[str, float]:
    responses = [response for group in groups for response in group]
    lengths = [len(response.completion.token_ids) for response in responses]
    metrics = {
        "eval/accuracy": fmean(response.score.correct for response in responses),
        "eval/reward_mean": fmean(response.score.reward for response in responses),
        "eval/response_tokens_mean": fmean(lengths),
        "eval/truncated_share": fmean(response.completion.truncated for response in responses),
    }
    num_correct = [sum(response.score.correct for response in group) for group in groups]
    for k in pass_at:
        metrics[f"eval/pass_at_{k}"] = fmean(
            pass_at_k(len(group), correct, k)
            for group, correct in zip(groups, num_correct, strict=True)
        )
    by_source: dict[str, list[bool]] = defaultdict(list)
    for response in responses:
        by_source[response.prompt.data_source].append(response.score.correct)
    if len(by_source) > 1:
        for source, values in sorted(by_source.items()):
            metrics[f"eval/accuracy/{source}"] = fmean(values)
    return metrics
