"""Losses of responses that were not sampled: values, identities and gradients, in float64."""

import math

import torch
from torch import Tensor

from megatron_rl.loss.per_token import demonstrations as losses
from megatron_rl.loss.per_token import policy_losses
from tests.unit.loss.groups import flags, same, vector

EACH = torch.arange(3)  # each token is a response of its own
# f(2) and f(1/2): 2 - 1 - log 2, 1/2 - 1 + log 2; 2 log 2 - 3 log 1.5, -log 2 / 2 - 1.5 log 0.75;
# (2^0.8 - 1.8) / -0.16, (2^-0.8 - 0.6) / -0.16.
BY_HAND = {
    "forward_kl": (0.306853, 0.193147),
    "js": (0.169899, 0.084950),
    "alpha": (0.368118, 0.160318),
}


def dph(logprobs: Tensor, ref: Tensor, given: Tensor, divergence: str, **knobs: float) -> Tensor:
    """At advantages 1 and rho = 1.5."""
    log_ratio = logprobs - (logprobs.detach() - math.log(1.5))
    ones = torch.ones_like(logprobs)
    found = losses.dph(
        log_ratio=log_ratio,
        advantages=ones,
        logprobs=logprobs,
        ref_logprobs=ref,
        is_demonstration=given,
        response_index=torch.arange(len(given)),
        divergence=divergence,
        **knobs,
    )
    assert (found.lower[given] == -torch.inf).all() and (found.upper[given] == torch.inf).all()
    same(found.lower[~given], *[0.8] * int((~given).sum()))
    same(found.upper[~given], *[1.2] * int((~given).sum()))
    return found.per_token


def test_dph_by_hand() -> None:
    """u = 2 and 1/2 at given tokens, which neither ratio nor advantage touches; the third is a
    sampled one whose ratio is clipped, and whose u is not looked at."""
    logprobs = vector(-1, -1, -1)
    ref = vector(-1 - math.log(2), -1 + math.log(2), torch.nan)
    for divergence, (above, below) in BY_HAND.items():
        found = dph(logprobs, ref, flags(1, 1, 0), divergence, eta=0.5)
        same(found, above / 2, below / 2, -1.2)


def test_the_alpha_of_dph_by_hand() -> None:
    """alpha 1/2 at u = 4: (2 - 2 - 1/2) / (-1/4) = 2."""
    found = dph(vector(-1), vector(-1 - math.log(4)), flags(1), "alpha", eta=1.0, alpha=0.5)
    same(found, 2)


def test_u_stops_at_e_to_the_20_by_hand() -> None:
    """u - 1 - log u there, e^-20 - 1 + 20 at the other end; beyond, where u would be infinite, no
    gradient."""
    ref = torch.tensor([-1e4, -40.0, 30.0])
    for divergence in BY_HAND:
        logprobs = torch.full((3,), -1.0, requires_grad=True)
        found = dph(logprobs, ref, flags(1, 1, 1), divergence, eta=1.0)
        found.sum().backward()
        assert logprobs.grad is not None and logprobs.grad.tolist() == [0, 0, 0]
        if divergence == "forward_kl":
            expected = torch.tensor([math.exp(20) - 21] * 2 + [19.0])
            torch.testing.assert_close(found.detach(), expected, rtol=1e-6, atol=0)


def test_f_is_a_divergence() -> None:
    """f >= 0 and larger on both sides of 1, f(1) = 0 with zero slope."""
    for divergence in losses.DIVERGENCES.values():
        values = divergence(torch.linspace(-6, 3, 181, dtype=torch.float64), 0.2)
        assert (values >= -1e-15).all()
        assert (values.diff()[:119] < 0).all() and (values.diff()[121:] > 0).all()
        zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        at_one = divergence(zero, 0.2)
        at_one.sum().backward()
        assert at_one.item() == 0 and zero.grad is not None and zero.grad.item() == 0


def test_the_gradient_of_dph_is_its_slope() -> None:
    ref = vector(-1, -1, -1)
    given = flags(1, 1, 1)
    step = 1e-6
    for divergence in BY_HAND:
        logprobs = vector(-0.3, -1.7, -2.2).requires_grad_()
        dph(logprobs, ref, given, divergence).sum().backward()
        with torch.no_grad():
            up, down = (dph(logprobs + sign * step, ref, given, divergence) for sign in (1, -1))
        assert logprobs.grad is not None
        torch.testing.assert_close(logprobs.grad, (up - down) / (2 * step), rtol=1e-6, atol=1e-9)


def test_rl_plus_by_hand() -> None:
    """pi 0.75, pi_old 0.5: w = 1.5 / 1.25 = 1.2, times 2 and sqrt(0.25): -1.2; its gradient is the
    same, for (1 - pi) has none. A sampled token of ratio 1.5 is not clipped."""
    logprobs = vector(0.75, 0.75).log().requires_grad_()
    log_ratio = logprobs - vector(0.5, 0.5).log()
    given = flags(1, 0)
    found = losses.rl_plus(logprobs, log_ratio, vector(2, 2), given, EACH[:2])
    same(found.detach(), -1.2, -3)
    found.sum().backward()
    assert logprobs.grad is not None
    same(logprobs.grad, -1.2, -3)
    even = losses.rl_plus(logprobs, log_ratio, vector(2, 2), given, EACH[:2], gamma=0.0)
    same(even.detach(), -2.4, -3)
    sure = losses.rl_plus(vector(1e-9), vector(0), vector(2), flags(1), EACH[:1])
    same(sure, 0)


def test_exgrpo_by_hand() -> None:
    """pi 0.2, pi_old 0.4, pi_past 0.5: w = 0.4 and w / (w + 0.1) = 0.8, times 2; its slope in log
    pi is -2 * 0.4 * 0.1 / 0.5^2 = -0.32. A sampled token of ratio 1/2 is not clipped. Where pi_past
    was 0 the factor is 1, and nothing is infinite."""
    logprobs = vector(0.2, 0.2).log().requires_grad_()
    log_ratio = logprobs - vector(0.4, 0.4).log()
    gap = vector(0.8, 0.8).log()
    found = losses.exgrpo(log_ratio, gap, vector(2, 2), flags(1, 0), EACH[:2]).per_token
    same(found.detach(), -1.6, -1)
    found.sum().backward()
    assert logprobs.grad is not None
    same(logprobs.grad, -0.32, -1)
    even = losses.exgrpo(log_ratio, gap, vector(2, 2), flags(1, 0), EACH[:2], beta=0.4)
    same(even.per_token.detach(), -1, -1)
    far = vector(0, 5, math.log(0.5))
    found = losses.exgrpo(far, vector(2000, 0, 0), vector(-3, 3, -3), flags(1, 0, 0), EACH)
    same(found.per_token, 3, -3 * math.exp(5), 1.5)


def test_ampo_by_hand() -> None:
    """pi 0.3: 0.3 / 0.4 = 0.75, times 2; its slope in log pi is -2 * 0.3 * 0.1 / 0.4^2 = -0.375.
    Sampled tokens of ratio 3, which is clipped at 1.2, and at A = -1 of ratio 20, at most 10."""
    logprobs = vector(0.3, 0.3, 0.4).log().requires_grad_()
    log_ratio = logprobs - vector(0.1, 0.1, 0.02).log()
    gap = vector(0.1, 0.1, 0.02).log()  # to a sampler of probability 1
    knobs = {"low": 0.2, "high": 0.2, "dual_c": 10.0}
    found = losses.exgrpo(log_ratio, gap, vector(2, 2, -1), flags(1, 0, 0), EACH, **knobs)
    same(found.per_token.detach(), -1.5, -2.4, 10)
    assert found.lower.tolist() == [-torch.inf, 0.8, 0.8]
    assert found.upper.tolist() == [torch.inf, 1.2, 1.2]
    found.per_token.sum().backward()
    assert logprobs.grad is not None
    same(logprobs.grad, -0.375, 0, 0)


def test_cross_entropy_by_hand() -> None:
    """-log pi and slope -1 at the given token, nothing at the sampled one, NaN though it be."""
    logprobs = vector(math.log(0.25), torch.nan).requires_grad_()
    found = losses.cross_entropy(logprobs, flags(1, 0), EACH[:2])
    same(found.detach(), math.log(4), 0)
    found.sum().backward()
    assert logprobs.grad is not None
    same(logprobs.grad, -1, 0)


def test_sampled_tokens_have_the_plain_loss() -> None:
    logprobs = vector(-0.5, -1.5, -2.5)
    log_ratio = vector(0.3, -0.3, 0.1)
    advantages = vector(1, -1, 2)
    sampled = flags(0, 0, 0)
    unclipped = policy_losses.ratio(log_ratio, advantages)
    assert torch.equal(losses.rl_plus(logprobs, log_ratio, advantages, sampled, EACH), unclipped)
    plain = policy_losses.ppo_clip(log_ratio, advantages, low=0.2, high=0.2)
    held = losses.dph(logprobs, log_ratio, advantages, logprobs, sampled, EACH, divergence="js")
    assert torch.equal(held.per_token, plain)
