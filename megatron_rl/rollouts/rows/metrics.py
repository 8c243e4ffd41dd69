"""Step metrics, computed from the parts of a step. ``reporting.metrics`` defines every key."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.profiler import record_function

from megatron_rl.annealing import Annealing
from megatron_rl.passes import TokenScores, UpdateResult
from megatron_rl.rollouts.rows.experience import Experience
from megatron_rl.rollouts.rows.partials import (
    mismatch_of_partials,
    mismatch_partials,
    of_all_rows,
    response_sums,
    token_mean,
)
from megatron_rl.runtime.launch import World
from megatron_rl.types import SyncReport, largest


class Clock:
    """Adds up wall seconds by phase: ``with clock("rollout"): ...``. Traces show the phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            with record_function(phase):
                yield
        finally:
            self.seconds[phase] += time.perf_counter() - begin

    def add(self, seconds: Mapping[str, float]) -> None:
        """Adds what another clock measured."""
        for phase, value in seconds.items():
            self.seconds[phase] += value


def rollout_metrics(experience: Experience) -> dict[str, float]:
    """Rewards, where any was judged, lengths and truncation of the responses that were sampled."""
    rows = _sampled(experience)
    lengths = experience.loss_tokens[rows].double()
    rewards = experience.rewards[rows]
    correct = experience.correct[rows]
    is_judged = any(experience.responses.scores[row].problem is None for row in rows)
    of_rewards = {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(unbiased=False).item(),
        "reward/accuracy": correct.double().mean().item(),
        "reward/excluded_share": experience.excluded_share,
    }
    metrics = {
        **(of_rewards if is_judged else {}),
        "rollout/response_tokens_mean": lengths.mean().item(),
        "rollout/response_tokens_max": lengths.max().item(),
        "rollout/truncated_share": experience.truncated[rows].double().mean().item(),
        "rollout/discarded_groups": experience.discarded_groups,
        "rollout/sampling_rounds": experience.sampling_rounds,
        "rollout/num_responses": len(experience.responses),
    }
    for name, chosen in (("correct", correct), ("wrong", ~correct)):
        if is_judged and chosen.any():
            metrics[f"rollout/response_tokens_{name}_mean"] = lengths[chosen].mean().item()
    response_lengths = experience.sequences.response_lengths[rows]
    metrics |= temperature_metrics(experience.annealing, response_lengths)
    metrics |= experience.hook_metrics
    metrics |= experience.source_metrics
    scores = [experience.responses.scores[row] for row in rows]
    facts = _by_name(score.environment for score in scores)
    metrics |= {f"environment/{name}": fmean(values) for name, values in facts.items()}
    parts = _by_name(score.parts for score in scores)
    for name, values in sorted(parts.items()):
        metrics[f"reward/part/{name}"] = sum(values) / len(values)
    return metrics


def _by_name(several: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for values in several:
        for name, value in values.items():
            found[name].append(value)
    return found


def temperature_metrics(
    annealing: Annealing | None, lengths: Int[Tensor, " responses"]
) -> dict[str, float]:
    """Temperatures of the tokens of responses; empty where they have a single one."""
    if annealing is None:
        return {}
    by_position = annealing.of_positions(torch.arange(int(lengths.max()))).double()
    sums = by_position.cumsum(0)[lengths - 1]
    return {
        "rollout/temperature_mean": (sums.sum() / lengths.sum()).item(),
        "rollout/temperature_min": by_position.min().item(),
        "rollout/anneal_decay_tokens": annealing.decay_tokens,
    }


def _sampled(experience: Experience) -> np.ndarray:
    """The rows that were sampled; all rows if none was."""
    is_demonstration = experience.responses.is_demonstration
    return np.flatnonzero(is_demonstration.all() | ~is_demonstration)


def token_metrics(experience: Experience, old: TokenScores, world: World) -> dict[str, float]:
    """Collective. Of the tokens of all ranks: how far the trainer's probabilities are from the
    sampler's, same weights on both sides; and the entropy of the old policy, where its scores have
    one. ``old``: of the rows of this rank."""
    tokens = experience.responses.tokens
    sampler_logprobs, old_logprobs = tokens.columns["sampler_logprobs"], old.logprobs.numpy()
    entropy = old.columns.get("entropy")
    entropies = None if entropy is None else entropy.numpy()
    counted = tokens.lengths
    sampled = tokens.columns.get("sampled")
    if sampled is not None:  # what was appended has no logprob of the sampler
        counted = response_sums(sampled, tokens.lengths).astype(np.int64)
        sampler_logprobs, old_logprobs = sampler_logprobs[sampled], old_logprobs[sampled]
        entropies = None if entropies is None else entropies[sampled]
    partials = mismatch_partials(old_logprobs, sampler_logprobs, counted)
    if entropies is not None:
        partials = np.column_stack([partials, response_sums(entropies, counted)])
    rows = _sampled(experience)
    table = of_all_rows(experience.responses, partials, world)
    # The sampler logprobs of demonstrations are not known.
    table[experience.responses.is_demonstration, :4] = 0
    table = table[rows]
    lengths = experience.loss_tokens.numpy()[rows]
    metrics = mismatch_of_partials(table[:, :4], int(lengths.sum()))
    if entropies is not None:
        metrics["rollout/entropy"] = token_mean(table[:, 4], lengths)
    return metrics


def credit_metrics(experience: Experience) -> dict[str, float]:
    """What the method's credit says of a scored experience, and what became of all sampled tokens:
    those keys of ``tokens/`` sum to them."""
    credit = experience.credit
    assert credit is not None
    sampled = experience.loss_tokens * torch.from_numpy(~experience.responses.is_demonstration)
    num_trained = int(sampled[credit.keep].sum())
    return {
        **{key: float(value) for key, value in credit.metrics.items()},
        "tokens/trained": num_trained,
        "tokens/filtered": int(sampled.sum()) - num_trained,
        "tokens/no_verdict": experience.excluded_tokens,
        "tokens/dropped": experience.dropped_tokens,
        "tokens/discarded": experience.discarded_tokens,
    }


def sync_metrics(report: SyncReport) -> dict[str, float]:
    """What a weight sync moved, and how far engine and policy differ where they were compared."""
    metrics = {
        "sync/bytes_sent": report.bytes_sent,
        "sync/bytes_total": report.bytes_total,
        "sync/logprob_check_diff": report.logprob_check_diff,
        "sync/logprob_check_diff_max": report.logprob_check_diff_max,
    }
    return {key: value for key, value in metrics.items() if value is not None}


def update_metrics(updates: Sequence[UpdateResult]) -> dict[str, float]:
    """Mean over optimizer steps; maximum for keys that end in ``_max``; sum of the skipped ones;
    last learning rate."""
    if not updates:
        return {}
    own = [{"loss/total": one.loss, "optim/grad_norm": one.grad_norm} for one in updates]
    values = _by_name([*(update.metrics for update in updates), *own])
    metrics: dict[str, float] = {}
    for key, of_steps in values.items():
        metrics[key] = largest(of_steps) if key.endswith("_max") else fmean(of_steps)
    metrics["optim/learning_rate"] = updates[-1].learning_rate
    metrics["optim/skipped"] = sum(update.skipped for update in updates)
    return metrics
