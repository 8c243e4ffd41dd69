"""The pull towards images that matter, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_rl.config.method import load_method
from megatron_rl.loss import Method, TokenBatch
from megatron_rl.loss.per_token.perception import Perception
from tests.unit.loss.batches import response_batch, rollout, token_batch
from tests.unit.loss.groups import changed, same, vector

UNBOUNDED = Perception(max_log_ratio=1e9, max_kl=1e99)
NOTHING = [f"perception.{name}=0" for name in ("gamma", "eta", "eta_masked")]


def test_perception_kl_by_hand() -> None:
    """exp(d) - d - 1 at d = 0, log 2, -log 2, 2."""
    logprobs = vector(-1, -3, -1, -2)
    masked = logprobs + vector(0, math.log(2), -math.log(2), 2)
    wanted = (0, 1 - math.log(2), math.log(2) - 0.5, math.e**2 - 3)
    same(UNBOUNDED.kl(logprobs, masked), *wanted)
    same(Perception().kl(logprobs, masked), *wanted)


def test_perception_kl_keeps_what_a_small_difference_has() -> None:
    """d^2 / 2 at d = 1e-6, which exp(d) - 1 - d loses in float64."""
    found = Perception().kl(vector(0), vector(1e-6))
    assert found.item() == pytest.approx(5e-13, rel=1e-6, abs=0)


def test_the_bounds_of_perception_kl_by_hand() -> None:
    """d = 3, -12, 25, -25: the last two are cut to +-20 and then to 18, and have no gradient. The
    first cut alone leaves 20 - 1 of -25."""
    logprobs = vector(-30, 0, -30, 0).requires_grad_()
    masked = vector(-27, -12, -5, -25)
    found = Perception(max_kl=18.0).kl(logprobs, masked)
    same(found.detach(), math.e**3 - 4, math.exp(-12) + 11, 18, 18)
    found.sum().backward()
    assert logprobs.grad is not None
    same(logprobs.grad, 1 - math.e**3, 1 - math.exp(-12), 0, 0)
    found = Perception(max_kl=99.0).kl(vector(0), vector(-25))
    same(found, math.exp(-20) + 19)
    found = Perception(max_log_ratio=2.0, max_kl=99.0).kl(vector(0), vector(25))
    same(found, math.e**2 - 3)


def test_perception_loss_by_hand() -> None:
    """One token at d = log 2: KL = 1 - log 2, slopes 1 - 2 and 2 - 1."""
    logprobs = vector(-3).requires_grad_()
    masked = vector(-3 + math.log(2)).requires_grad_()
    weighted = Perception(gamma=0.5, eta=0.25, eta_masked=0.125)
    kl = weighted.kl(logprobs, masked)
    loss = weighted.loss(logprobs, masked, kl)
    same(kl.detach(), 1 - math.log(2))
    same(loss.detach(), -0.5 * (1 - math.log(2)) + 0.25 * 3 + 0.125 * (3 - math.log(2)))
    loss.sum().backward()
    assert logprobs.grad is not None and masked.grad is not None
    same(logprobs.grad, 0.5 - 0.25)
    same(masked.grad, -0.5 - 0.125)


def test_gradients_are_slopes() -> None:
    """In float64, of both, by finite differences."""
    draw = torch.Generator().manual_seed(0)
    values = -2 * torch.rand(2, 9, generator=draw, dtype=torch.float64)

    def loss(logprobs: Tensor, masked: Tensor) -> Tensor:
        weighted = Perception(gamma=0.3, eta=0.2, eta_masked=0.1)
        return weighted.loss(logprobs, masked, weighted.kl(logprobs, masked))

    assert torch.autograd.gradcheck(loss, [each.requires_grad_() for each in values.clone()])


def gradients(method: Method, **changes: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss of a random rollout, and its gradients at logprobs and masked logprobs."""
    rows = rollout(1)
    batch = token_batch(rows, method.credit(response_batch(rows)))
    batch = changed(batch, **changes)
    loss = method.loss(batch).loss
    loss.backward()
    assert batch.logprobs.grad is not None
    return loss.detach(), batch.logprobs.grad, batch.token_columns["masked_logprobs"].grad


def test_without_its_terms_it_is_grpo_bit_for_bit() -> None:
    found, slopes, of_masked = gradients(load_method("papo", NOTHING))
    grpo = load_method("grpo", ["policy_loss.high=0.3", "kl.coef=0.01"])
    wanted, plain, nothing = gradients(grpo)
    assert torch.equal(found, wanted) and torch.equal(slopes, plain)
    assert of_masked is not None and nothing is None and not of_masked.any()


def test_an_image_that_changes_nothing_has_no_kl_and_no_gradient() -> None:
    method = load_method("papo", NOTHING[1:])
    rows = rollout(1)
    batch = token_batch(rows, method.credit(response_batch(rows)))
    seen = batch.logprobs.detach()
    same_masked = seen.clone().requires_grad_()
    found, slopes, of_masked = gradients(method, masked_logprobs=same_masked)
    wanted, plain, _ = gradients(load_method("papo", NOTHING), masked_logprobs=same_masked.detach())
    assert torch.equal(found, wanted) and torch.equal(slopes, plain)
    assert of_masked is not None and not of_masked.any()


def test_both_kinds_of_masked_logprobs_have_one_gradient_at_the_plain_ones() -> None:
    """Without gradient nothing else changes; each token has the weight of its policy term."""
    method = load_method("papo")
    found, slopes, of_masked = gradients(method)
    rows = rollout(1)
    batch = token_batch(rows, method.credit(response_batch(rows)))
    assert of_masked is not None
    fixed = batch.token_columns["masked_logprobs"].detach()
    held, held_slopes, nothing = gradients(method, masked_logprobs=fixed)
    assert torch.equal(found, held) and torch.equal(slopes, held_slopes) and nothing is None
    difference = fixed - batch.logprobs.detach()
    counts = torch.bincount(batch.response_index)[batch.response_index]
    wanted = (-0.02 * torch.expm1(difference) - 0.05) / len(rows) / counts
    torch.testing.assert_close(of_masked, wanted, rtol=1e-9, atol=1e-15)


def test_metrics_by_hand() -> None:
    """Two tokens at d = 0 and log 2, a third outside the mask."""
    method = load_method("papo", ["kl.coef=0", "aggregate.name=token_mean"])
    nan = math.nan
    batch = TokenBatch(
        logprobs=vector(-1, -2, nan).requires_grad_(),
        old_logprobs=vector(-1, -2, nan),
        response_index=torch.zeros(3, dtype=torch.int64),
        loss_mask=torch.tensor([True, True, False]),
        advantages=vector(0),
        kl_weights=vector(1),
        token_columns={"masked_logprobs": vector(-1, -2 + math.log(2), nan).requires_grad_()},
    )
    found = {key: value.item() for key, value in method.loss(batch).metrics.items()}
    kl = (1 - math.log(2)) / 2
    masked = 1.5 - math.log(2) / 2
    assert found["kl/perception_mean"] == pytest.approx(kl)
    assert found["entropy/masked_sampled_mean"] == pytest.approx(masked)
    wanted = -0.02 * kl + 0.05 * 1.5 + 0.05 * masked
    assert found["loss/perception"] == pytest.approx(wanted)
    assert found["loss/total"] == pytest.approx(wanted)
