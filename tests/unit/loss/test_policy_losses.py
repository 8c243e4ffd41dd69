"""Policy losses: values and d loss / d logprob worked out by hand, in float64. old_logprobs are
logprobs - log(rho)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.loss.per_token import policy_losses as losses
from tests.unit.loss.groups import flags, same, terms, vector


def check(
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    cases: list[tuple[float, float, float, float]],
) -> None:
    """Cases of (rho, A, loss, d loss / d logprob) at logprob -0.7; ``function(logprobs, log_ratio,
    advantages)``."""
    logprobs = torch.full((len(cases),), -0.7, dtype=torch.float64, requires_grad=True)
    old = logprobs.detach() - vector(*[math.log(case[0]) for case in cases])
    found = function(logprobs, logprobs - old, vector(*[case[1] for case in cases]))
    found.sum().backward()
    same(found.detach(), *[case[2] for case in cases])
    assert logprobs.grad is not None
    same(logprobs.grad, *[case[3] for case in cases])


def test_a_ratio_stops_at_e_to_the_20_by_hand() -> None:
    """Beyond it neither overflows nor has a gradient; so a clipped loss has the gradient 0 there,
    not 0 times infinity."""
    log_ratio = torch.tensor([100.0, -100.0, 20.0, -20.0], requires_grad=True)
    ratio = losses.ratio_of(log_ratio)
    (gradient,) = torch.autograd.grad(ratio.sum(), log_ratio)
    e20 = 485165195.40979
    expected = torch.tensor([e20, 1 / e20, e20, 1 / e20])
    torch.testing.assert_close(ratio.detach(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, expected * torch.tensor([0, 0, 1, 1]), rtol=1e-6, atol=0)
    for sign, loss in ((1, -1.2), (-1, e20)):
        found = losses.ppo_clip(log_ratio[:1], torch.tensor([float(sign)]))
        torch.testing.assert_close(found.detach(), torch.tensor([loss]), rtol=1e-6, atol=0)
        (gradient,) = torch.autograd.grad(found.sum(), log_ratio)
        assert gradient.tolist() == [0, 0, 0, 0]


def test_a_ratio_of_ordinary_size_has_the_bits_of_exp() -> None:
    for dtype in (torch.float32, torch.float64):
        log_ratio = torch.linspace(-20, 20, 4001, dtype=dtype, requires_grad=True)
        gradients = []
        for ratio in (losses.ratio_of(log_ratio), log_ratio.exp()):
            gradients += [ratio.detach(), *torch.autograd.grad(ratio.sum(), log_ratio)]
        assert torch.equal(gradients[0], gradients[2]) and torch.equal(gradients[1], gradients[3])


def test_ppo_clip() -> None:
    check(
        lambda _, log_ratio, a: losses.ppo_clip(log_ratio, a, low=0.2, high=0.2),
        [
            (1.5, 1, -1.2, 0),
            (0.5, 1, -0.5, -0.5),
            (0.5, -1, 0.8, 0),
            (1.5, -1, 1.5, 1.5),
            (1.1, 2, -2.2, -2.2),
            (0.9, -2, 1.8, 1.8),
        ],
    )


def test_clip_higher_and_uneven_lower() -> None:
    check(
        lambda _, log_ratio, a: losses.ppo_clip(log_ratio, a, low=0.4, high=0.28),
        [(1.25, 1, -1.25, -1.25), (1.3, 1, -1.28, 0), (0.7, -1, 0.7, 0.7), (0.5, -1, 0.6, 0)],
    )


def test_dual_clip() -> None:
    check(
        lambda _, log_ratio, a: losses.ppo_clip(log_ratio, a, low=0.2, high=0.2, dual_c=3.0),
        [(5, -1, 3, 0), (2, -1, 2, 2), (5, 1, -1.2, 0), (0.5, -1, 0.8, 0)],
    )


def test_cispo() -> None:
    """loss = -w A logp, logp = -0.7; the weight stops at 1 + high = 3 but the gradient is never
    cut."""
    check(
        lambda logprobs, log_ratio, a: losses.cispo(logprobs, log_ratio, a, low=1.0, high=2.0),
        [(5, 1, 2.1, -3), (0.001, 1, 0.0007, -0.001), (5, -1, -2.1, 3), (2, 0.5, 0.7, -1)],
    )
    check(
        lambda logprobs, log_ratio, a: losses.cispo(logprobs, log_ratio, a, low=0.2, high=2.0),
        [(0.5, 1, 0.56, -0.8)],
    )


def test_sapo_by_hand() -> None:
    """sigmoid(log 3) = 3/4 and sigmoid(-log 3) = 1/4, p (1 - p) = 3/16: at tau 1 and A = 2 the loss
    is -4 * 3/4 * 2 and the gradient -3/4 rho * 2; at tau 2 and A = -1, 4/2 * 1/4 and 3/4 rho. On
    policy: -2 A / tau and -A."""
    up, down = 1 + math.log(3), 1 - math.log(3) / 2
    check(
        lambda _, log_ratio, a: losses.sapo(log_ratio, a, tau_pos=1.0, tau_neg=2.0),
        [
            (up, 2, -6, -1.5 * up),
            (down, -1, 0.5, 0.75 * down),
            (1, 3, -6, -3),
            (1, -3, 3, 3),
            (up, 0, 0, 0),
        ],
    )


def test_a_temperature_is_not_rounded_to_32_bits_by_hand() -> None:
    tokens = vector(0, 0)
    found = losses.sapo(tokens, vector(1, -1), tau_pos=1.3, tau_neg=1.05)
    torch.testing.assert_close(found, vector(-2 / 1.3, 2 / 1.05), rtol=1e-14, atol=0)


def test_sapo_of_a_ratio_beyond_floats() -> None:
    """The gate is 1 there: -4 A / tau and no gradient, not NaN."""
    log_ratio = torch.tensor([100.0, 100.0], requires_grad=True)
    loss = losses.sapo(log_ratio, torch.tensor([1.0, -1.0]), tau_pos=1.0, tau_neg=2.0)
    loss.sum().backward()
    assert loss.tolist() == [-4, 2]
    assert log_ratio.grad is not None and log_ratio.grad.tolist() == [0, 0]


def test_reinforce() -> None:
    check(
        lambda logprobs, _, a: losses.reinforce(logprobs, a), [(5, 1, 0.7, -1), (0.1, -2, -1.4, 2)]
    )


def test_ratio() -> None:
    check(lambda _, log_ratio, a: losses.ratio(log_ratio, a), [(5, 1, -5, -5), (0.5, -2, 1, 1)])


def test_gspo_by_hand() -> None:
    """s = exp(0.05) = 1.051271 > 1.0004: clipped for A > 0, kept for A < 0 with s / 2 per token of
    the two."""
    log_ratio = vector(0.2, -0.1).requires_grad_()
    sequence = terms(flags(1, 1), [0, 0], [2]).response_mean(log_ratio)
    same(losses.ppo_clip(sequence, vector(1, 1), low=3e-4, high=4e-4).detach(), -1.0004, -1.0004)
    loss = losses.ppo_clip(sequence, vector(-1, -1), low=3e-4, high=4e-4)
    same(loss.detach(), 1.051271, 1.051271)
    loss.mean().backward()
    assert log_ratio.grad is not None
    same(log_ratio.grad, 0.525636, 0.525636)
