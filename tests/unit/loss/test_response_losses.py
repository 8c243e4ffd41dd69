"""Policy losses that look inside a response: values and gradients by hand, in float64."""

import math

import torch
from torch import Tensor

from megatron_rl.loss.per_token import policy_losses
from megatron_rl.loss.per_token import response_losses as losses
from megatron_rl.loss.whole_responses import WholeResponses
from tests.unit.loss.groups import flags, same, terms, vector
from tests.unit.loss.test_policy_losses import check


def test_entropy_clip_by_hand() -> None:
    """The last token has the entropy above the 0.8-quantile (rank 4 of 0 to 5): it alone may reach
    1.5 and 0.5."""
    responses = WholeResponses(
        torch.zeros(6, dtype=torch.int64), flags(*[1] * 6), 1, lambda columns: columns
    )
    entropy = vector(10, 0, 20, 30, 40, 50)

    def function(_: Tensor, log_ratio: Tensor, a: Tensor) -> Tensor:
        found = losses.entropy_clip(log_ratio, a, entropy, responses)
        same(found.lower, *[0.8] * 5, 0.5)
        same(found.upper, *[1.2] * 5, 1.5)
        return found.per_token

    plain = [(1.5, 1, -1.2, 0), (0.5, 1, -0.5, -0.5), (0.5, -1, 0.8, 0), (1.4, -1, 1.4, 1.4)]
    plain += [(1.1, 2, -2.2, -2.2)]
    for last in [(1.4, 1, -1.4, -1.4), (1.6, 1, -1.5, 0), (0.4, -1, 0.5, 0), (0.6, -1, 0.6, 0.6)]:
        check(function, [*plain, last])


def gmpo(log_ratio: Tensor, advantages: Tensor, **knobs: float) -> losses.Clipped:
    """Responses of two loss tokens and one, the third token takes no part."""
    return losses.gmpo(
        log_ratio, advantages, terms(flags(1, 1, 0, 1), [0, 0, 0, 1], [2, 1]), **knobs
    )


def test_gmpo_by_hand() -> None:
    """log rho = 0.9, -0.8 with A = 2: the first stops at 0.3, s = exp(-0.5 / 2), and -2 s / 2 is
    the gradient of the second alone, in the mean of the two. With A = -2 the second stops at -0.4:
    s = exp(0.5 / 2). The last response: its own ratio, 0.9, is above for A = 1, not for -1."""
    for sign, mean, first, second, alone in (
        (1, -0.25, 0, -math.exp(-0.25), 0),
        (-1, 0.25, math.exp(0.25), 0, math.exp(0.9)),
    ):
        log_ratio = vector(0.9, -0.8, 7, 0.9).requires_grad_()
        advantages = sign * vector(2, 2, 2, 1)
        found, lower, upper = gmpo(log_ratio, advantages, low=0.4, high=0.3)
        same(found[:2].detach(), *[-sign * 2 * math.exp(mean)] * 2)
        same(found[3:].detach(), -sign * math.exp(0.3 if sign > 0 else 0.9))
        same(lower, *[math.exp(-0.4)] * 4)
        same(upper, *[math.exp(0.3)] * 4)
        (found * vector(0.5, 0.5, 0, 1)).sum().backward()
        assert log_ratio.grad is not None
        same(log_ratio.grad, first, second, 0, alone)


def test_gmpo_without_advantage_is_zero_by_hand() -> None:
    same(gmpo(vector(0.9, -0.8, 7, 0.9), vector(0, 0, 0, 0)).per_token, 0, 0, 0, 0)


def test_gmpo_of_one_token_is_ppo_clip() -> None:
    """At 1 - e^-0.4 and e^0.4 - 1, the defaults."""
    draw = torch.Generator().manual_seed(0)
    log_ratio, advantages = torch.randn(2, 50, generator=draw, dtype=torch.float64)
    ones = [1] * 50
    found = losses.gmpo(log_ratio, advantages, terms(flags(*ones), range(50), ones))
    bounds = {"low": 1 - math.exp(-0.4), "high": math.exp(0.4) - 1}
    same(found.per_token, *policy_losses.ppo_clip(log_ratio, advantages, **bounds).tolist())


def test_gmpo_divides_the_sum_over_ranks() -> None:
    """Half of a response of four tokens; the other rank's half adds 0.6: (0.1 + 0.6) / 4."""
    shared = terms(flags(1, 1), [0, 0], [4], lambda sums: sums + vector(0.6))
    found = losses.gmpo(vector(0.2, -0.1), vector(1, 1), shared)
    same(found.per_token, *[-math.exp(0.175)] * 2)


def simko(
    rho: float, advantage: float, correct: int, is_argmax: int, **knobs: float
) -> tuple[float, float, list[float]]:
    """Loss, and its gradients at the logprob and at those of the two most likely tokens, of the
    last of six tokens, whose entropy is above the 0.8-quantile."""
    responses = WholeResponses(
        torch.zeros(6, dtype=torch.int64), flags(*[1] * 6), 1, lambda columns: columns
    )
    log_ratio = torch.full((6,), math.log(rho), dtype=torch.float64, requires_grad=True)
    topk = torch.tensor([[-0.5, -1.5]] * 6, dtype=torch.float64, requires_grad=True)
    found, lower, upper = losses.simko(
        log_ratio,
        vector(*[advantage] * 6),
        vector(10, 0, 20, 30, 40, 50),
        flags(correct),
        torch.zeros(6, dtype=torch.int64),
        topk,
        flags(*[is_argmax] * 6),
        responses,
        **{"top_k": 2, **knobs},
    )
    same(torch.stack([lower, upper])[:, 5], 0.8, 1.2)
    plain = policy_losses.ppo_clip(log_ratio, vector(*[advantage] * 6), low=0.2, high=0.2)
    same(found.detach()[:5], *plain.detach()[:5].tolist())
    gradients = torch.autograd.grad(found.sum(), [log_ratio, topk])
    assert not gradients[1][:5].any()
    return found[5].item(), gradients[0][5].item(), gradients[1][5].tolist()


def test_bounds_around_one_by_hand() -> None:
    """rho 1.5 at A 2 stops at 1.3, and 0.5 at A -2 at 0.9."""
    found = losses.clipped_around_one(vector(1.5, 0.5), vector(2, -2), 0.1, 0.3)
    same(torch.cat([*found]), -2.6, 1.8, 0.9, 0.9, 1.3, 1.3)


def test_simko_by_hand() -> None:
    """rho 1.1, A 2, a 0.2, K 2: the value is that of the plain loss, -2.2; of its gradient 0.8
    stay, and each of the two most likely tokens gets 0.1."""
    loss, own, others = simko(1.1, 2.0, 1, 1, spread=0.2)
    same(vector(loss, own, *others), -2.2, -1.76, -0.22, -0.22)
    loss, own, others = simko(1.1, 2.0, 0, 1, spread=0.2)
    same(vector(loss, own, *others), -2.2, -2.2, 0, 0)
    loss, own, others = simko(1.5, 2.0, 1, 1, spread=0.2)
    same(vector(loss, own, *others), -2.4, 0, 0, 0)  # clipped


def test_simko_holds_the_most_likely_token_back_by_hand() -> None:
    """A = -2 becomes -2.2 at a token that none exceeds, and of a response that is not correct its
    gradient stays where it is."""
    same(vector(*simko(1.1, -2.0, 0, 1)[:2]), 2.42, 2.42)
    same(vector(*simko(1.1, -2.0, 0, 0)[:2]), 2.2, 2.2)
    same(vector(*simko(1.1, -2.0, 0, 1, penalty=2.0)[:2]), 4.4, 4.4)
    same(vector(*simko(1.1, 2.0, 0, 1)[:2]), -2.2, -2.2)


def test_pacs_by_hand() -> None:
    """One group of three, the first correct, with rhat = 0.3, 0, -0.6: psi = 0.6, 0.15, -0.75,
    w = 1.5, 0.75, 0.75. Its second response has two tokens, which share its loss. A second group
    has one response, which is its own psi; the last one of the first is not in the minibatch."""
    logprobs = vector(-1, -1, -1, -1, -1).requires_grad_()
    found = losses.pacs(
        logprobs,
        vector(0.3, 0, -0.6, 0.2, 9),
        flags(1, 0, 0, 1, 1),
        torch.tensor([7, 7, 7, 3, 7]),
        torch.tensor([1, 2, 1, 1, 0]),
        torch.tensor([0, 1, 1, 2, 3]),
    )
    bce = [0.437488, 0.770957, 0.386871, 0.598139]
    same(found.detach(), 1.5 * bce[0], *[0.375 * bce[1]] * 2, 0.75 * bce[2], bce[3])
    found.sum().backward()
    slope = [1.5 * (0.645656 - 1), 0.75 * 0.537430, 0.75 * 0.320821]
    pull = [
        slope[0] - (slope[1] + slope[2]) / 2,
        slope[1] - (slope[0] + slope[2]) / 2,
        slope[2] - (slope[0] + slope[1]) / 2,
    ]
    assert logprobs.grad is not None
    same(logprobs.grad, pull[0], pull[1], pull[1], pull[2], 0.549834 - 1)


def test_adaptive_clip_by_hand() -> None:
    """q = 0.9: 1/2 + sqrt(1 - 0.64 / 0.9) / 2 = 0.768742 and 1/2 + sqrt(1 + 0.8 / 0.9) / 2 =
    1.187184; q = 0.1: the root's argument is negative, so 1/2, and 1/2 + sqrt(9) / 2 = 2;
    q = 0.001: 1/2 + sqrt(801) / 2 is above 10, and so is rho = 12, where A < 0 loses 10 at most."""
    old = vector(0.9, 0.9, 0.1, 0.1, 0.001, 0.001).log()
    rho = vector(1.1, 1.5, 1.9, 0.4, 12, 12)
    logprobs = (old + rho.log()).requires_grad_()
    advantages = vector(1, 1, 1, -1, 1, -1)
    found = losses.adaptive_clip(logprobs, logprobs - old, advantages)
    same(found.lower, 0.768742, 0.768742, 0.5, 0.5, 0.5, 0.5)
    same(found.upper, 1.187184, 1.187184, 2, 2, 10, 10)
    same(found.per_token.detach(), -1.1, -1.187184, -1.9, 0.5, -10, 10)
    found.per_token.sum().backward()
    assert logprobs.grad is not None
    same(logprobs.grad, -1.1, 0, -1.9, 0, 0, 0)
    single = losses.adaptive_clip(logprobs, logprobs - old, advantages, dual_c=None)
    same(single.per_token.detach(), -1.1, -1.187184, -1.9, 0.5, -10, 12)
    wide = losses.adaptive_clip(logprobs, logprobs - old, advantages, low=0.0, high=0.0)
    same(wide.upper, *[1.0] * 6)
    same(wide.lower, *[1.0] * 6)
