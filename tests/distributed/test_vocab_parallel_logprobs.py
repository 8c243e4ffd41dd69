"""Two ranks, each with half of a padded vocabulary, against one rank with all of it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.policy.passes.logprobs import Head, token_values
from megatron_rl.policy.passes.nucleus import nucleus_entropy
from tests.ranks import on_ranks

NUM_TOKENS, HIDDEN, PADDED_VOCAB = 13, 8, 24


def assert_close(what: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    difference = (got.double() - want.double()).abs().max().item() if got.numel() else 0.0
    assert got.shape == want.shape, what
    assert difference <= tolerance, f"{what}: off by {difference}"


@on_ranks(2)
@pytest.mark.parametrize(
    ("dtype", "vocab_size", "entropy", "tolerance", "scale"),
    [
        pytest.param(torch.float64, 19, "none", 1e-12, 2.0, id="float64"),
        pytest.param(torch.float64, 19, "grad", 1e-12, 2.0, id="float64 entropy gradient"),
        pytest.param(torch.float32, 24, "value", 1e-5, 2.0, id="float32 entropy value"),
        pytest.param(torch.float64, 11, "grad", 1e-12, 2.0, id="second rank all padding"),
        # exp() of their distance overflows float32
        pytest.param(torch.float32, 24, "grad", 1e-2, 100.0, id="maxima far apart"),
        # gradients are rounded to bfloat16 before the sum over ranks or after
        pytest.param(torch.bfloat16, 19, "grad", 0.1, 2.0, id="bfloat16"),
    ],
)
def test_two_ranks_equal_one(
    dtype: torch.dtype, vocab_size: int, entropy: str, tolerance: float, scale: float
):
    """Logprobs, entropy and gradients."""
    draw = torch.Generator().manual_seed(5)
    rank = dist.get_rank()
    hidden = (scale * torch.randn(NUM_TOKENS, HIDDEN, generator=draw, dtype=torch.float64)).to(
        dtype
    )
    weight = torch.randn(PADDED_VOCAB, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, vocab_size, (NUM_TOKENS,), generator=draw)
    factors = torch.randn(2, NUM_TOKENS, generator=draw)
    factors = factors.to(torch.promote_types(dtype, torch.float32))

    def scores_and_gradients(weight: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        values = token_values(*inputs, targets, Head(0.8, vocab_size, 5, group, entropy))
        logprobs, entropies = values.logprobs, values.columns.get("entropy")
        loss = (factors[0] * logprobs).sum()
        if entropy == "grad":
            loss = loss + (factors[1] * entropies).sum()
        gradients = torch.autograd.grad(loss, inputs)
        shown = torch.zeros(0) if entropies is None else entropies.detach()
        return [logprobs.detach(), shown, *gradients]

    one = scores_and_gradients(weight, None)
    two = scores_and_gradients(weight.chunk(2)[rank], dist.group.WORLD)
    assert_close("logprobs", two[0], one[0], tolerance)
    assert_close("entropy", two[1], one[1], tolerance)
    assert_close("hidden gradient", two[2], one[2], tolerance)
    assert_close("weight gradient", two[3], one[3].chunk(2)[rank], tolerance)
    everyone = torch.empty(2, NUM_TOKENS, dtype=two[0].dtype)
    dist.all_gather(list(everyone.unbind(0)), two[0])
    assert torch.equal(everyone[0], everyone[1]), "ranks disagree"


@on_ranks(2)
def test_no_tokens():
    weight = torch.ones(4, HIDDEN, requires_grad=True)
    hidden = torch.empty(0, HIDDEN, requires_grad=True)
    targets = torch.empty(0, dtype=torch.long)
    head = Head(1.0, 8, 5, dist.group.WORLD)
    token_values(hidden, weight, targets, head).logprobs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(4, HIDDEN))
    assert hidden.grad.shape == (0, HIDDEN)
    dist.barrier()  # still in step


@on_ranks(2)
@pytest.mark.parametrize(
    ("vocab_size", "top_k"),
    [
        pytest.param(19, 3, id="both halves"),
        pytest.param(11, 3, id="second rank all padding"),
        pytest.param(13, 4, id="second rank has fewer than four"),
    ],
)
def test_two_ranks_find_the_tokens_of_one(vocab_size: int, top_k: int):
    """The most likely tokens, whether the target is one, and gradients."""
    draw = torch.Generator().manual_seed(6)
    hidden = 2 * torch.randn(NUM_TOKENS, HIDDEN, generator=draw, dtype=torch.float64)
    weight = torch.randn(PADDED_VOCAB, HIDDEN, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, vocab_size, (NUM_TOKENS,), generator=draw)
    targets[:6] = (hidden @ weight[:vocab_size].t()).argmax(1)[:6]
    factors = torch.randn(NUM_TOKENS, top_k, generator=draw, dtype=torch.float64)

    def found(weight: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        values = token_values(*inputs, targets, Head(0.8, vocab_size, 5, group, "value", top_k))
        topk_logprobs, is_argmax = (values.columns[key] for key in ("topk_logprobs", "is_argmax"))
        loss = (factors * topk_logprobs).sum() + values.logprobs.sum()
        gradients = torch.autograd.grad(loss, inputs)
        return [topk_logprobs.detach(), is_argmax, values.logprobs, *gradients]

    one = found(weight, None)
    two = found(weight.chunk(2)[dist.get_rank()], dist.group.WORLD)
    assert_close("most likely", two[0], one[0], 1e-12)
    assert torch.equal(two[1], one[1]) and two[1].any() and not two[1].all()
    assert_close("logprobs", two[2], one[2], 1e-12)
    assert_close("hidden gradient", two[3], one[3], 1e-12)
    assert_close("weight gradient", two[4], one[4].chunk(2)[dist.get_rank()], 1e-12)
    everyone = torch.empty(2, NUM_TOKENS, top_k, dtype=torch.float64)
    dist.all_gather(list(everyone.unbind(0)), two[0].contiguous())
    assert torch.equal(everyone[0], everyone[1]), "ranks disagree"


@on_ranks(2)
@pytest.mark.parametrize("vocab_size", [19, 11], ids=["both halves", "second rank all padding"])
def test_given_tokens_have_the_gradients_of_autograd(vocab_size: int):
    """Of one rank and of two, in chunks of 5, beside the logprob of the target, which may be given
    too: log-softmax over the whole vocabulary in float64. A free place is -inf without gradient."""
    draw = torch.Generator().manual_seed(7)
    hidden = 2 * torch.randn(NUM_TOKENS, HIDDEN, generator=draw, dtype=torch.float64)
    weight = torch.randn(PADDED_VOCAB, HIDDEN, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, vocab_size, (NUM_TOKENS,), generator=draw)
    order = torch.rand(NUM_TOKENS, vocab_size, generator=draw).argsort(1)
    likely = order[:, :6].int()
    likely[:3, 2] = targets[:3].int()
    likely[::4, 3] = -1
    factors = torch.randn(NUM_TOKENS, 6, generator=draw, dtype=torch.float64)
    factors[likely < 0] = 0

    def gradients(values: Tensor, logprobs: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        loss = (factors * values.masked_fill(likely < 0, 0)).sum() + logprobs.sum()
        return [values.detach(), logprobs.detach(), *torch.autograd.grad(loss, inputs)]

    def leaves(weight: Tensor) -> list[Tensor]:
        return [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]

    plain = leaves(weight)
    logp = (plain[0] @ plain[1][:vocab_size].t() / 0.8).log_softmax(1)
    values = logp.gather(1, likely.clamp(min=0).long()).masked_fill(likely < 0, -torch.inf)
    wanted = gradients(values, logp.gather(1, targets[:, None])[:, 0], plain)
    rank = dist.get_rank()
    for group, block in ((None, weight), (dist.group.WORLD, weight.chunk(2)[rank])):
        inputs = leaves(block)
        head = Head(0.8, vocab_size, 5, group, likely=likely)
        found = token_values(*inputs, targets, head)
        assert found.columns.keys() == {"likely_logprobs", "is_argmax"}
        got = gradients(found.columns["likely_logprobs"], found.logprobs, inputs)
        assert torch.equal(got[0].isinf(), likely < 0)
        assert_close("given", got[0].nan_to_num(neginf=0), wanted[0].nan_to_num(neginf=0), 1e-12)
        assert_close("logprobs", got[1], wanted[1], 1e-12)
        assert_close("hidden gradient", got[2], wanted[2], 1e-12)
        own = wanted[3] if group is None else wanted[3].chunk(2)[rank]
        assert_close("weight gradient", got[3], own, 1e-12)


def plain_nucleus_entropy(logits: Tensor, top_p: float) -> Tensor:
    """The tokens sorted, up to the one with which they reach ``top_p``."""
    probabilities, place = logits.softmax(1).sort(1, descending=True)
    before = probabilities.cumsum(1) - probabilities
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, place, before < top_p)
    log_q = logits.masked_fill(~kept, -torch.inf).log_softmax(1)
    return -(log_q.exp() * log_q.masked_fill(~kept, 0)).sum(1)


@on_ranks(2)
@pytest.mark.parametrize(
    ("dtype", "vocab_size", "top_p", "tolerance", "scale"),
    [
        pytest.param(torch.float64, 19, 0.8, 1e-12, 1.0, id="both halves"),
        pytest.param(torch.float64, 11, 0.8, 1e-12, 1.0, id="second rank all padding"),
        pytest.param(torch.float64, 19, 1.0, 1e-12, 1.0, id="all tokens"),
        pytest.param(torch.float64, 19, 1e-9, 1e-12, 1.0, id="the most likely token alone"),
        pytest.param(torch.float32, 24, 0.8, 2e-5, 1.0, id="float32"),
        # exp() of their distance underflows
        pytest.param(torch.float32, 24, 0.999, 2e-2, 100.0, id="maxima far apart"),
    ],
)
def test_two_ranks_find_the_nucleus_of_one(
    dtype: torch.dtype, vocab_size: int, top_p: float, tolerance: float, scale: float
):
    """Its entropy and the gradients, which are those of sorted probabilities."""
    draw = torch.Generator().manual_seed(8)
    rank = dist.get_rank()
    hidden = (scale * torch.randn(NUM_TOKENS, HIDDEN, generator=draw, dtype=torch.float64)).to(
        dtype
    )
    weight = torch.randn(PADDED_VOCAB, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
    factors = torch.randn(NUM_TOKENS, generator=draw, dtype=torch.float64).to(dtype)

    def found(weight: Tensor, group: dist.ProcessGroup | None, plain: bool = False) -> list[Tensor]:
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        head = Head(0.8, vocab_size, 5, group, "none")
        if plain:
            values = plain_nucleus_entropy(inputs[0] @ inputs[1][:vocab_size].t() / 0.8, top_p)
        else:
            values = nucleus_entropy(*inputs, head, top_p)
        return [values.detach(), *torch.autograd.grad((factors * values).sum(), inputs)]

    wanted = found(weight, None, plain=True)
    one = found(weight, None)
    two = found(weight.chunk(2)[rank], dist.group.WORLD)
    for name, got, want in zip(("entropy", "hidden", "weight"), one, wanted, strict=True):
        assert_close(f"{name} of one rank", got, want, tolerance)
    assert_close("entropy", two[0], wanted[0], tolerance)
    assert_close("hidden gradient", two[1], wanted[1], tolerance)
    assert_close("weight gradient", two[2], wanted[2].chunk(2)[rank], tolerance)
    if top_p == 0.8:
        assert len(wanted[0].unique()) > 5
    everyone = torch.empty(2, NUM_TOKENS, dtype=two[0].dtype)
    dist.all_gather(list(everyone.unbind(0)), two[0])
    assert torch.equal(everyone[0], everyone[1]), "ranks disagree"


@on_ranks(1)
def test_equally_likely_tokens_are_in_the_nucleus_together():
    """Probabilities 0.5, 0.125 four times: with 0.6 the second of the four would do."""
    logits = torch.tensor([[0.5, *[0.125] * 4]], dtype=torch.float64).log()
    head = Head(1.0, 5, 5, None, "none")
    found = nucleus_entropy(logits, torch.eye(5, dtype=torch.float64), head, 0.6)
    assert found.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(8), rel=1e-12)
    empty = nucleus_entropy(logits[:0], torch.eye(5, dtype=torch.float64), head, 0.6)
    assert empty.shape == (0,)
