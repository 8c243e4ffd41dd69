"""Tokens chosen by the covariance of logprob and advantage, by hand."""

import math

import torch
from torch import Tensor

from megatron_rl.config.method import load_method
from megatron_rl.loss import TokenBatch
from megatron_rl.loss.per_token import covariance
from tests.unit.loss.groups import flags, same, vector

PLACES = torch.tensor([4, 9, 2, 7])
CHOSEN = torch.tensor([-1, 2, 9, 11])  # the second token and the third; the last is not here


def slopes(function: str, **knobs: float) -> tuple[Tensor, Tensor]:
    """rho = 1.5, 3, 1/2, 3 with A = 2, -1, 1, 1: values and d loss / d logprob."""
    log_ratio = vector(*[math.log(ratio) for ratio in (1.5, 3, 0.5, 3)]).requires_grad_()
    loss = getattr(covariance, function)(log_ratio, vector(2, -1, 1, 1), PLACES, CHOSEN, **knobs)
    loss.sum().backward()
    assert log_ratio.grad is not None
    return loss.detach(), log_ratio.grad


def test_clip_cov_by_hand() -> None:
    """The last ratio stops at 2; without a choice the second and third are 3 and -1/2."""
    loss, gradient = slopes("clip_cov")
    same(loss, -3, 0, 0, -2)
    same(gradient, -3, 0, 0, 0)
    loss, gradient = slopes("clip_cov", low=0.2, high=0.4)
    same(loss, -2.8, 0, 0, -1.4)
    same(gradient, 0, 0, 0, 0)


def test_kl_cov_by_hand() -> None:
    """|log 3| and |log 1/2| times beta are added to 3 and -1/2, with slopes of beta and -beta; no
    ratio stops."""
    loss, gradient = slopes("kl_cov", beta=0.5)
    same(loss, -3, 3 + math.log(3) / 2, -0.5 + math.log(2) / 2, -3)
    same(gradient, -3, 3.5, -1, -3)
    same(slopes("kl_cov")[0], -3, 3 + math.log(3), -0.5 + math.log(2), -3)


def test_without_a_chosen_token_by_hand() -> None:
    assert not covariance.are_among(PLACES, torch.tensor([-1])).any()
    assert covariance.are_among(PLACES, CHOSEN).tolist() == [False, True, True, False]
    assert covariance.are_among(torch.tensor([0, 12]), torch.tensor([-1, 0])).tolist() == [
        True,
        False,
    ]


def test_covariances_by_hand() -> None:
    """Means -2 and 0.5."""
    found = covariance.covariances(vector(-1, -2, -4, -1), vector(2, -1, 0, 1))
    same(found, 1.5, 0, 1, 0.5)


def test_choose_by_hand() -> None:
    """Of 8 tokens a share of 3/8 is three, of 0.49 three as well, and of 0.1 none."""
    values = vector(1, 7, 5, 3, 5, 0, 9, 2)
    anything = -math.inf, math.inf

    def chosen(keys: Tensor, share: float, low: float, high: float) -> list[int]:
        return covariance.choose(values, keys, share, low, high).tolist()

    assert chosen(-values, 3 / 8, *anything) == [6, 1, 2]
    assert chosen(-values, 0.49, *anything) == [6, 1, 2]
    assert chosen(-values, 0.1, *anything) == []
    assert chosen(-values, 1.0, *anything) == [6, 1, 2, 4, 3, 7, 0, 5]
    draws = vector(0.1, 0.2, 0.9, 0.3, 0.4, 0.5, 0.6, 0.7)
    assert chosen(draws, 1.0, 2.0, 5.0) == [3, 4, 7, 2]  # both bounds are inside
    assert chosen(draws, 0.25, 2.0, 5.0) == [3, 4]
    assert chosen(draws, 0.5, 20.0, 50.0) == []


def test_corrections_weight_what_is_left_and_the_penalty_by_hand() -> None:
    """Four tokens of one response with A = 1 at rho = 1.5, of which the second and third are
    chosen: clip-cov loses -1.5, 0, 0, -1.5, kl-cov log 1.5 more than -1.5 at the chosen; w = 0.5,
    2, 1.5, 1 of the sampler, the second of which (exp(gap) = 3) icepop leaves out."""
    moved, rise = math.log(1.5), 0.25 * (1 - 1.5)
    for kind, weights in (("tis", (0.5, 2, 1.5, 1)), ("icepop", (0.5, 0, 1.5, 1))):
        for name, chosen_loss, chosen_slope in (
            ("clip_cov", 0.0, 0.0),
            ("kl_cov", moved - 1.5, rise),
        ):
            overrides = [f"mismatch.kind={kind}", "filters.dynamic_sampling=null"]
            batch = TokenBatch(
                logprobs=vector(*[-1] * 4).requires_grad_(),
                old_logprobs=vector(*[-1 - moved] * 4),
                sampler_logprobs=vector(*[-1 - moved - math.log(w) for w in (0.5, 3, 1.5, 1)]),
                response_index=torch.zeros(4, dtype=torch.int64),
                loss_mask=flags(1, 1, 1, 1),
                advantages=vector(1),
                kl_weights=vector(1),
                token_columns={"token_place": PLACES[[0, 2, 1, 3]]},
                columns={"chosen_places": CHOSEN},
            )
            result = load_method(name, overrides).loss(batch)
            result.loss.backward()
            losses = (-1.5, chosen_loss, chosen_loss, -1.5)
            total = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / 4
            same(result.loss[None].detach(), total)
            slopes = (-1.5 / 4, chosen_slope, chosen_slope, -1.5 / 4)
            assert batch.logprobs.grad is not None
            weighted = [w * slope for w, slope in zip(weights, slopes, strict=True)]
            same(batch.logprobs.grad, *weighted)
