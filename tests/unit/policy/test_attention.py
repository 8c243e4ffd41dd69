"""Attention and norm of the layers without Transformer Engine, beside plain formulas."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_rl.policy.passes.attention import PackedAttention, Packing, RMSNorm, group

NORM = dict(
    params_dtype=torch.float32, sequence_parallel=False, layernorm_zero_centered_gamma=False
)
# A prompt of 3 with its first response of 2; responses of 2 and 4 that borrow it; a sequence alone.
OWN = torch.tensor([5, 2, 4, 3])
SHARED = torch.tensor([0, 3, 3, 0])
OWNER = torch.tensor([0, 0, 0, 3])


def test_a_short_response_asks_for_its_own_tokens_alone() -> None:
    (whole, short), restore = group(OWN, SHARED, OWNER, torch.device("cpu"))
    # By length: the response of 4 (7 tokens, 3 borrowed), the first sequence, the one alone.
    assert (whole.count, whole.length, whole.queries) == (3, 7, None)
    assert whole.tokens.tolist()[:7] == [0, 1, 2, 7, 8, 9, 10]
    assert (short.count, short.length) == (1, 5)
    assert short.tokens.tolist() == [0, 1, 2, 5, 6]
    assert short.queries is not None and short.queries.tolist() == [5, 6]
    assert short.mask is not None
    assert short.mask.tolist() == [[[[True, True, True, True, False], [True] * 5]]]
    # 21 results of the first call, then two. Tokens 5 and 6 are those.
    assert restore.tolist()[5:7] == [21, 22] and sorted(set(restore.tolist())) == sorted(restore)


def plain(query: Tensor, key: Tensor, value: Tensor, window: int = 99) -> Tensor:
    """Sequence by sequence, by the formula; every key head serves two of the queries'."""
    starts = [0, *OWN.cumsum(0).tolist()]
    results = []
    for row, start in enumerate(starts[:-1]):
        own = list(range(start, starts[row + 1]))
        prompt = range(starts[OWNER[row]], starts[OWNER[row]] + int(SHARED[row]))
        there = [*prompt, *own]
        for place, token in enumerate(own, start=len(prompt) + 1):
            seen = there[max(place - window, 0) : place]
            keys = key[seen].repeat_interleave(2, 1)
            weights = (query[token] * keys).sum(-1).div(key.shape[-1] ** 0.5).softmax(0)
            values = value[seen].repeat_interleave(2, 1)
            results.append((weights[..., None] * values).sum(0))
    return torch.stack(results).flatten(1)


# Without a window; longer than a packed part, shorter than a prompt, each token alone, none at all.
@pytest.mark.parametrize("window", [None, 5, 2, 1, 7])
def test_attention_and_its_gradients_are_those_of_the_formula(window: int | None) -> None:
    torch.manual_seed(0)
    heads = [torch.randn(14, count, 8, dtype=torch.float64) for count in (4, 2, 2)]
    size = None if window is None else (window - 1, 0)
    sizes = dict(window_size=size, window_attn_skip_freq=[0, 1] if window else None)
    config = SimpleNamespace(attention_dropout=0.0, kv_channels=8, softmax_type="vanilla", **sizes)
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    attention = PackedAttention(config, 2, None, "self", pg_collection=groups)
    bounds = torch.nn.functional.pad(OWN.cumsum(0), (1, 0)).int()
    packing = Packing(cu_seqlens_q=bounds, lengths=OWN, shared=SHARED, owner=OWNER)

    def run(function: object) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in heads]
        result = function(*leaves)  # type: ignore[operator]
        (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
        return [result.detach(), *(leaf.grad for leaf in leaves)]

    ours = run(lambda q, k, v: attention(q, k, v, None, packed_seq_params=packing))
    wanted = run(lambda q, k, v: plain(q, k, v, window or 99))
    for mine, theirs in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(6, 1, 16), (6, 1, 4, 8)])
def test_the_norm_and_its_gradients_are_torchs(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    config = SimpleNamespace(**NORM)
    norm = RMSNorm(config, shape[-1], eps=1e-5)
    norm.weight.data.uniform_(0.5, 2)
    # A part of a wider tensor, as query and key are.
    x = torch.randn(*shape[:-1], 3 * shape[-1])[..., : shape[-1]].requires_grad_()
    weights = torch.randn(shape)
    found = []
    for function in (norm, super(RMSNorm, norm).forward):
        result = function(x)
        gradients = torch.autograd.grad((result * weights).sum(), [x, norm.weight])
        found.append([result, *gradients])
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
