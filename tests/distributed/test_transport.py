"""Real messages between 2 and 4 processes; one launch each, all cases inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch

WORKER = Path(__file__).with_name("transport_worker.py")


@pytest.mark.parametrize(("nproc", "cases"), [(2, 7), pytest.param(4, 10, marks=pytest.mark.full)])
def test_workers_receive_exactly_their_shards(nproc: int, cases: int) -> None:
    """Bit-equal to shards cut from whole tensors, at the lower bound of bytes, twice; refusals and
    a dying peer are named."""
    output = launch(WORKER, nproc, ["die"], timeout=120).stdout
    for number in range(cases):
        assert f"case {number} passed" in output
    assert "refused everywhere" in output
    assert output.count("whole sync passed") == 3
    assert "survivor raised" in output
