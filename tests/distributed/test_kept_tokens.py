"""Policy restricted to the tokens that a sampler keeps: a vocabulary of 128 enumerated in float64,
importance weights of a sampler that cuts, and the way of the kept tokens between ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.data.token_rows import TokenRows
from megatron_rl.engine.logits_processors import truncate_
from megatron_rl.policy.passes.logprobs import Head, token_values
from megatron_rl.rollouts.rows.exchange import Route, exchange_rows, token_rows
from megatron_rl.runtime.launch import World
from megatron_rl.types import Completion
from tests.ranks import on_ranks

NUM_TOKENS, HIDDEN, VOCAB, PADDED = 40, 16, 128, 136
TOP_K, TOP_P, TEMPERATURE = 30, 0.8, 0.7
EXACT = 1e-12


def kept_of(logits: Tensor) -> Tensor:
    """[tokens, TOP_K]: what a sampler keeps, in falling order, -1 in free places."""
    limits = torch.tensor([[TOP_K, TOP_P, 1.0]], dtype=torch.float64).expand(len(logits), -1)
    cut = truncate_(logits.clone(), limits, TOP_K)
    values, ids = cut.topk(TOP_K, dim=1)
    return torch.where(values.isfinite(), ids, -1).int()


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, output layer, targets and kept tokens; tokens 0 and 7 are of the whole vocabulary,
    and the tokens 1 and 2 were drawn from one half of it."""
    draw = torch.Generator().manual_seed(4)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=draw, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=draw, dtype=torch.float64)
    kept = kept_of(hidden @ weight[:VOCAB].t() / TEMPERATURE)
    kept[[0, 7]] = -1
    half = PADDED // 2
    kept[1] = torch.where(kept[1] < half, kept[1], -1)
    kept[2] = torch.where(kept[2] >= half, kept[2], -1)
    assert (kept[[1, 2]] >= 0).any(1).all()
    targets = torch.stack([_target(row, draw) for row in kept])
    return hidden, weight, targets, kept


def _target(row: Tensor, draw: torch.Generator) -> Tensor:
    """One of the kept tokens, or of all."""
    among = row[row >= 0] if (row >= 0).any() else torch.arange(VOCAB)
    return among[torch.randint(len(among), (1,), generator=draw)][0].long()


def slow(hidden: Tensor, weight: Tensor, targets: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy), token by token, of lists of logits."""
    logprobs, entropies = [], []
    for state, target, row in zip(hidden, targets.tolist(), kept.tolist(), strict=True):
        ids = [token for token in row if token >= 0] or list(range(VOCAB))
        x = torch.stack([(state @ weight[token]) / TEMPERATURE for token in ids])
        logp = x - x.exp().sum().log()
        logprobs.append(logp[ids.index(target)])
        entropies.append(-(logp.exp() * logp).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def figures(values: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(9)
    factors = torch.randn(2, NUM_TOKENS, generator=draw, dtype=torch.float64)
    loss = (factors[0] * values[0]).sum() + (factors[1] * values[1]).sum()
    return [*(value.detach() for value in values), *torch.autograd.grad(loss, leaves)]


@on_ranks(2)
def test_one_rank_and_two_equal_the_enumeration():
    """Value and gradient; chunks of 7 tokens."""
    hidden, weight, targets, kept = inputs()
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    wanted = figures(slow(*leaves, targets, kept), leaves)
    everything = (None, weight), (dist.group.WORLD, weight.chunk(2)[dist.get_rank()])
    for group, block in everything:
        leaves = [hidden.clone().requires_grad_(), block.clone().requires_grad_()]
        head = Head(TEMPERATURE, VOCAB, 7, group, "grad", kept=kept)
        values = token_values(*leaves, targets, head)
        *found, of_weight = figures((values.logprobs, values.columns["entropy"]), leaves)
        for one, other in zip(found, wanted, strict=False):
            assert (one - other).abs().max() <= EXACT
        own = wanted[-1] if group is None else wanted[-1].chunk(2)[dist.get_rank()]
        assert (of_weight - own).abs().max() <= EXACT
    plain = token_values(hidden, weight, targets, Head(TEMPERATURE, VOCAB, 7, None)).logprobs
    moved = (plain - wanted[0]).abs()
    assert moved[[0, 7]].max() <= EXACT, "nothing is kept: the whole vocabulary"
    assert moved.max() > 0.2


@pytest.mark.parametrize("with_kept", [True, False], ids=["kept", "without: the planted bug"])
def test_importance_weights_have_the_mean_1(with_kept: bool) -> None:
    """The mean of exp(policy - sampler) over tokens that the sampler drew; without the kept tokens
    it is the mass that they have."""
    draw = torch.Generator().manual_seed(6)
    num_tokens = 20_000
    hidden = torch.randn(8, HIDDEN, generator=draw, dtype=torch.float64)
    hidden = hidden[torch.arange(num_tokens) % 8]
    weight = torch.randn(VOCAB, HIDDEN, generator=draw, dtype=torch.float64) / 4
    logits = hidden @ weight.t()
    kept = kept_of(logits)
    cut = torch.full_like(logits, -torch.inf)
    row, place = (kept >= 0).nonzero(as_tuple=True)
    cut[row, kept[row, place].long()] = logits[row, kept[row, place].long()]
    drawn = torch.multinomial(cut.softmax(1), 1, generator=draw)[:, 0]
    sampler = cut.log_softmax(1).gather(1, drawn[:, None])[:, 0]
    # The policy has moved since, other than by a constant.
    moved = weight + 0.02 * torch.randn(weight.shape, generator=draw, dtype=torch.float64)
    head = Head(1.0, VOCAB, 512, None, kept=kept if with_kept else None)
    weights = (token_values(hidden, moved, drawn, head).logprobs - sampler).exp()
    error = weights.std() / num_tokens**0.5
    mass = (hidden @ moved.t()).softmax(1).masked_fill(cut.isinf(), 0).sum(1).mean()
    assert abs(weights.mean() - (1 if with_kept else mass)) <= 4 * error
    assert error < 0.005 and mass < 0.9, "the bug would be seen"


@on_ranks(2)
def test_kept_tokens_travel_with_their_rows():
    """A rank without a row has the same columns; demonstrations keep the whole vocabulary, and none
    of their tokens was likely."""
    rank = dist.get_rank()
    world = World(rank, 2, rank, "test", dist.group.WORLD)
    responses = [
        Completion(
            *((5, 6), (-0.1, -0.2), False, 0),
            kept=(5, 9, 6, -1),
            likely=(5, 4),
            sampler_likely_logprobs=(-0.125, -0.5),
        ),
        Completion((7,), (0.0,), False, 0),
    ]
    here = responses if world.rank == 0 else []
    held = token_rows(range(len(here)), here, num_kept=2, num_likely=1)
    route = Route(np.array([2, 1]), np.zeros(2, np.int64), np.array([1, 0]))
    found: TokenRows = exchange_rows(held, route, world)
    wanted = [[[-1, -1]], [[5, 9], [6, -1]]][world.rank]
    assert found.columns["kept"].dtype == np.int32
    assert found.columns["kept"].tolist() == wanted
    assert found.take(found.rows).columns["kept"].tolist() == wanted
    likely, logprobs = (found.columns[name] for name in ("likely", "sampler_likely_logprobs"))
    assert likely.tolist() == [[[-1]], [[5], [4]]][world.rank]
    assert logprobs.tolist() == [[[-np.inf]], [[-0.125], [-0.5]]][world.rank]
    assert (likely.dtype, logprobs.dtype) == (np.int32, np.float32)
