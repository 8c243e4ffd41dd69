"""The reward of a policy for itself, by hand."""

import torch

from megatron_rl.loss.per_token.self_reward import SelfReward
from tests.unit.loss.groups import flags, same, vector


def test_self_reward_by_hand() -> None:
    """beta 0.1, start -12: of -2 and -7 r_s = 1 and 0.5, off by 0, 1, 0.5 and 0.5; the slope is
    2 (r_s - correct) beta."""
    logprobs = vector(-2, -2, -7, -7).requires_grad_()
    start = torch.tensor(-12.0, dtype=torch.float64)
    found = SelfReward(token_id=0).off(logprobs, start, flags(1, 0, 1, 0))
    same(found.detach(), 0, 1, 0.25, 0.25)
    found.sum().backward()
    assert logprobs.grad is not None
    same(logprobs.grad, 0, 0.2, -0.1, 0.1)


def test_at_the_start_it_is_0_for_all_by_hand() -> None:
    start = torch.tensor(-3.0, dtype=torch.float64)
    found = SelfReward(token_id=0, beta=0.7).off(vector(-3, -3), start, flags(1, 0))
    same(found, 1, 0)


def test_agreement_by_hand() -> None:
    """r_s = 0.6, 0.6, 0.4, 0.4."""
    start = torch.tensor(-10.0, dtype=torch.float64)
    logprobs = vector(-4, -4, -6, -6)
    found = SelfReward(token_id=0).agrees(logprobs, start, flags(1, 0, 1, 0))
    assert found.tolist() == [True, False, False, True]
