"""Step metrics: the table that defines every key, and those computed from a rollout phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean

from jaxtyping import Float
from torch import Tensor

from megatron_rl.trainer.rollouts import Experience
from megatron_rl.types import SyncReport, TokenScores, UpdateResult, largest

# Every key of metrics.jsonl: an exact name, or a prefix that ends in "/" with the rule for what stands behind it.
TABLE: Mapping[str, str] = {
    "step": "number of the finished step; 0 is the state before training",
    "reward/mean": "mean total reward of the responses of the step, after rollout hooks and before shaping",
    "reward/std": "population standard deviation of the same",
    "reward/accuracy": "share of responses whose accuracy reward is 1",
    "reward/part/": "mean of one part of the reward, before its weight",
    "rollout/response_tokens_mean": "mean response length in tokens",
    "rollout/response_tokens_max": "longest response in tokens",
    "rollout/truncated_share": "share of responses cut by the length limit",
    "rollout/discarded_groups": "groups thrown away by dynamic sampling",
    "rollout/tries": "rounds of generation of dynamic sampling",
    "rollout/num_responses": "responses of the step",
    "rollout/entropy": "mean entropy of the policy at step start, in nats",
    "hook/": "hook/<name of a rollout hook>/<key>: what the hook reports of the step",
    "credit/": "statistics of the advantage estimation, see the method's card",
    "loss/": "minibatch losses, mean over the optimizer steps",
    "loss/total": "policy loss + KL loss - entropy bonus",
    "policy/": "ratio current / old and shares of clipped tokens, mean over the optimizer steps (largest for *_max)",
    "entropy/": "entropy of the policy during the update, in nats",
    "kl/": "divergence estimates during the update, in nats",
    "optim/grad_norm": "gradient norm before clipping, mean over the optimizer steps",
    "optim/learning_rate": "learning rate of the last optimizer step",
    "optim/skipped": "optimizer steps left out because loss or gradient norm was not finite",
    "optim/empty_minibatches": "minibatches without a response to train on",
    "mismatch/logprob_abs_diff_mean": "mean |old logprob - sampler logprob| over response tokens, in nats",
    "mismatch/logprob_abs_diff_max": "largest of the same",
    "mismatch/ratio_mean": "mean exp(old - sampler); 1 when trainer and sampler agree",
    "mismatch/kl_k3": "mean exp(d) - d - 1 with d = old - sampler: KL(sampler || trainer), in nats",
    "sync/bytes_sent": "bytes rank 0 sent to other ranks in the weight sync",
    "sync/bytes_total": "bytes of weights that rank 0 took over in the weight sync",
    "sync/canary_logprob_diff": "mean |engine - policy| logprob of the fixed sequences after the weight sync, where compared, in nats",
    "sync/canary_logprob_diff_max": "the same, of the token where it is largest",
    "eval/": "held-out evaluation, at the steps that have one",
    "time/": "seconds of one phase on rank 0",
    "throughput/response_tokens_per_s": "response tokens of the step / whole step seconds",
    "memory/rss_gib": "resident memory of rank 0",
    "memory/": "<phase>_<what>_gib on rank 0 at the end of a phase: allocated and reserved by torch, engine (held by vLLM), used (all of "
    "the device), host",
}  # fmt: skip


class Clock:
    """Adds up wall seconds by phase: ``with clock("rollout"): ...``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - begin


def rollout_metrics(experience: Experience) -> dict[str, float]:
    """Rewards, lengths and truncation of one rollout phase."""
    lengths = experience.sequences.response_lengths.double()
    metrics = {
        "reward/mean": experience.rewards.mean().item(),
        "reward/std": experience.rewards.std(unbiased=False).item(),
        "reward/accuracy": experience.correct.double().mean().item(),
        "rollout/response_tokens_mean": lengths.mean().item(),
        "rollout/response_tokens_max": lengths.max().item(),
        "rollout/truncated_share": experience.truncated.double().mean().item(),
        "rollout/discarded_groups": experience.discarded_groups,
        "rollout/tries": experience.tries,
        "rollout/num_responses": len(experience.responses),
    }
    parts: dict[str, list[float]] = defaultdict(list)
    for response in experience.responses:
        for name, value in response.score.parts.items():
            parts[name].append(value)
    metrics |= experience.hook_metrics
    return metrics | {f"reward/part/{name}": sum(values) / len(values) for name, values in sorted(parts.items())}


def mismatch_metrics(old_logprobs: Float[Tensor, " tokens"], sampler_logprobs: Float[Tensor, " tokens"]) -> dict[str, float]:
    """How far the trainer's probabilities are from the sampler's on the sampled tokens, same weights on both sides."""
    difference = (old_logprobs - sampler_logprobs).double()
    if difference.numel() == 0:
        return {}
    return {
        "mismatch/logprob_abs_diff_mean": difference.abs().mean().item(),
        "mismatch/logprob_abs_diff_max": difference.abs().max().item(),
        "mismatch/ratio_mean": difference.exp().mean().item(),
        "mismatch/kl_k3": (difference.exp() - difference - 1).mean().item(),
    }


def entropy_metrics(old: TokenScores) -> dict[str, float]:
    return {} if old.entropy is None else {"rollout/entropy": old.entropy.double().mean().item()}


def sync_metrics(report: SyncReport) -> dict[str, float]:
    metrics: dict[str, float] = {"sync/bytes_sent": report.bytes_sent, "sync/bytes_total": report.bytes_total}
    canary = {"sync/canary_logprob_diff": report.canary_logprob_diff, "sync/canary_logprob_diff_max": report.canary_logprob_diff_max}
    return metrics | {key: value for key, value in canary.items() if value is not None}


def update_metrics(updates: Sequence[UpdateResult]) -> dict[str, float]:
    """Mean over optimizer steps; maximum for keys that end in ``_max``; sum of the skipped ones; last learning rate."""
    if not updates:
        return {}
    rows = [{**update.metrics, "loss/total": update.loss, "optim/grad_norm": update.grad_norm} for update in updates]
    keys = dict.fromkeys(key for row in rows for key in row)
    values = {key: [row[key] for row in rows if key in row] for key in keys}
    merged = {key: largest(found) if key.endswith("_max") else fmean(found) for key, found in values.items()}
    return merged | {"optim/learning_rate": updates[-1].learning_rate, "optim/skipped": sum(update.skipped for update in updates)}


def defined(key: str) -> bool:
    """Whether the table defines ``key``."""
    return key in TABLE or any(key.startswith(prefix) for prefix in TABLE if prefix.endswith("/"))
