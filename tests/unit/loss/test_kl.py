"""KL estimators and weights against values and derivatives worked out by hand."""

import torch

from megatron_rl.loss.per_token import kl
from megatron_rl.loss.segments import segments_of
from tests.unit.loss.groups import flags, same, vector

LOGPROBS, REF = vector(-1, -1, -1), vector(-1.5, -0.5, -1)  # d = -0.5, 0.5, 0


def derivative(name: str) -> torch.Tensor:
    logprobs = LOGPROBS.clone().requires_grad_()
    kl.ESTIMATORS[name](logprobs, REF).sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad


def test_estimators_by_hand() -> None:
    same(kl.k1(LOGPROBS, REF), 0.5, -0.5, 0)
    same(kl.k2(LOGPROBS, REF), 0.125, 0.125, 0)
    same(kl.k3(LOGPROBS, REF), 0.106531, 0.148721, 0)


def test_derivatives_by_hand() -> None:
    """dk1 = 1, dk2 = -d, dk3 = 1 - exp(d)."""
    same(derivative("k1"), 1, 1, 1)
    same(derivative("k2"), 0.5, -0.5, 0)
    same(derivative("k3"), 0.393469, -0.648721, 0)
    same(derivative("low_var_kl"), 0.393469, -0.648721, 0)


def test_k3_is_not_clamped_and_keeps_small_differences() -> None:
    same(
        kl.k3(vector(-30), vector(0)),
        torch.tensor(30.0, dtype=torch.float64).exp().item() - 31,
        tolerance=1,
    )
    assert abs(kl.k3(vector(-1), vector(-1 + 1e-9)).item() / 5e-19 - 1) < 1e-3


def test_curves_by_hand() -> None:
    share = vector(0, 0.5, 0.875, 1)
    same(kl.CURVES["exponential"](share), 0.934012, 0.743118, 0.288077, 0)
    same(kl.CURVES["linear"](share), 1, 0.5, 0.125, 0)
    same(kl.CURVES["cubic"](share), 1, 0.875, 0.330078, 0)


def test_dads_by_hand() -> None:
    """Half right: correct ones get f(1/2); 1 of 8 right: f(7/8); all right: 1 (not f(0)); all
    wrong: 1."""
    correct = flags(1, 0, 1, *[0] * 7, 1, 1, 0, 0)
    groups = segments_of(torch.tensor([0, 0, *[1] * 8, 2, 2, 3, 3]))
    found = kl.dads(correct, groups.mean(correct.double()), groups, curve="exponential")
    same(found, 0.743118, 1, 0.288077, *[1] * 7, 1, 1, 1, 1)
    same(kl.dads(correct, groups.mean(correct.double()), groups, curve="linear")[:3], 0.5, 1, 0.125)
