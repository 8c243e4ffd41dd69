"""Entropy of the nucleus: of the most likely tokens that together reach a probability.

As in ``logprobs.py``, a chunk of logits at a time, by all ranks that hold a part of the vocabulary;
a pass of its own, for methods that read it.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from megatron_rl.policy.passes.logprobs import Chunks, Gradients, Head, split_size

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_DIGIT_BITS = 8
_DIGIT_MASK = (1 << _DIGIT_BITS) - 1


def nucleus_entropy(
    hidden: Float[Tensor, "t h"], weight: Float[Tensor, "v_local h"], head: Head, probability: float
) -> Float[Tensor, " t"]:
    """-sum_v q_v log q_v in nats, with gradient, over the smallest set of most likely tokens whose
    probability reaches ``probability``; q = p / (probability of the set).

    Tokens as likely as the least likely of the set belong to it. The set has no gradient: it is
    taken as given. ``hidden``, ``weight`` and ``head`` are those of ``logprobs.token_values``, and
    so is the memory. Collectives of a chunk: two forward, and one for each 8 bits of a threshold.
    Source: SIREN (arXiv 2509.25133).
    """
    targets = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    return _NucleusEntropy.apply(hidden, weight, targets, head, probability)


class _NucleusEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head, probability: float
    ) -> Tensor:
        chunks = Chunks(hidden, weight, targets, head)
        # Rows: largest logit, threshold of exp(x - largest), log of the sum of the set, entropy.
        found = torch.zeros(4, hidden.shape[0], dtype=chunks.dtype, device=hidden.device)
        for rows, x in chunks:
            maximum, threshold, log_sum, entropy = found[:, rows]
            _largest(x, maximum, head.group)
            x.sub_(maximum[:, None]).exp_()
            threshold.copy_(_threshold(x, probability, head.group))
            size = split_size(x)
            for part, bound in zip(x.split(size), threshold.split(size)):
                part.mul_(part >= bound[:, None])
            sums = torch.stack([x.sum(1), _entropy_sum(x)])
            _add(sums, head.group)
            log_sum.copy_(sums[0].log())
            entropy.copy_(log_sum - sums[1] / sums[0])
        ctx.save_for_backward(hidden, weight, targets, found)
        ctx.head = head
        return found[3].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, found = ctx.saved_tensors
        head: Head = ctx.head
        chunks = Chunks(hidden, weight, targets, head)
        gradients = Gradients(chunks, hidden, weight, ctx.needs_input_grad)
        for rows, x in chunks:
            maximum, threshold, log_sum, entropy = found[:, rows]
            outer = grad_outputs[0][rows] / head.divisor(rows)
            x.sub_(maximum[:, None])
            _gradient_(x, threshold, log_sum, entropy, outer)
            gradients.add(rows, x)
        return (*gradients.whole(head.group), None, None, None)


def _largest(x: Tensor, out: Tensor, group: dist.ProcessGroup | None) -> None:
    """The largest x over the columns of all ranks; a rank may have none."""
    out.fill_(torch.finfo(x.dtype).min)
    if x.shape[1]:
        torch.amax(x, 1, out=out)
    if group is not None:
        dist.all_reduce(out, op=dist.ReduceOp.MAX, group=group)


def _threshold(weights: Tensor, share: float, group: dist.ProcessGroup | None) -> Tensor:
    """The largest number such that the weights from it on sum up to ``share`` of all. They are in
    [0, 1], where numbers are ordered like their bits: a digit of 8 bits is found at a time, the
    highest first, by one pass over the weights."""
    bits = _BITS[weights.dtype]
    found = torch.zeros(weights.shape[0], dtype=bits, device=weights.device)
    above = weights.new_zeros(weights.shape[0])  # the sum of weights with higher digits than found
    wanted: Tensor | None = None
    size = split_size(weights)
    for shift in reversed(range(0, 8 * weights.element_size(), _DIGIT_BITS)):
        # [t, 256]: the weights that have the digits found so far, summed by their next digit.
        sums = weights.new_zeros(weights.shape[0], 1 << _DIGIT_BITS)
        for part, digits, out in zip(*(each.split(size) for each in (weights, found, sums))):
            keys = part.view(bits) >> shift
            higher = (digits >> shift)[:, None]
            has_higher = (keys ^ higher) < (1 << _DIGIT_BITS)  # no bit above this digit differs
            out.scatter_add_(1, (keys & _DIGIT_MASK).long(), part * has_higher)
        _add(sums, group)
        # Column d: the sum from digit d on. Column 256: of higher digits alone.
        from_digit = torch.nn.functional.pad(sums, (0, 1)).flip(1).cumsum(1).flip(1)
        from_digit = from_digit + above[:, None]
        if wanted is None:
            wanted = share * from_digit[:, 0]
        # Sums fall from column to column. That of column 0 was reached with the digit before, but
        # may round to less here.
        reached = (from_digit[:, :-1] >= wanted[:, None]).sum(1)
        digit = (reached - 1).clamp(min=0)
        above = from_digit.gather(1, digit[:, None] + 1)[:, 0]
        found |= (digit << shift).to(bits)
    return found.view(weights.dtype)


def _entropy_sum(weights: Tensor) -> Tensor:
    """sum w log w; 0 of a weight of 0."""
    sums = weights.new_zeros(weights.shape[0])
    size = split_size(weights)
    for part, out in zip(weights.split(size), sums.split(size)):
        torch.sum(torch.special.xlogy(part, part), 1, out=out)
    return sums


def _gradient_(
    x: Tensor, threshold: Tensor, log_sum: Tensor, entropy: Tensor, outer: Tensor
) -> None:
    """x (logits less the largest) becomes -q (log q + H) times the outer gradient, 0 outside."""
    size = split_size(x)
    parts = (each.split(size) for each in (x, threshold, log_sum, entropy, outer))
    for part, bound, shift, h, factor in zip(*parts):
        is_in = part.exp() >= bound[:, None]
        log_q = part.sub_(shift[:, None])
        q = log_q.exp()
        log_q.add_(h[:, None]).mul_(q).mul_(-factor[:, None]).mul_(is_in)


def _add(values: Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(values, group=group)
