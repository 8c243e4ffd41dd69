"""Whether the rows of a step can be spread over the ranks."""

from __future__ import annotations

import pytest

from tools.planning.balance import idle_share


def test_two_rows_a_rank_leave_half_of_the_machine_idle():
    assert 0.45 < idle_share(1024, 512) < 0.6


def test_one_row_a_rank_is_the_longest_against_the_mean():
    """Mean / longest of the distribution, whose longest is four times its untruncated mean."""
    assert idle_share(4096, 4096) == pytest.approx(1 - 1 / 4, abs=0.05)


def test_idle_time_falls_with_rows_and_rises_with_ranks():
    by_ranks = [idle_share(1024, ranks) for ranks in (64, 256, 350, 512, 1024)]
    assert by_ranks == sorted(by_ranks)
    assert idle_share(64 * 16, 16) < 0.01
    assert idle_share(64, 1) == pytest.approx(0.0, abs=1e-9)
