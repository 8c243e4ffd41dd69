"""Policy losses: values and d loss / d logprob worked out by hand, in float64. old_logprobs are
logprobs - log(rho)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.loss import policy_losses as losses
from megatron_rl.loss.whole_responses import WholeResponses
from tests.unit.loss.groups import flags, same, vector


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
    found = losses.simko(
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
    plain = losses.ppo_clip(log_ratio, vector(*[advantage] * 6), low=0.2, high=0.2)
    same(found.detach()[:5], *plain.detach()[:5].tolist())
    gradients = torch.autograd.grad(found.sum(), [log_ratio, topk])
    assert not gradients[1][:5].any()
    return found[5].item(), gradients[0][5].item(), gradients[1][5].tolist()


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
    has one response, which is its own psi; a third is not in the minibatch."""
    logprobs = vector(-1, -1, -1, -1, -1).requires_grad_()
    found = losses.pacs(
        logprobs,
        vector(0.3, 0, -0.6, 0.2, 9),
        flags(1, 0, 0, 1, 1),
        torch.tensor([7, 7, 7, 3, 5]),
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


def test_reinforce() -> None:
    check(
        lambda logprobs, _, a: losses.reinforce(logprobs, a), [(5, 1, 0.7, -1), (0.1, -2, -1.4, 2)]
    )


def test_ratio() -> None:
    check(lambda _, log_ratio, a: losses.ratio(log_ratio, a), [(5, 1, -5, -5), (0.5, -2, 1, 1)])


def test_sequence_log_ratio() -> None:
    """Response 0: mean of 0.2 and -0.1 (the third token is masked); response 1: 0.3; response 2 has
    no loss token."""
    log_ratio = vector(0.2, -0.1, 9, 0.3, 7).requires_grad_()
    mask = flags(1, 1, 0, 1, 0)
    ids = torch.tensor([0, 0, 0, 1, 2])
    found = losses.sequence_log_ratio(
        log_ratio, mask, ids, torch.tensor([2, 1, 0]), lambda sums: sums
    )
    same(found.detach(), 0.05, 0.05, 0.05, 0.3, 0)
    found[0].backward()
    assert log_ratio.grad is not None
    same(log_ratio.grad, 0.5, 0.5, 0, 0, 0)


def test_sequence_log_ratio_divides_the_sum_over_ranks() -> None:
    """Half of a response of four tokens, the other rank's half adds 0.6: (0.1 + 0.6) / 4."""
    found = losses.sequence_log_ratio(
        vector(0.2, -0.1),
        flags(1, 1),
        torch.tensor([0, 0]),
        torch.tensor([4]),
        lambda sums: sums + vector(0.6),
    )
    same(found, 0.175, 0.175)


def test_gspo_by_hand() -> None:
    """s = exp(0.05) = 1.051271 > 1.0004: clipped for A > 0, kept for A < 0 with s / 2 per token of
    the two."""
    log_ratio = vector(0.2, -0.1).requires_grad_()
    sequence = losses.sequence_log_ratio(
        log_ratio, flags(1, 1), torch.tensor([0, 0]), torch.tensor([2]), lambda sums: sums
    )
    same(losses.ppo_clip(sequence, vector(1, 1), low=3e-4, high=4e-4).detach(), -1.0004, -1.0004)
    loss = losses.ppo_clip(sequence, vector(-1, -1), low=3e-4, high=4e-4)
    same(loss.detach(), 1.051271, 1.051271)
    loss.mean().backward()
    assert log_ratio.grad is not None
    same(log_ratio.grad, 0.525636, 0.525636)
