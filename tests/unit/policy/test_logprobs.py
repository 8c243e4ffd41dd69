"""The chunked operation against full logits, log_softmax and autograd, in float64 and float32."""

import math

import pytest
import torch
from jaxtyping import install_import_hook

with install_import_hook(
    "megatron_rl.policy.passes.logprobs", "beartype.beartype"
):  # annotations of shape and dtype are executed
    from megatron_rl.policy.passes.logprobs import Head, token_values
    from megatron_rl.policy.passes.nucleus import nucleus_entropy

T = 11
H = 6
PADDED = 24
VOCAB = 19


def plain(hidden, weight, targets, temperature, vocab_size):
    x = hidden @ weight[:vocab_size].t() / temperature
    logp = torch.log_softmax(x, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def inputs(dtype=torch.float64, seed=0, scale=3.0):
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(T, H, generator=g, dtype=torch.float64) * scale).to(dtype)
    weight = torch.randn(PADDED, H, generator=g, dtype=torch.float64).to(dtype)
    return (
        hidden,
        weight,
        torch.randint(0, VOCAB, (T,), generator=g),
        torch.randn(2, T, generator=g, dtype=torch.float64),
    )


def run(
    hidden, weight, targets, *, entropy="none", temperature=1.0, chunk_tokens=4, vocab_size=VOCAB
):
    head = Head(temperature, vocab_size, chunk_tokens, None, entropy)
    values = token_values(hidden, weight, targets, head)
    return values.logprobs, values.columns.get("entropy")


def gradients(values, hidden, weight):
    grads = torch.autograd.grad(values, [hidden, weight])
    return [g.double() for g in grads]


def test_value_by_hand():
    # Logits (ln 1, ln 2, ln 5) from a one-dimensional hidden state; the fourth row is padding and
    # must take no share.
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)], [9.0]])
    logp, entropy = run(
        torch.ones(2, 1), weight, torch.tensor([1, 2]), vocab_size=3, entropy="value"
    )
    assert logp.tolist() == pytest.approx([math.log(2 / 8), math.log(5 / 8)], abs=1e-6)
    h = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert entropy.tolist() == pytest.approx([h, h], abs=1e-6)
    # Temperature 2: weights are the square roots of 1, 2, 5.
    logp, _ = run(torch.ones(1, 1), weight, torch.tensor([2]), vocab_size=3, temperature=2.0)
    assert logp.item() == pytest.approx(
        math.log(math.sqrt(5) / (1 + math.sqrt(2) + math.sqrt(5))), abs=1e-6
    )


@pytest.mark.parametrize("chunk_tokens", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", ["none", "value", "grad"])
def test_equals_plain_in_float64(chunk_tokens, temperature, entropy):
    hidden, weight, targets, c = inputs()
    for leaf in (hidden, weight):
        leaf.requires_grad_()
    logp, ent = run(
        hidden, weight, targets, entropy=entropy, temperature=temperature, chunk_tokens=chunk_tokens
    )
    want_logp, want_ent = plain(hidden, weight, targets, temperature, VOCAB)
    torch.testing.assert_close(logp, want_logp, rtol=0, atol=1e-12)
    if entropy == "none":
        assert ent is None
    else:
        torch.testing.assert_close(ent, want_ent, rtol=0, atol=1e-12)
        assert ent.requires_grad == (entropy == "grad")
    loss = (c[0] * logp).sum()
    want = (c[0] * want_logp).sum()
    if entropy == "grad":
        loss, want = loss + (c[1] * ent).sum(), want + (c[1] * want_ent).sum()
    for got, expected in zip(
        gradients(loss, hidden, weight), gradients(want, hidden, weight), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("one", [0, 1], ids=["logprobs", "entropy"])
def test_one_of_two_gradients(one):
    hidden, weight, targets, c = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    found = run(hidden, weight, targets, entropy="grad")[one]
    wanted = plain(hidden, weight, targets, 1.0, VOCAB)[one]
    got, want = (gradients((c[one] * each).sum(), hidden, weight) for each in (found, wanted))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    assert got[1][VOCAB:].abs().max() == 0


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_float32_stays_close_with_large_logits(scale):
    # Logits of several hundred overflow exp() unless the maximum is taken off.
    hidden, weight, targets, _ = inputs(torch.float32, scale=scale)
    logp, ent = run(hidden, weight, targets, entropy="value")
    want_logp, want_ent = plain(hidden.double(), weight.double(), targets, 1.0, VOCAB)
    torch.testing.assert_close(logp.double(), want_logp, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(ent.double(), want_ent, rtol=2e-6, atol=1e-4)


def test_bfloat16_operands_are_not_rounded_on_the_way():
    # The reference multiplies the same bfloat16 numbers in float64; logits rounded to bfloat16
    # would be off by 1e-2.
    hidden, weight, targets, c = inputs(torch.bfloat16)
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    hidden.requires_grad_(), weight.requires_grad_()
    logp, ent = run(hidden, weight, targets, entropy="grad")
    want_logp, want_ent = plain(*exact, targets, 1.0, VOCAB)
    assert logp.dtype == ent.dtype == torch.float32
    torch.testing.assert_close(logp.double(), want_logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(ent.double(), want_ent, rtol=0, atol=1e-5)
    got = torch.autograd.grad(
        (c[0].float() * logp).sum() + (c[1].float() * ent).sum(), [hidden, weight]
    )
    want = gradients((c[0] * want_logp).sum() + (c[1] * want_ent).sum(), *exact)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16  # rounded once, at the end: half a unit of 2^-8
        torch.testing.assert_close(a.double(), b, rtol=2**-8, atol=1e-5)


def test_the_gradient_of_a_trained_weight_is_added_to_main_grad_without_rounding():
    hidden, weight, targets, c = inputs(torch.bfloat16)
    exact = [leaf.double().requires_grad_() for leaf in (hidden, weight)]
    weight = torch.nn.Parameter(weight)
    weight.main_grad = torch.ones_like(weight, dtype=torch.float32)  # of a micro-batch before
    logp, _ = run(hidden, weight, targets)
    (returned,) = torch.autograd.grad((c[0].float() * logp).sum(), weight)
    assert returned.shape == weight.shape and not returned.any()
    _, want = gradients((c[0] * plain(*exact, targets, 1.0, VOCAB)[0]).sum(), *exact)
    assert want[VOCAB:].eq(0).all() and want.abs().max() > 1
    torch.testing.assert_close(weight.main_grad.double() - 1, want, rtol=1e-5, atol=1e-5)
    # In another format than sums have, as with precision.grad_reduce_in_float32=false.
    weight.main_grad = torch.ones_like(weight)
    logp, _ = run(hidden, weight, targets)
    (returned,) = torch.autograd.grad((c[0].float() * logp).sum(), weight)
    torch.testing.assert_close(returned.double(), want, rtol=2**-8, atol=1e-5)
    assert weight.main_grad.eq(1).all()


def test_frozen_parts_and_no_grad():
    hidden, weight, targets, c = inputs()
    want = gradients(
        (
            c[0] * plain(hidden.requires_grad_(), weight.requires_grad_(), targets, 1.0, VOCAB)[0]
        ).sum(),
        hidden,
        weight,
    )
    logp, _ = run(hidden, weight.detach(), targets)
    torch.testing.assert_close(
        torch.autograd.grad((c[0] * logp).sum(), hidden)[0], want[0], rtol=0, atol=1e-11
    )
    logp, _ = run(hidden.detach(), weight, targets)
    torch.testing.assert_close(
        torch.autograd.grad((c[0] * logp).sum(), weight)[0], want[1], rtol=0, atol=1e-11
    )
    with torch.no_grad():
        quiet, _ = run(hidden, weight, targets)
    assert not quiet.requires_grad and torch.equal(quiet, logp.detach())


def test_inputs_are_left_alone_and_backward_can_be_repeated():
    hidden, weight, targets, c = inputs(torch.float32)
    before = hidden.clone(), weight.clone(), targets.clone()
    hidden.requires_grad_(), weight.requires_grad_()
    logp, ent = run(hidden, weight, targets, entropy="grad")
    kept = logp.detach().clone()
    loss = (c[0].float() * logp).sum() + ent.sum()
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(loss, [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(
        torch.equal(a, b.detach()) for a, b in zip(before, (hidden, weight, targets), strict=True)
    )
    assert torch.equal(kept, logp.detach())


def test_no_tokens():
    hidden, weight, _, _ = inputs(torch.float32)
    hidden = hidden[:0].clone().requires_grad_()
    weight.requires_grad_()
    logp, ent = run(hidden, weight, torch.empty(0, dtype=torch.long), entropy="grad")
    assert logp.numel() == 0 and ent.numel() == 0
    (logp.sum() + ent.sum()).backward()
    assert hidden.grad.shape == (0, H) and torch.equal(
        weight.grad, torch.zeros_like(weight)
    )  # the gradient exists and is 0


def test_a_padding_token_has_probability_zero():
    hidden, weight, targets, _ = inputs(torch.float32)
    targets[3] = VOCAB
    logp, _ = run(hidden, weight, targets)
    assert logp[3] == -math.inf and torch.isfinite(logp[torch.arange(T) != 3]).all()


def test_most_likely_tokens_by_hand():
    """Logits ln 1, ln 2, ln 5 and a row of padding: 5/8 and 2/8 are the two most likely."""
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)], [9.0]])
    found = token_values(
        torch.ones(2, 1), weight, torch.tensor([1, 2]), Head(1.0, 3, 8, None, "none", top_k=2)
    )
    wanted = [math.log(5 / 8), math.log(2 / 8)]
    assert found.columns["topk_logprobs"].tolist() == [pytest.approx(wanted, abs=1e-6)] * 2
    assert found.columns["is_argmax"].tolist() == [False, True]
    assert found.logprobs.tolist() == pytest.approx(wanted[::-1], abs=1e-6)
    assert "entropy" not in found.columns


@pytest.mark.parametrize("entropy", ["none", "grad"])
@pytest.mark.parametrize("top_k", [1, 3, VOCAB])
def test_most_likely_tokens_equal_plain_in_float64(entropy, top_k):
    hidden, weight, targets, c = inputs()
    targets[::2] = (hidden @ weight[:VOCAB].t()).argmax(1)[::2]
    for leaf in (hidden, weight):
        leaf.requires_grad_()
    found = token_values(hidden, weight, targets, Head(0.7, VOCAB, 4, None, entropy, top_k))
    logp = torch.log_softmax(hidden @ weight[:VOCAB].t() / 0.7, -1)
    want = logp.topk(top_k, dim=1)
    torch.testing.assert_close(found.columns["topk_logprobs"], want.values, rtol=0, atol=1e-12)
    assert torch.equal(found.columns["is_argmax"], want.indices[:, 0] == targets)
    assert found.columns["is_argmax"].any() and not found.columns["is_argmax"].all()
    weights = torch.linspace(-1, 2, T * top_k, dtype=torch.float64).reshape(T, top_k)
    loss = (c[0] * found.logprobs).sum() + (weights * found.columns["topk_logprobs"]).sum()
    own = logp.gather(1, targets[:, None])[:, 0]
    plainly = (c[0] * own).sum() + (weights * want.values).sum()
    if entropy == "grad":
        loss = loss + (c[1] * found.columns["entropy"]).sum()
        plainly = plainly - (c[1] * (logp.exp() * logp).sum(-1)).sum()
    for got, expected in zip(
        gradients(loss, hidden, weight), gradients(plainly, hidden, weight), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def test_more_tokens_than_the_vocabulary_has_are_refused():
    hidden, weight, targets, _ = inputs()
    with pytest.raises(ValueError, match="top_k is 20, but the vocabulary has 19 tokens"):
        token_values(hidden, weight, targets, Head(1.0, VOCAB, 4, None, "none", top_k=20))


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("entropy", ["none", "value", "grad"])
def test_a_temperature_for_each_token(chunk_tokens, entropy):
    """Values and gradients of logprobs, entropies, the most likely tokens and the nucleus."""
    hidden, weight, targets, c = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    falling = torch.linspace(1.3, 0.2, T, dtype=torch.float64)
    head = Head(falling, VOCAB, chunk_tokens, None, entropy, top_k=3)
    found = token_values(hidden, weight, targets, head)
    want_logp, want_entropy = plain(hidden, weight, targets, falling[:, None], VOCAB)
    torch.testing.assert_close(found.logprobs, want_logp, rtol=0, atol=1e-12)
    x = hidden @ weight[:VOCAB].t() / falling[:, None]
    want_top = torch.log_softmax(x, -1).topk(3, dim=1).values
    torch.testing.assert_close(found.columns["topk_logprobs"], want_top, rtol=0, atol=1e-12)
    log_q = torch.where(in_nucleus(x, 0.8), x, -torch.inf).log_softmax(1)
    want_nucleus = -(log_q.exp() * log_q.masked_fill(log_q == -torch.inf, 0)).sum(1)
    nucleus = nucleus_entropy(hidden, weight, head, 0.8)
    torch.testing.assert_close(nucleus, want_nucleus, rtol=0, atol=1e-12)
    loss = (c[0] * (found.logprobs + nucleus)).sum() + (
        c[1][:, None] * found.columns["topk_logprobs"]
    ).sum()
    want = (c[0] * (want_logp + want_nucleus)).sum() + (c[1][:, None] * want_top).sum()
    if entropy != "none":
        torch.testing.assert_close(found.columns["entropy"], want_entropy, rtol=0, atol=1e-12)
    if entropy == "grad":
        loss, want = (
            loss + (c[1] * found.columns["entropy"]).sum(),
            want + (c[1] * want_entropy).sum(),
        )
    for got, expected in zip(
        gradients(loss, hidden, weight), gradients(want, hidden, weight), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def in_nucleus(x, share):
    """The tokens sorted, up to the one with which they reach ``share``."""
    probabilities, place = x.softmax(1).sort(1, descending=True)
    before = probabilities.cumsum(1) - probabilities
    return torch.zeros_like(x, dtype=torch.bool).scatter(1, place, before < share)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_temperature_for_each_token_is_one_for_all(temperature, dtype):
    """Bit for bit: logprobs, entropies and gradients."""

    def values(chosen):
        hidden, weight, targets, c = inputs(dtype)
        hidden.requires_grad_(), weight.requires_grad_()
        head = Head(chosen, VOCAB, 4, None, "grad")
        found = token_values(hidden, weight, targets, head)
        loss = (c[0] * found.logprobs + c[1] * found.columns["entropy"]).sum()
        return [
            found.logprobs,
            found.columns["entropy"],
            *torch.autograd.grad(loss, [hidden, weight]),
        ]

    for one, each in zip(values(temperature), values(torch.full((T,), temperature)), strict=True):
        assert torch.equal(one, each)
