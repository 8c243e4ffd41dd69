"""A policy loss: the ratio is clipped from above alone. The page: policy_loss.md."""

from torch import Tensor

from megatron_rl.loss import Terms, register_policy_loss


@register_policy_loss("one_sided")
def one_sided(terms: Terms, *, most: float = 1.2) -> Tensor:
    """-min(rho, most) A with rho = exp(logprob - old logprob); no gradient where rho is above."""
    ratio = terms.log_ratio.exp()
    return -ratio.clamp(max=most) * terms.advantages
