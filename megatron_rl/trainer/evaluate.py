"""Held-out evaluation with the rollout engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean

from megatron_rl.evaluation.pass_at_k import pass_at_k
from megatron_rl.trainer.rollouts import Generator, Response
from megatron_rl.types import Prompt, Sampling


class Evaluator:
    """Answers a fixed set of prompts and reports the ``eval/`` metrics."""

    def __init__(self, generator: Generator, prompts: Sequence[Prompt], sampling: Sampling, pass_at: Sequence[int]) -> None:
        self._generator, self._prompts, self._sampling, self._pass_at = generator, prompts, sampling, pass_at

    def run(self, clock: Callable) -> dict[str, float]:
        """Accuracy (mean over responses), pass@k (unbiased, mean over prompts), response length in tokens, truncated share,
        and the accuracy of each data source."""
        groups = self._generator.run(self._prompts, self._sampling, clock, "held-out evaluation")
        return evaluation_metrics(groups, self._pass_at)


def evaluation_metrics(groups: Sequence[Sequence[Response]], pass_at: Sequence[int]) -> dict[str, float]:
    responses = [response for group in groups for response in group]
    metrics = {
        "eval/accuracy": fmean(response.score.correct for response in responses),
        "eval/reward_mean": fmean(response.score.reward for response in responses),
        "eval/response_tokens_mean": fmean(len(response.completion.token_ids) for response in responses),
        "eval/truncated_share": fmean(response.completion.truncated for response in responses),
    }
    for k in pass_at:
        metrics[f"eval/pass_at_{k}"] = fmean(pass_at_k(len(group), sum(r.score.correct for r in group), k) for group in groups)
    by_source: dict[str, list[bool]] = defaultdict(list)
    for response in responses:
        by_source[response.prompt.data_source].append(response.score.correct)
    if len(by_source) > 1:
        metrics.update({f"eval/accuracy/{source}": fmean(values) for source, values in sorted(by_source.items())})
    return metrics
