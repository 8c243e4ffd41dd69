"""Corrections of the engine's probabilities, by hand. gap = old - sampler."""

import math

from megatron_rl.loss.per_token import mismatch
from tests.unit.loss.groups import flags, same, terms, vector

GAP = vector(*[math.log(ratio) for ratio in (1, 4, 0.25, 1.9, 0.6)])


def test_truncated_importance_by_hand() -> None:
    same(mismatch.truncated_importance(GAP, cap=2.0), 1, 2, 0.25, 1.9, 0.6)


def test_icepop_by_hand() -> None:
    """Outside [1/2, 2] the token is dropped, inside it is weighted by its ratio."""
    same(mismatch.icepop(GAP, cap=2.0), 1, 0, 0, 1.9, 0.6)


def test_sequence_mask_by_hand() -> None:
    """Geometric means: sqrt(1 * 4) = 2 is kept, sqrt(0.25 * 0.6) = 0.39 is dropped; the masked
    token does not count."""
    gap = vector(*[math.log(ratio) for ratio in (1, 3.99, 100, 0.25, 0.6)])
    responses = terms(flags(1, 1, 0, 1, 1), [0, 0, 0, 1, 1], [2, 2])
    found = mismatch.sequence_mask(gap, responses, cap=2.0)
    same(found, 1, 1, 1, 0, 0)


def test_no_gradient() -> None:
    gap = GAP.clone().requires_grad_()
    for weights in (mismatch.truncated_importance(gap, cap=2.0), mismatch.icepop(gap, cap=2.0)):
        assert not weights.requires_grad
