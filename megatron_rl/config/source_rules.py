"""Which settings go with a source of rollouts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.schema import Config

# Weights of the policy term that undo what older weights have sampled, and are bounded.
_IMPORTANCE_WEIGHTS = ("tis", "icepop")


def source_problems(config: Config) -> Iterator[str]:
    """What does not go together, one sentence each: key, value, remedy."""
    if config.source.is_servers:
        yield from _with_servers(config)
    elif config.source.staleness:
        yield (
            f"source.staleness = {config.source.staleness}: colocated engines always sample with"
            " the newest weights; set it to 0, or source=servers"
        )


def _with_servers(config: Config) -> Iterator[str]:
    staleness = config.source.staleness
    age = f"source.staleness = {staleness}: responses may be so many updates old"
    if staleness and config.method.mismatch.kind not in _IMPORTANCE_WEIGHTS:
        yield (
            f"{age}, which method.mismatch.kind = {config.method.mismatch.kind} does not correct;"
            " set method.mismatch.kind=tis method.mismatch.cap=2.0 (truncated importance"
            " sampling), icepop, or source.staleness=0"
        )
    if staleness and config.mismatch_limits.abort_above is not None:
        yield (
            f"mismatch_limits.abort_above = {config.mismatch_limits.abort_above:g}: {age}, so"
            " sampler and trainer differ on purpose; set it to null"
        )
    if config.source.schedule == "free" and not staleness:
        yield (
            "source.schedule = free: with source.staleness = 0 every response is of the newest"
            " weights in any case; set it to lockstep, or raise source.staleness"
        )
    if config.weight_sync.method == "gather":
        yield (
            "weight_sync.method = gather: servers take their weights by a plan; set it to auto or"
            " reshard"
        )
    if config.rollout.quantization is not None:
        yield (
            f"rollout.quantization = {config.rollout.quantization}: servers take weights in the"
            " format they keep them in; set it to null"
        )
    if config.memory.offload:
        yield (
            f"memory.offload = {list(config.memory.offload)}: policy and servers share no device,"
            " so nothing leaves it; set it to []"
        )
