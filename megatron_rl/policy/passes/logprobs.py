"""Logprobs, entropies and most likely tokens from hidden states, a chunk of logits at a time.

The output layer, softmax and gather are one differentiable operation over chunks of tokens. Forward
keeps three or four numbers per token and drops the logits; backward computes each chunk's logits
once more, in one reused buffer.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from megatron_rl.policy.passes.head import Head

# Response tokens whose logits are alive at a time in a pass of the policy. A chunk of 256 would
# stay in the cache of a GPU, but every chunk reads the weight once a product and, in backward,
# reads and writes its whole float32 gradient. By bytes for 38,016 rows of 3,584 (not measured on a
# GPU): 1,024 tokens in four chunks move 5.7 GB more of these, and save no more than 4.4 GB of
# passes over logits.
LOGPROB_CHUNK_TOKENS = 1024
# The entropy needs x and exp(x) at once: so many parts of a chunk take turns in a second buffer.
ENTROPY_SPLIT = 8


@dataclass(frozen=True)
class TokenValues:
    """What a pass computes of tokens: logprobs in nats, and outputs by their names."""

    logprobs: Float[Tensor, " t"]
    columns: Mapping[str, Tensor] = field(default_factory=dict)


def token_values(
    hidden: Float[Tensor, "t h"],
    weight: Float[Tensor, "v_local h"],
    targets: Int[Tensor, " t"],
    head: Head,
) -> TokenValues:
    """Logprobs of ``softmax(hidden @ W.T / temperature)`` in nats, float32, and the columns
    ``entropy``, ``topk_logprobs`` or ``likely_logprobs``, and ``is_argmax``, as ``head`` wants
    them.

    With ``x = hidden @ W.T / temperature``, W the rows ``[0, vocab_size)`` of the output layer:

        logprobs[i] = x[i, targets[i]] - logsumexp_v x[i, v]
        entropy[i] = -sum_v p[i, v] * log p[i, v]

    Both sums are over ``head.kept[i]`` where it names tokens: the distribution that a sampler with
    top-k or top-p has drawn token i from, when its logits are x. The target must be one of them.

    ``topk_logprobs``: of the ``top_k`` most likely tokens, most likely first, with gradient; which
    of two equally likely tokens is the k-th is open. ``likely_logprobs``: of the ids that are
    given, in their order, with gradient; -inf in free places. ``is_argmax``: none is more likely.

    ``weight`` is this rank's block of rows of W; padding has no probability and a zero gradient. A
    target outside ``[0, vocab_size)`` has probability 0: its logprob is ``-inf``. ``hidden`` and
    ``targets`` are equal on all ranks of the group; the gradient of ``hidden`` comes back summed
    over it (so a gather in front of this must split, not reduce, in its backward).

    Products of 16-bit operands are kept in float32 (never rounded to 16 bits), sums and softmax are
    float32; float64 inputs are computed in float64. Inputs are never modified. ``t`` may be 0.

    The gradient of the entropy takes one more pass over a chunk. Collectives: one all-gather of 3
    or 4 numbers (and 2 for each of the ``top_k``, 1 of each given id) per token forward, one
    all-reduce of the gradient of ``hidden`` backward. Memory: a chunk, ``[chunk_tokens, v_local]``
    in float32, plus in backward the gradients.

    Raises:
        ValueError: the vocabulary has fewer than ``top_k`` tokens.
    """
    if head.top_k > head.vocab_size:
        raise ValueError(
            f"token_values: top_k is {head.top_k}, but the vocabulary has {head.vocab_size} tokens"
        )
    logprobs, entropies, topk, is_argmax = _Logprobs.apply(hidden, weight, targets, head)
    columns = {}
    if head.entropy != "none":
        columns["entropy"] = entropies
    if head.num_wanted:
        name = "topk_logprobs" if head.likely is None else "likely_logprobs"
        columns |= {name: topk, "is_argmax": is_argmax}
    return TokenValues(logprobs, columns)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with_entropy = head.entropy != "none"
        chunks = Chunks(hidden, weight, targets, head)
        everyone = _gather(_local_stats(chunks, with_entropy), head.group)
        # [ranks, 3 or 4 sums and what is wanted of single tokens, t]: see ``_local_stats``.
        num_sums = 4 if with_entropy else 3
        logprobs, logsumexp, entropies = _combine(everyone[:, :num_sums], with_entropy)
        topk, tokens = _wanted(everyone[:, num_sums:], head)
        # The target's logit, which one rank has and the others give as -inf, against the largest.
        is_argmax = everyone[:, 2].amax(0) == everyone[:, 0].amax(0)
        topk = topk - logsumexp[:, None]
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropies, tokens)
        ctx.head = head
        fixed = [is_argmax]
        fixed += [] if head.entropy == "grad" else [entropies]
        fixed += [] if head.num_wanted else [topk]
        ctx.mark_non_differentiable(*fixed)  # in one call: only the last one counts
        return logprobs, entropies, topk, is_argmax

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor, grad_topk: Tensor, _: Any
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, logsumexp, entropies, tokens = ctx.saved_tensors
        head: Head = ctx.head
        chunks = Chunks(hidden, weight, targets, head)
        gradients = Gradients(chunks, hidden, weight, ctx.needs_input_grad)
        for rows, x in chunks:
            # x becomes the gradient of the logits in place: first log p, then -p times the outer
            # gradient, then that gradient once more at the target.
            x.sub_(logsumexp[rows, None])
            divisor = head.divisor(rows)
            # Logits were divided by it, and so are their gradients.
            outer = grad_logprobs[rows] / divisor
            every = outer  # of log p of all wanted tokens: d log p is -p, and 1 at the token
            if head.num_wanted:
                of_topk = grad_topk[rows] / _column(divisor)
                every = outer + of_topk.sum(1)
            if head.entropy == "grad":
                _entropy_gradient_(x, every, grad_entropies[rows] / divisor, entropies[rows])
            else:
                x.exp_().mul_(-every[:, None])
            is_own, column = chunks.own(targets[rows])
            if chunks.width:
                # A target of another rank adds 0 to column 0.
                x.scatter_add_(1, column[:, None], (outer * is_own)[:, None])
            if chunks.width and head.num_wanted:
                is_own, column = chunks.own(tokens[rows])
                x.scatter_add_(1, column, of_topk * is_own)
            gradients.add(rows, x)
        return (*gradients.whole(head.group), None, None)


class Chunks:
    """Iterates over ``(rows, x)``: a slice of tokens, and its scaled logits.

    They are those of this rank's true columns, in a reused buffer that may be overwritten.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head) -> None:
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.first = weight.shape[0] * head.rank
        # Padding is at the end of the vocabulary, so masking it is to leave it out; a whole block
        # may be padding.
        self.width = min(max(head.vocab_size - self.first, 0), weight.shape[0])
        self.hidden = hidden
        self.targets = targets
        self.head = head
        self.size = head.chunk_tokens
        self.weight = self.operand(weight[: self.width])

    def operand(self, x: Tensor) -> Tensor:
        """``x`` as the matrix product takes it.

        CUDA multiplies 16-bit operands into a float32 result, the CPU does not.
        """
        return x.to(self.hidden.dtype if x.is_cuda else self.dtype)

    def zeros_like(self, x: Tensor) -> Tensor:
        """Zeros of the shape of ``x``, in the format of sums."""
        return torch.zeros(x.shape, dtype=self.dtype, device=x.device)

    def own(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens are in this rank's true columns, and the column (0 for the others)."""
        column = tokens.long() - self.first
        is_own = (column >= 0) & (column < self.width)
        return is_own, torch.where(is_own, column, 0)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        num_tokens = self.hidden.shape[0]
        buffer = self.hidden.new_empty((min(self.size, num_tokens), self.width), dtype=self.dtype)
        for start in range(0, num_tokens, self.size):
            rows = slice(start, min(start + self.size, num_tokens))
            x = buffer[: rows.stop - rows.start]
            multiply(self.operand(self.hidden[rows]), self.weight.t(), out=x)
            divisor = _column(self.head.divisor(rows))
            if isinstance(divisor, Tensor) or divisor != 1.0:  # a pass over all logits
                x.div_(divisor)
            self._truncate_(rows, x)
            yield rows, x

    def _truncate_(self, rows: slice, x: Tensor) -> None:
        """Gives probability 0 to all tokens but ``head.kept``, in place."""
        if self.head.kept is None or not self.width:
            return
        kept = self.head.kept[rows]
        is_own, column = self.own(kept)
        # exp() of it is 0, and it is small enough for its products with gradients to be finite: in
        # that of the entropy they are multiplied by this 0.
        nothing = -math.sqrt(torch.finfo(self.dtype).max)
        values = torch.where(is_own, x.gather(1, column), nothing)
        x.masked_fill_((kept >= 0).any(1, keepdim=True), nothing)
        # Free places and tokens of other ranks point at column 0, which they must leave as it is.
        x.scatter_reduce_(1, column, values, "amax")


class Gradients:
    """Gradients of hidden states and output weight, from those of logits, chunk by chunk;
    ``wanted`` says for each whether it is computed.

    A weight with a ``main_grad`` in the format of sums, which megatron gives to what it trains, has
    its gradient added there: it is never rounded to 16 bits, and needs no sum of its own.
    """

    def __init__(
        self, chunks: Chunks, hidden: Tensor, weight: Tensor, wanted: Sequence[bool]
    ) -> None:
        self._chunks = chunks
        self._states = hidden
        self._head = weight
        self._hidden = chunks.zeros_like(hidden) if wanted[0] else None
        self._weight: Tensor | None = None
        if wanted[1]:
            main_grad = getattr(weight, "main_grad", None)
            self._in_main = main_grad is not None and main_grad.dtype == chunks.dtype
            self._weight = main_grad if self._in_main else chunks.zeros_like(weight)

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        """Adds the gradients of one chunk."""
        factor = self._chunks.operand(grad_logits)
        if self._hidden is not None:
            multiply(factor, self._chunks.weight, out=self._hidden[rows])
        if self._weight is not None:
            states = self._chunks.operand(self._states[rows])
            own_rows = self._weight[: self._chunks.width]
            multiply(factor.t(), states, out=own_rows, accumulate=True)

    def whole(self, group: dist.ProcessGroup | None) -> tuple[Tensor | None, Tensor | None]:
        """Collective. Both gradients, each in the format of its input; that of the hidden states
        summed over the vocabulary of all ranks."""
        hidden = self._hidden
        weight = self._weight
        self._hidden = None  # sums are large: each is freed once it is copied
        self._weight = None
        if hidden is not None:
            if group is not None and hidden.shape[0]:
                dist.all_reduce(hidden, group=group)
            hidden = hidden.to(self._states.dtype)
        if weight is not None:
            # megatron adds what is returned to main_grad, and with overlapped reduction wants it.
            weight = torch.zeros_like(self._head) if self._in_main else weight.to(self._head.dtype)
        return hidden, weight


def multiply(a: Tensor, b: Tensor, *, out: Tensor, accumulate: bool = False) -> None:
    """``out = a @ b`` or ``out += a @ b``; a 16-bit product goes to a float32 ``out`` unrounded."""
    mixed = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    if accumulate:
        torch.addmm(out, a, b, **mixed, out=out)
    else:
        torch.mm(a, b, **mixed, out=out)


def _local_stats(chunks: Chunks, entropy: bool) -> Tensor:
    """``[3 or 4 + 2 top_k, t]``: what follows from this rank's columns for those of all ranks.

    max m, sum exp(x - m), x of the target or -inf, and for the entropy sum (x - m) exp(x - m);
    then the largest x and their tokens (float32 holds every number of a token), or x of the given
    tokens, or -inf, alone.
    """
    likely = chunks.head.likely
    num_wanted = chunks.head.num_wanted
    num_sums = 4 if entropy else 3
    stats = torch.zeros(
        (num_sums + num_wanted * (2 if likely is None else 1), chunks.hidden.shape[0]),
        dtype=chunks.dtype,
        device=chunks.hidden.device,
    )
    # Views into ``stats``, [num_wanted, t] each; the second is empty where tokens are given.
    largest, tokens = stats[num_sums:].split([num_wanted, len(stats) - num_sums - num_wanted])
    largest.fill_(-torch.inf)  # where this rank has fewer columns
    if chunks.width == 0:
        stats[0] = torch.finfo(chunks.dtype).min  # finite: (m - max) * 0 below must be 0, not nan
        stats[2] = -torch.inf
        return stats
    for rows, x in chunks:
        maximum = stats[0, rows]
        torch.amax(x, 1, out=maximum)
        if likely is not None:
            is_own, columns = chunks.own(likely[rows])
            largest[:, rows] = torch.where(is_own, x.gather(1, columns), -torch.inf).t()
        elif num_wanted:
            found, columns = x.topk(min(num_wanted, chunks.width), dim=1)
            largest[: found.shape[1], rows] = found.t()
            tokens[: found.shape[1], rows] = (columns.t() + chunks.first).to(x.dtype)
        is_own, column = chunks.own(chunks.targets[rows])
        stats[2, rows] = torch.where(is_own, x.gather(1, column[:, None])[:, 0], -torch.inf)
        x.sub_(maximum[:, None])
        if entropy:
            size = split_size(x)
            parts = (stats[1, rows].split(size), stats[3, rows].split(size), x.split(size))
            for sums, weighted, y in zip(*parts, strict=True):
                e = y.exp()
                torch.sum(e, 1, out=sums)
                torch.sum(y.mul_(e), 1, out=weighted)
        else:
            torch.sum(x.exp_(), 1, out=stats[1, rows])
    return stats


def _gather(stats: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``[ranks, numbers, t]``. No tokens, no collective: all ranks of the group have the same t."""
    if group is None or stats.shape[1] == 0:
        return stats[None]
    everyone = stats.new_empty((dist.get_world_size(group), *stats.shape))
    dist.all_gather(list(everyone.unbind(0)), stats, group=group)
    return everyone


def _combine(stats: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``(logprobs, logsumexp, entropies)`` of all ranks' columns.

    They are equal on all ranks: each does the same sums in the same order.
    """
    maximum = stats[:, 0].amax(0)
    # [ranks, t]: what moves a rank's sum of exp(x - m) from its own maximum to that of all.
    scale = (stats[:, 0] - maximum).exp()
    total = (stats[:, 1] * scale).sum(0)
    log_total = total.log()
    # The rank that has the target knows its x; the others say -inf.
    logprobs = stats[:, 2].amax(0) - maximum - log_total
    if not entropy:
        return logprobs, maximum + log_total, stats.new_empty(0)
    # A rank's sum of (x - m) exp(x - m), moved from its own maximum m to that of all ranks.
    weighted = (stats[:, 3] + stats[:, 1] * (stats[:, 0] - maximum)) * scale
    mean = weighted.sum(0) / total  # E[x] - maximum
    return logprobs, maximum + log_total, log_total - mean


def _wanted(stats: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """``(x, token)``, ``[t, num_wanted]``, of the given tokens or the largest x of all ranks."""
    if head.likely is not None:
        return stats.amax(0).t(), head.likely
    ranks, _, num_tokens = stats.shape
    top_k = head.top_k
    if not top_k:
        nothing = stats.new_empty((num_tokens, 0))
        return nothing, nothing.long()
    # [2, ranks * top_k, t]: the candidates of all ranks side by side, values and tokens.
    values, tokens = stats.reshape(ranks, 2, top_k, num_tokens).transpose(0, 1).flatten(1, 2)
    found, place = values.t().topk(top_k, dim=1)
    return found, tokens.t().gather(1, place).long()


def _column(divisor: float | Tensor) -> float | Tensor:
    return divisor[:, None] if isinstance(divisor, Tensor) else divisor


def split_size(x: Tensor) -> int:
    """Rows of a chunk that have x and exp(x) in memory at once."""
    return max(1, math.ceil(x.shape[0] / ENTROPY_SPLIT))


def _entropy_gradient_(
    logp: Tensor, outer: Tensor, outer_entropy: Tensor, entropies: Tensor
) -> None:
    """Overwrites log p by ``-p * (outer + outer_entropy * (log p + H))``.

    d logprob = onehot - p (onehot is added later), d H = -p (log p + H).
    """
    constant = outer + outer_entropy * entropies
    size = split_size(logp)
    parts = (logp.split(size), constant.split(size), outer_entropy.split(size))
    for y, c, g in zip(*parts, strict=True):
        p = y.exp()
        y.mul_(g[:, None]).add_(c[:, None]).mul_(p).neg_()
