"""The composition of policy term, KL, entropy and corrections, by hand on three tokens of two
responses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.loss import TokenBatch, choices
from megatron_rl.loss.config import MethodConfig
from megatron_rl.loss.per_token.token_loss import token_loss
from tests.unit.loss.groups import flags, same, terms, vector
from tests.unit.loss.groups import plain as plan

TIS = {"kind": "tis"}
PPO: dict[str, Any] = {"policy_loss": {"name": "ppo_clip"}}
KL = {"coef": 0.1, "estimator": "k1"}


def batch(**changes: Any) -> TokenBatch:
    """Response 0: tokens -1, -2 with A = 1; response 1: token -3 with A = -2. k1 against the
    reference: 0.5, 0, -1."""
    return TokenBatch(
        **{
            "logprobs": vector(-1, -2, -3).requires_grad_(),
            "old_logprobs": vector(-1, -2, -3),
            "response_index": torch.tensor([0, 0, 1]),
            "loss_mask": flags(1, 1, 1),
            "advantages": vector(1, -2),
            "kl_weights": vector(1, 0.5),
            "ref_logprobs": vector(-1.5, -2, -2),
            "correct": flags(1, 0),
        }
        | _in_columns(changes)
    )


def _in_columns(changes: dict[str, Any]) -> dict[str, Any]:
    """Fields, and all else as columns of tokens."""
    fields = TokenBatch.__dataclass_fields__
    others = {name: value for name, value in changes.items() if name not in fields}
    found = {name: value for name, value in changes.items() if name in fields}
    return found | {"token_columns": others}


def run(config: MethodConfig | None = None, **changes: Any) -> Any:
    return token_loss(batch(**changes), config or plan())


def test_aggregations_by_hand() -> None:
    """Per-token losses -A logp are 1, 2 and -6."""
    for name, expected in (
        ({"name": "seq_mean_token_mean"}, (1.5 - 6) / 2),
        ({"name": "token_mean"}, -1.0),
        ({"name": "seq_mean_token_sum"}, -1.5),
        ({"name": "seq_mean_token_sum_norm", "norm_len": 10}, -0.15),
    ):
        same(run(plan(aggregate=name)).loss[None].detach(), expected)


def test_kl_by_hand() -> None:
    """Weighted k1: 0.5, 0, -0.5. Sequence mean: (0.25 - 0.5) / 2; token mean: 0. The coefficient is
    0.1."""
    result = run(plan(kl=KL))
    same(result.metrics["loss/kl"][None], -0.0125)
    same(result.loss[None].detach(), -2.25 - 0.0125)
    same(run(plan(kl=KL | {"aggregate": {"name": "token_mean"}})).metrics["loss/kl"][None], 0)
    same(result.metrics["kl/reference_mean"][None], -0.5 / 3)


BY_SIGN = KL | {"coef": 0.0, "coef_positive": 0.1, "coef_negative": 0.4}


def test_kl_coefficients_by_sign() -> None:
    """0.1 for the correct response, 0.4 for the incorrect one, times its weight 0.5: (0.025 - 0.2)
    / 2."""
    same(run(plan(kl=BY_SIGN)).metrics["loss/kl"][None], -0.0875)


def test_gradient_of_the_whole_by_hand() -> None:
    """-A w + coef weight w: w = 1/4, 1/4, 1/2."""
    data = batch()
    token_loss(data, plan(kl=KL)).loss.backward()
    assert data.logprobs.grad is not None
    same(data.logprobs.grad, -0.25 + 0.025, -0.25 + 0.025, 1 + 0.025)


def test_entropy_by_hand() -> None:
    """Subtracted, aggregated like the policy term: 0.2 * ((1 + 3) / 2 + 5) / 2 = 0.7."""
    same(run(plan(entropy={"coef": 0.2}), entropy=vector(1, 3, 5)).loss[None].detach(), -2.25 - 0.7)
    result = run(entropy=vector(1, 3, 5))
    same(result.loss[None].detach(), -2.25)
    same(result.metrics["entropy/mean"][None], 3)


def test_masked_tokens_are_never_used() -> None:
    """NaN and infinity outside the mask reach neither value nor gradient, whatever the loss."""
    bad = vector(-1, math.nan, -3)
    for changes in (
        {},
        PPO,
        {"policy_loss": {"name": "gspo", "low": 0.2, "high": 0.2}},
        {"policy_loss": {"name": "cispo"}},
        {"policy_loss": {"name": "sapo"}},
        {"policy_loss": {"name": "gmpo"}},
        {"policy_loss": {"name": "dppo"}},
        {"policy_loss": {"name": "dppo", "divergence": "kl"}},
        {"policy_loss": {"name": "ipo"}},
        {"policy_loss": {"name": "clip_cov"}},
        {"policy_loss": {"name": "kl_cov"}},
    ):
        of_sampler = changes.get("policy_loss", {}).get("name") in ("dppo", "ipo")
        weighted = () if of_sampler else ("tis", "icepop")
        for mismatch in ("none", "sequence_mask", *weighted):
            data = batch(
                logprobs=bad.clone().requires_grad_(),
                old_logprobs=vector(-1, math.inf, -3),
                ref_logprobs=bad,
                entropy=bad,
                sampler_logprobs=bad,
                loss_mask=flags(1, 0, 1),
                token_place=torch.arange(3),
                columns={"chosen_places": torch.tensor([-1, 2])},
            )
            result = token_loss(
                data, plan(kl=KL, entropy={"coef": 0.1}, mismatch={"kind": mismatch}, **changes)
            )
            result.loss.backward()
            assert data.logprobs.grad is not None
            assert (
                result.loss.isfinite()
                and data.logprobs.grad.isfinite().all()
                and data.logprobs.grad[1] == 0
            )
            assert all(value.isfinite() for value in result.metrics.values())


def test_an_empty_mask_and_an_empty_batch_give_zero() -> None:
    for changes in ({"loss_mask": flags(0, 0, 0), "sampler_logprobs": vector(-1, -2, -3)}, EMPTY):
        data = batch(**changes)
        result = token_loss(data, plan(kl=KL, mismatch=TIS, **PPO))
        result.loss.backward()
        assert (
            result.loss.item() == 0
            and data.logprobs.grad is not None
            and not data.logprobs.grad.any()
        )
        assert all(value.isfinite() for value in result.metrics.values())


EMPTY: dict[str, Any] = {
    "logprobs": vector().requires_grad_(),
    "old_logprobs": vector(),
    "ref_logprobs": vector(),
    "sampler_logprobs": vector(),
    "response_index": torch.tensor([], dtype=torch.int64),
    "loss_mask": flags(),
}


def test_correction_weights_the_policy_term_alone() -> None:
    """w = min(exp(old - sampler), 2) = 0.5, 2, 1 on losses 1, 2, -6: (0.25 + 2 - 6) / 2; the KL
    stays."""
    sampler = vector(-1 - math.log(0.5), -2 - math.log(8), -3)
    result = run(plan(mismatch=TIS, kl=KL), sampler_logprobs=sampler)
    same(result.metrics["loss/policy"][None], (0.25 + 2 - 6) / 2)
    same(result.metrics["loss/kl"][None], -0.0125)
    same(result.metrics["policy/ratio_mean"][None], 1)
    same(result.metrics["policy/correction_weight_mean"][None], 3.5 / 3)
    same(
        run(plan(mismatch=TIS), old_logprobs=sampler, sampler_logprobs=sampler).metrics[
            "policy/correction_weight_mean"
        ][None],
        1,
    )
    dropped = run(plan(mismatch={"kind": "icepop"}), sampler_logprobs=sampler)
    same(dropped.metrics["policy/correction_dropped_share"][None], 1 / 3)


def test_correction_weights_the_gate() -> None:
    """On policy sapo is worth -2 A / tau, A = 1, 1, -2: at tau 1 and 2 w = 0.5, 2, 1 makes the
    losses -1, -4 and 2, whose gradients are -w A. icepop leaves the second token out."""
    sampler = vector(-1 - math.log(0.5), -2 - math.log(8), -3)
    gate = {"name": "sapo", "tau_neg": 2.0}
    for mismatch, weights in ((TIS, (0.5, 2, 1)), ({"kind": "icepop"}, (0.5, 0, 1))):
        data = batch(sampler_logprobs=sampler)
        result = token_loss(data, plan(policy_loss=gate, mismatch=mismatch))
        result.loss.backward()
        first, second, third = weights
        same(result.loss[None].detach(), (-first - second + 2 * third) / 2)
        assert data.logprobs.grad is not None
        same(data.logprobs.grad, -first / 4, -second / 4, third)


def test_correction_weights_the_geometric_mean() -> None:
    """On policy gmpo is worth -A, at weights 1/2, 1/2 of two responses: w = 0.5, 2, 1 makes that
    -1.25 and 2, and both tokens of the first have half of its gradient. A token that icepop drops
    (w = 0.5, 0, 1) still moves the mean of its response."""
    sampler = vector(-1 - math.log(0.5), -2 - math.log(8), -3)
    for mismatch, mean in ((TIS, 1.25), ({"kind": "icepop"}, 0.25)):
        data = batch(sampler_logprobs=sampler)
        weighted = plan(policy_loss={"name": "gmpo"}, mismatch=mismatch)
        result = token_loss(data, weighted)
        result.loss.backward()
        same(result.loss[None].detach(), (-mean + 2) / 2)
        assert data.logprobs.grad is not None
        same(data.logprobs.grad, -mean / 4, -mean / 4, 1)


def test_a_ratio_to_the_sampler_by_hand() -> None:
    """On policy, rho = 0.5, 2, 1 of sampler probabilities 2/e, 1/(2 e^2), 1/e^3 with A = 1, 1, -2:
    losses -0.5, -2, 2. The first is far, but led back to the sampler, which ipo does not ask. A
    sequence mask drops the first response where sqrt(2 * 2) is above its cap."""
    sampler = vector(-1 - math.log(0.5), -2 - math.log(2), -3)
    for name, first in (("dppo", 0.5), ("ipo", 0)):
        data = batch(sampler_logprobs=sampler)
        result = token_loss(data, plan(policy_loss={"name": name}))
        result.loss.backward()
        same(result.loss[None].detach(), (-(first + 2) / 2 + 2) / 2)
        assert data.logprobs.grad is not None
        same(data.logprobs.grad, -first / 4, -2 / 4, 2 / 2)
        same(result.metrics["policy/ratio_mean"][None], 3.5 / 3)
        same(result.metrics["policy/kl_old_mean"][None], 0)
        same(result.metrics["policy/clip_down_positive_share"][None], 0 if first else 1 / 3)
        same(result.metrics["policy/clip_up_positive_share"][None], 0)
    masked = plan(policy_loss={"name": "dppo"}, mismatch={"kind": "sequence_mask", "cap": 1.5})
    far = vector(-1 - math.log(2), -2 - math.log(2), -3)
    same(run(masked, sampler_logprobs=far).loss[None].detach(), 1)
    same(run(masked, sampler_logprobs=sampler).loss[None].detach(), 0.375)


def test_clip_shares_by_hand() -> None:
    """rho = 1.5 and 0.5 with A > 0, 1.5 with A < 0; shares are of the loss tokens of the minibatch
    (here said to be 6)."""
    old = vector(-1 - math.log(1.5), -2 - math.log(0.5), -3 - math.log(1.5))
    metrics = run(
        plan(**PPO),
        old_logprobs=old,
        num_tokens=6,
        num_responses=2,
        response_loss_tokens=torch.tensor([2, 1]),
    ).metrics
    found = [
        metrics[f"policy/clip_{side}_{sign}_share"].item()
        for sign in ("positive", "negative")
        for side in ("up", "down")
    ]
    assert found == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0])
    assert metrics["policy/ratio_max"].item() == pytest.approx(1.5)
    assert metrics["policy/ratio_mean"].item() == pytest.approx(3.5 / 6)


def test_response_mean() -> None:
    """Response 0: mean of 0.2 and -0.1 (the third token is masked); response 1: 0.3; response 2 has
    no loss token."""
    log_ratio = vector(0.2, -0.1, 9, 0.3, 7).requires_grad_()
    found = terms(flags(1, 1, 0, 1, 0), [0, 0, 0, 1, 2], [2, 1, 0]).response_mean(log_ratio)
    same(found.detach(), 0.05, 0.05, 0.05, 0.3, 0)
    found[0].backward()
    assert log_ratio.grad is not None
    same(log_ratio.grad, 0.5, 0.5, 0, 0, 0)


def test_response_mean_divides_the_sum_over_ranks() -> None:
    """Half of a response of four tokens, the other rank's half adds 0.6: (0.1 + 0.6) / 4."""
    shared = terms(flags(1, 1), [0, 0], [4], lambda sums: sums + vector(0.6))
    same(shared.response_mean(vector(0.2, -0.1)), 0.175, 0.175)


def test_sequence_sum_reaches_the_ratio_and_the_mask() -> None:
    """Two ranks hold halves of one response of two tokens: log ratios 0.2 here and 0.4 there."""
    data = dict(
        logprobs=vector(-1).requires_grad_(),
        old_logprobs=vector(-1.2),
        response_index=torch.tensor([0]),
        loss_mask=flags(1),
        advantages=vector(-1),
        kl_weights=vector(1),
        ref_logprobs=None,
        correct=None,
        response_loss_tokens=torch.tensor([2]),
        num_responses=1,
        num_tokens=2,
    )
    gspo = plan(policy_loss={"name": "gspo"})
    result = token_loss(TokenBatch(**data), gspo, None, lambda sums: sums + 0.4)
    same(result.loss[None].detach(), math.exp(0.3) / 2)


BONUS = {"entropy_bonus": {"alpha": 0.4, "kappa": 2.0}}


def test_token_shaping_by_hand() -> None:
    """A = 1, 1, -2 and 0.4 H = 0.4, 1.2, 0.4, of which |A| / 2 leaves 0.4, 0.5, 0.4: the losses
    -A logp are 1.4, 3 and -4.8. In order: the bonus is of what came before it."""
    result = run(plan(token_shaping=BONUS), entropy=vector(1, 3, 1))
    same(result.metrics["loss/policy"][None], (2.2 - 4.8) / 2)
    same(result.metrics["policy/token_advantage_mean"][None], (1.4 + 1.5 - 1.6) / 3)
    choices.TOKEN_SHAPERS.entering("doubled")(lambda advantages: 2 * advantages)
    try:
        both = run(plan(token_shaping={**BONUS, "doubled": {}}), entropy=vector(1, 3, 1))
    finally:
        del choices.TOKEN_SHAPERS["doubled"]
    same(both.metrics["policy/token_advantage_mean"][None], 2 * (1.4 + 1.5 - 1.6) / 3)


def test_token_shaping_has_no_gradient() -> None:
    """Also where the loss is given entropies with one."""
    entropy = vector(1, 3, 1).requires_grad_()
    shaped = plan(token_shaping=BONUS, entropy={"coef": 0.2})
    run(shaped, entropy=entropy).loss.backward()
    assert entropy.grad is not None
    same(entropy.grad, -0.05, -0.05, -0.1)


def leaky(advantages: Tensor, logprobs: Tensor) -> Tensor:
    return advantages + logprobs


def test_what_a_token_shaper_returns_is_a_constant() -> None:
    """A + logp = 0, -1, -5: the gradient is -(A + logp) w alone."""
    choices.TOKEN_SHAPERS.entering()(leaky)
    try:
        data = batch()
        shaped = plan(token_shaping={"leaky": {}})
        token_loss(data, shaped).loss.backward()
    finally:
        del choices.TOKEN_SHAPERS["leaky"]
    assert data.logprobs.grad is not None
    same(data.logprobs.grad, 0, 0.25, 2.5)


def test_clip_shares_of_bounds_that_differ_by_token() -> None:
    """Of one response of six tokens the last may reach 1.5: its ratio of 1.4 is not clipped, the
    1.3 of the first is."""
    old = vector(-1 - math.log(1.3), *[-1] * 4, -1 - math.log(1.4))
    result = run(
        plan(policy_loss={"name": "entropy_clip"}),
        logprobs=vector(*[-1] * 6).requires_grad_(),
        old_logprobs=old,
        response_index=torch.zeros(6, dtype=torch.int64),
        loss_mask=flags(*[1] * 6),
        advantages=vector(1),
        kl_weights=vector(1),
        ref_logprobs=None,
        correct=flags(1),
        entropy=vector(10, 0, 20, 30, 40, 50),
    )
    same(result.metrics["policy/clip_up_positive_share"][None], 1 / 6)
    same(result.metrics["loss/policy"][None], -(1.2 + 4 + 1.4) / 6)


def test_missing_fields_are_named() -> None:
    for changes, lacking, message in (
        ({"token_shaping": BONUS}, {}, "has no entropy, but the method reads it"),
        ({"policy_loss": {"name": "entropy_clip"}}, {}, "no entropy"),
        ({"token_shaping": {"zero_variance": {}}}, {"entropy": vector(1, 1, 1)}, "group_accuracy"),
        ({"kl": KL}, {"ref_logprobs": None}, "no ref_logprobs"),
        ({"kl": BY_SIGN}, {"correct": None}, "no correct"),
        ({"entropy": {"coef": 0.1}}, {}, "no entropy"),
        ({"mismatch": TIS}, {}, "no sampler_logprobs"),
        ({"aggregate": {"name": "seq_mean_token_sum_norm"}}, {}, r"aggregate\.norm_len is null"),
    ):
        with pytest.raises(ValueError, match=message):
            run(plan(**changes), **lacking)
