"""A conversation, turn by turn."""

from __future__ import annotations

from megatron_rl.evaluation.sample import said
from megatron_rl.rollouts.rows.experience import Passage


def test_each_turn_is_a_line() -> None:
    assert said(Passage(True, "ab\n")) == "model: ab"
    assert said(Passage(False, " c")) == "  -> c"
