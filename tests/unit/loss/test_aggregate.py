"""Token weights by hand: responses of two and one loss tokens."""

import torch

from megatron_rl.loss.per_token import aggregate
from megatron_rl.loss.whole_responses import WholeResponses
from tests.unit.loss.groups import flags, same, vector

IDS = torch.tensor([0, 0, 1])
LENGTHS = torch.tensor([2, 1])


def test_weights_by_hand() -> None:
    same(aggregate.token_mean(3, IDS, torch.float64), *[1 / 3] * 3)
    same(aggregate.seq_mean_token_mean(2, LENGTHS, IDS, torch.float64), 0.25, 0.25, 0.5)
    same(aggregate.seq_mean_token_sum(2, IDS, torch.float64), 0.5, 0.5, 0.5)
    same(aggregate.seq_mean_token_sum_norm(2, 10, IDS, torch.float64), 0.05, 0.05, 0.05)


def test_token_mean_by_entropy_by_hand() -> None:
    """Of the 6 tokens of response 0 one is above the 0.8-quantile (rank 4), the only one of
    response 1 is not: 6 low tokens and 1 of reasoning. With 6 more tokens in the minibatch, which
    are not here, there are 11 and 2."""
    entropy = vector(10, 0, 20, 30, 40, 50, 60)
    ids = torch.tensor([0] * 6 + [1])
    responses = WholeResponses(ids, flags(*[1] * 7), 3, lambda columns: columns)

    def weights(*lengths: int, **knobs: float) -> torch.Tensor:
        return aggregate.token_mean_by_entropy(entropy, responses, torch.tensor(lengths), **knobs)

    same(weights(6, 1, 0), *[1 / 6] * 5, 0, 1 / 6)
    same(weights(6, 1, 0, reasoning=0.5), *[1 / 6] * 5, 0.5, 1 / 6)
    same(weights(6, 1, 6, reasoning=0.5), *[1 / 11] * 5, 0.25, 1 / 11)
    same(weights(6, 1, 0, quantile=1.0, reasoning=0.5), *[1 / 7] * 7)


def test_denominators_are_those_given_not_those_of_the_batch() -> None:
    same(aggregate.token_mean(30, IDS, torch.float64), *[1 / 30] * 3)
    same(
        aggregate.seq_mean_token_mean(20, torch.tensor([4, 5]), IDS, torch.float64),
        1 / 80,
        1 / 80,
        1 / 100,
    )


def test_nothing_to_average_gives_zero() -> None:
    weights = aggregate.seq_mean_token_mean(0, torch.tensor([0, 0]), IDS, torch.float64)
    assert aggregate.weighted_sum(vector(1, 2, 3), weights, flags(0, 0, 0)).item() == 0
    assert torch.isfinite(aggregate.token_mean(0, IDS, torch.float64)).all()


def test_mask_is_true_where_a_token_takes_part() -> None:
    assert (
        aggregate.weighted_sum(
            vector(1, 10, float("nan")), vector(0.5, 0.25, 1), flags(1, 1, 0)
        ).item()
        == 3.0
    )
