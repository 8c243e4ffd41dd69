"""Rows go to the ranks that train them, and metrics are equal bit for bit on 1, 2 and 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import data_plane_worker
from tests.distributed.data_plane_worker import GROUP_SIZES
from tests.ranks import call


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return [report for rank in call(4, data_plane_worker.reports) for report in rank]


def test_every_row_has_one_owner(reports):
    for size in (1, 2, 4):
        rows = [report["rows"] for report in reports if report["size"] == size]
        assert len(rows) == size
        assert sum(rows) == sum(GROUP_SIZES)
    assert len({report["tokens"] for report in reports}) == 7, "each rank has rows of its own"


def test_metrics_are_equal_bit_for_bit_on_1_2_and_4_ranks(reports):
    assert len(reports) == 1 + 2 + 4
    assert len(reports[0]["metrics"]) == 5
    assert [report["metrics"] for report in reports] == [reports[0]["metrics"]] * 7
