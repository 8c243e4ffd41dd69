"""The reward of a policy for itself, by hand."""

import torch
from torch import Tensor

from megatron_rl.config.method import load_method
from megatron_rl.loss import LossOutput, TokenBatch
from megatron_rl.loss.per_token.self_reward import SelfReward
from tests.unit.loss.groups import flags, same, vector


def term(end_logprobs: Tensor, start: float, correct: Tensor, was_cut: Tensor) -> LossOutput:
    """Responses of one token each, whose policy term and advantages are 0."""
    method = load_method("laser", ["policy_loss.name=reinforce", "self_reward.alpha=0.3"])
    num = len(correct)
    ones = vector(*[1] * num)
    batch = TokenBatch(
        logprobs=-ones,
        old_logprobs=-ones,
        response_index=torch.arange(num),
        loss_mask=ones.bool(),
        advantages=0 * ones,
        kl_weights=ones,
        correct=correct,
        columns={
            "end_logprobs": end_logprobs,
            "end_index": torch.arange(num),
            "end_start": torch.tensor(start, dtype=torch.float64),
            "was_cut": was_cut,
        },
    )
    return method.loss(batch)


def test_self_reward_by_hand() -> None:
    """beta 0.1, start -12: of -2 and -7 r_s = 1 and 0.5, off by 0, 1, 0.5 and 0.5, each with weight
    1; the slope is 2 (r_s - correct) beta."""
    logprobs = vector(-2, -2, -7, -7).requires_grad_()
    loss = term(logprobs, -12, flags(1, 0, 1, 0), flags(0, 0, 0, 0)).loss
    same(loss[None].detach(), 0.3 * (0 + 1 + 0.25 + 0.25) / 4)
    loss.backward()
    assert logprobs.grad is not None
    same(logprobs.grad / 0.3 * 4, 0, 0.2, -0.1, 0.1)


def test_at_the_start_it_is_0_for_all_by_hand() -> None:
    start = torch.tensor(-3.0, dtype=torch.float64)
    same(SelfReward(token_id=0, beta=0.7).reward(vector(-3, -3), start), 0, 0)


def test_classes_count_alike_by_hand() -> None:
    """Of four finished responses three are correct: 4 / (2 * 3) each, and 4 / 2; none of one that
    was cut, right or wrong."""
    weights = SelfReward(token_id=0).class_weights(
        flags(1, 1, 1, 0, 1, 0), flags(0, 0, 0, 0, 1, 1), torch.float64
    )
    same(weights, 2 / 3, 2 / 3, 2 / 3, 2, 0, 0)
    one_class = SelfReward(token_id=0).class_weights(flags(1, 1), flags(0, 0), torch.float64)
    same(one_class, 0.5, 0.5)
    none = SelfReward(token_id=0).class_weights(flags(1, 0), flags(1, 1), torch.float64)
    same(none, 0, 0)


def test_its_term_by_hand() -> None:
    """Three responses with r_s = 1, 0.2 and 0.2, the last one cut: off by 0 and 0.04, both with
    weight 1, over three; both finished ones agree with their verdicts."""
    found = term(vector(-2, -10, -10), -12, flags(1, 0, 1), flags(0, 0, 1))
    same(found.loss[None], 0.3 * 0.04 / 3)
    same(found.metrics["policy/self_reward_accuracy"][None], 1)


def test_agreement_by_hand() -> None:
    """r_s = 0.6, 0.6, 0.4, 0.4: the second one alone is wrong about itself."""
    found = term(vector(-4, -4, -6, -6), -10, flags(1, 0, 0, 0), flags(0, 0, 0, 0))
    same(found.metrics["policy/self_reward_accuracy"][None], 0.75)
