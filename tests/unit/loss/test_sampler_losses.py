"""Trust regions around the sampler: values and d loss / d logprob by hand, in float64."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.loss.per_token import sampler_losses as losses
from megatron_rl.loss.per_token.response_losses import Clipped
from tests.unit.loss.groups import same, vector


def check(
    function: Callable[[Tensor, Tensor, Tensor], Clipped],
    cases: list[tuple[float, float, bool, float]],
) -> None:
    """Cases of (mu, A, outside, loss) at p = 1/2; as -rho A is, d loss / d logprob is the loss."""
    logprobs = torch.full((len(cases),), math.log(0.5), dtype=torch.float64, requires_grad=True)
    sampler = vector(*[math.log(case[0]) for case in cases])
    found, lower, upper = function(
        logprobs, logprobs - sampler, vector(*[case[1] for case in cases])
    )
    found.sum().backward()
    expected = [case[3] for case in cases]
    same(found.detach(), *expected)
    assert logprobs.grad is not None
    same(logprobs.grad, *expected)
    assert lower.tolist() == [float(case[2]) for case in cases]
    assert upper.tolist() == [1.0 if case[2] else math.inf for case in cases]


def test_dppo_by_hand() -> None:
    """|p - mu| = 0.25, 0.3 and 0.1; a far token counts where the step leads back to the sampler."""
    check(
        lambda logprobs, log_ratio, a: losses.dppo(logprobs, log_ratio, a, delta=0.2),
        [
            (0.25, 1, True, 0),
            (0.25, -1, False, 2),
            (0.8, -1, True, 0),
            (0.8, 2, False, -1.25),
            (0.4, 3, False, -3.75),
            (0.6, -3, False, 2.5),
            (0.25, 0, False, 0),
        ],
    )


def test_dppo_kl_by_hand() -> None:
    """mu = 1/4: log(1/2) / 4 + 3 log(3/2) / 4 = 0.1308; mu = 0.8: 0.8 log 1.6 + 0.2 log 0.4 =
    0.1927, where KL(p, mu) would be 0.2231."""
    cases = [
        (0.25, 1, False, -2),
        (0.25, -1, False, 2),
        (0.8, -1, False, 0.625),
        (0.8, 2, False, -1.25),
    ]
    at = {
        0.13: [(0.25, 1, True, 0), cases[1], (0.8, -1, True, 0), cases[3]],
        0.14: [*cases[:2], (0.8, -1, True, 0), cases[3]],
        0.2: cases,
    }
    for delta, expected in at.items():
        check(
            lambda logprobs, log_ratio, a, delta=delta: losses.dppo(
                logprobs, log_ratio, a, divergence="kl", delta=delta
            ),
            expected,
        )


def test_ipo_by_hand() -> None:
    """A far token is left out whatever the sign of A."""
    check(
        lambda logprobs, log_ratio, a: losses.ipo(logprobs, log_ratio, a, eps=0.2),
        [
            (0.25, 1, True, 0),
            (0.25, -1, True, 0),
            (0.8, -1, True, 0),
            (0.8, 2, True, 0),
            (0.4, 3, False, -3.75),
            (0.6, -3, False, 2.5),
        ],
    )


def test_divergences_by_hand() -> None:
    """p = 1/2, mu = 1/4 and the other way around: log(2) / 2 + log(2/3) / 2."""
    logprobs, log_ratio = vector(math.log(0.5), math.log(0.25)), vector(math.log(2), -math.log(2))
    same(losses.binary_variation(logprobs, log_ratio), 0.25, 0.25)
    same(losses.binary_kl(logprobs, log_ratio), 0.13081204, 0.14384104)


def test_a_small_step_of_a_likely_token_is_not_lost_by_hand() -> None:
    """The difference of two exponentials would have an error of 1e-7 of it."""
    found = losses.binary_variation(vector(-1e-3), vector(1e-9))
    torch.testing.assert_close(found, vector(math.exp(-1e-3) * 1e-9), rtol=1e-8, atol=0)


def test_a_token_that_is_certain_to_rounding_by_hand() -> None:
    """p = 1: at no distance from mu = 1 and, within 2^-23, from 1 - 1e-9; far from 1/2, by
    log(1/2) / 2 + log(2^22) / 2. So in float32, where 1 - p would be 0."""
    for dtype in (torch.float32, torch.float64):
        sampler = vector(0, math.log1p(-1e-9), math.log(0.5)).to(dtype)
        found = losses.binary_kl(torch.zeros(3, dtype=dtype), -sampler)
        same(found.double(), 0, 0, 10.5 * math.log(2))


def test_a_ratio_outside_does_not_overflow() -> None:
    """mu = e^-1000: infinity times 0 would be no number."""
    for function in (losses.dppo, losses.ipo):
        log_ratio = torch.tensor([1000.0], requires_grad=True)
        found = function(torch.tensor([-0.1]), log_ratio, torch.ones(1)).per_token
        found.sum().backward()
        assert found.tolist() == [0]
        assert log_ratio.grad is not None and log_ratio.grad.tolist() == [0]
