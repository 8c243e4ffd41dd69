"""Losses that read the sampler: values and d loss / d logprob by hand, in float64."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.loss.per_token import sampler_losses as losses
from megatron_rl.loss.per_token.response_losses import Clipped
from tests.unit.loss.groups import same, vector

SIZE = 128  # tokens of the vocabulary
WEIGHTS: tuple[dict[str, Any], ...] = (
    {"weight": "none"},
    {"weight": "tis", "cap": 1.2},
    {"weight": "icepop", "cap": 1.3},
)


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


def test_score_centered_by_hand() -> None:
    """p = 1/4 and q = 1/2 of a head of one token, a free place beside it: alpha = 1/2 / 3/4 = 2/3,
    c = 1/2 - 2/3 1/4 = 1/3. With A = 2 the loss is -2 (1 - 1/3) log(1/4). TIS with cap 1.2:
    w = 1/2, f(1 / alpha) = 1.2, c = 1/4 - 1.2 2/3 1/4 = 1/20, the loss -2 (1/2 - 1/20) log(1/4)."""
    p, q = vector(math.log(0.25)), vector(math.log(0.5))
    heads = (torch.stack([p, p], 1), torch.stack([q, vector(-math.inf)], 1))
    loss = losses.score_centered(p, p - q, vector(2), *heads, weight="none")
    same(loss, -4 / 3 * math.log(0.25))
    loss = losses.score_centered(p, p - q, vector(2), *heads, weight="tis", cap=1.2)
    same(loss, -0.9 * math.log(0.25))


def plain_weight(log_ratio: Tensor, weight: str, cap: float = 0) -> Tensor:
    """f of the ratio."""
    ratio = log_ratio.exp()
    if weight == "icepop":
        return ratio * ((ratio <= cap) & (ratio >= 1 / cap))
    return torch.ones_like(ratio) if weight == "none" else ratio.clamp(max=cap)


def mean_gradient(
    weight: dict[str, Any], num_head: int, tail: float | None = None, by_token: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """d E_q[loss] / d logits over all sampled tokens at one prefix, the logprobs p and q.

    ``tail``: outside the head q is proportional to p, with this mass.
    """
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(SIZE, generator=draw, dtype=torch.float64).requires_grad_()
    p = logits.log_softmax(0)
    noise = 0.5 * torch.randn(SIZE, generator=draw, dtype=torch.float64)
    q = (p.detach() + noise).log_softmax(0)
    order = q.argsort(descending=True)
    ids = order[:num_head]
    if tail is not None:
        rest = order[num_head:]
        q = q.clone()
        q[ids] = q[ids].log_softmax(0) + math.log(1 - tail)
        q[rest] = p.detach()[rest].log_softmax(0) + math.log(tail)
    every = p.expand(SIZE, SIZE)
    advantages = torch.ones(SIZE, dtype=torch.float64)
    if by_token:
        advantages = torch.randn(SIZE, generator=draw, dtype=torch.float64)
    loss = losses.score_centered(
        p, p - q, advantages, every[:, ids], q.expand(SIZE, SIZE)[:, ids], **weight
    )
    (gradient,) = torch.autograd.grad((q.exp() * loss).sum(), logits)
    if by_token:  # -Cov_q(A, w s), s = e_a - p
        s = torch.eye(SIZE, dtype=torch.float64) - p.detach().exp()
        ws = plain_weight(p.detach() - q, **weight)[:, None] * s
        centered = ws - (q.exp()[:, None] * ws).sum(0)
        gradient = gradient + ((q.exp() * advantages)[:, None] * centered).sum(0)
    return gradient, p, q


def test_the_whole_vocabulary_centers_exactly() -> None:
    """With A constant the expected gradient is 0, else the covariance with the weighted score."""
    for weight in WEIGHTS:
        for by_token in (False, True):
            gradient = mean_gradient(weight, SIZE, by_token=by_token)[0]
            assert gradient.abs().max() < 1e-14


def test_a_head_centers_a_tail_like_the_policys() -> None:
    """Exactly where the sampler's tail is alpha p; elsewhere less than without a correction."""
    for weight in WEIGHTS:
        assert mean_gradient(weight, 16, tail=0.2)[0].abs().max() < 1e-14
        gradient, p, q = mean_gradient(weight, 64)
        score = torch.eye(SIZE, dtype=torch.float64) - p.detach().exp()
        own = plain_weight(p.detach() - q, **weight)
        plain = ((q.exp() * own)[:, None] * score).sum(0)
        assert 1e-6 < gradient.norm() < 0.9 * plain.norm()


def test_a_teacher_at_the_head_by_hand() -> None:
    """p = 1/2, 1/4 and q = 1/4, 1/4 leave 1/4 and 1/2: log 2 / 2 + 0 - log 2 / 4. In the second
    row the other place is free: p = 1/2, q = 1/4 leave 1/2 and 3/4. -rho A is there beside it."""
    half, quarter = math.log(0.5), math.log(0.25)
    p = torch.tensor([[half, quarter], [half, -math.inf]], dtype=torch.float64).requires_grad_()
    q = torch.tensor([[quarter, quarter], [quarter, -math.inf]], dtype=torch.float64)
    log_ratio, advantages = vector(math.log(2), 0), vector(3, 0)
    first, second = math.log(2) / 4, math.log(2) / 2 + math.log(2 / 3) / 2
    found = losses.teacher_top_k(log_ratio, advantages, p, q)
    same(found.detach(), first - 6, second)
    # d / d log p_v = p_v (log(p_v / q_v) - log of the same ratio of the rests).
    found.sum().backward()
    assert p.grad is not None
    same(p.grad[0], 0.5 * 2 * math.log(2), 0.25 * math.log(2))
    same(p.grad[1], 0.5 * (math.log(2) - math.log(2 / 3)), 0)
    found = losses.teacher_top_k(log_ratio, advantages, p, q, coef=0.5)
    same(found.detach(), first / 2 - 6, second / 2)


def test_a_head_of_all_tokens_has_the_reverse_kl_of_torch() -> None:
    """Value and gradient in logits; a part of it has less than all of it."""
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(3, SIZE, generator=draw, dtype=torch.float64).requires_grad_()
    q = torch.randn(3, SIZE, generator=draw, dtype=torch.float64).log_softmax(1)
    nothing = torch.zeros(3, dtype=torch.float64)
    p = logits.log_softmax(1)
    wanted = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(1)
    found = losses.teacher_top_k(nothing, nothing, p, q)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    (of_found,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
    (of_wanted,) = torch.autograd.grad(wanted.sum(), logits, retain_graph=True)
    torch.testing.assert_close(of_found, of_wanted, rtol=1e-9, atol=1e-9)
    ids = p.topk(16).indices
    part = losses.teacher_top_k(nothing, nothing, p.gather(1, ids), q.gather(1, ids))
    assert ((part > 0) & (part < wanted)).all()
