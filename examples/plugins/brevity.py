"""A shaper: a correct response longer than its group's mean earns less. The page: shaper.md."""

from torch import Tensor, where

from megatron_rl.loss import Evidence, register_shaper


@register_shaper("brevity")
def brevity(advantages: Tensor, evidence: Evidence, *, strength: float = 0.5) -> Tensor:
    """A / (1 + strength (L / mean L - 1)) where A > 0, the response is correct and L > mean L."""
    lengths = evidence.lengths.to(advantages.dtype)
    excess = lengths / evidence.groups.broadcast(evidence.groups.mean(lengths)) - 1
    long_and_right = evidence.correct & (excess > 0) & (advantages > 0)
    return where(long_and_right, advantages / (1 + strength * excess), advantages)
