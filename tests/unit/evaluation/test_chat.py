"""A conversation, turn by turn."""

from __future__ import annotations

import pytest

from megatron_rl.evaluation.chat import said
from megatron_rl.types import APPENDED, Completion, VersionSpan


@pytest.mark.parametrize(
    ("spans", "lines"),
    [
        (((1, 4),), ["model: abcd"]),
        (((1, 1), (2, 2), (APPENDED, 3), (2, 4)), ["model: ab", "  -> c", "model: d"]),
        (((1, 1), (APPENDED, 4)), ["model: a", "  -> bcd"]),
    ],
)
def test_each_turn_is_a_line(spans: tuple[tuple[int, int], ...], lines: list[str]) -> None:
    whole = Completion(
        (0, 1, 2, 3), (0.0,) * 4, False, 1, tuple(VersionSpan(*one) for one in spans)
    )
    assert list(said(whole, lambda ids: "".join("abcd"[each] for each in ids))) == lines
