"""Real messages between 2 and 4 processes."""

from __future__ import annotations

import pytest

from megatron_rl.runtime.digest import Kind
from tests.distributed.transport_cases import (
    CASES,
    peer_dies,
    refused_everywhere,
    run_case,
    whole_sync,
)
from tests.ranks import call

RANKS = (2, pytest.param(4, marks=pytest.mark.full))


def numbered(ranks: int) -> list[tuple[int, int]]:
    return [(ranks, number) for number in range(len(CASES[ranks]))]


@pytest.mark.parametrize(
    ("ranks", "number"),
    [*numbered(2), *(pytest.param(*case, marks=pytest.mark.full) for case in numbered(4))],
)
def test_workers_receive_exactly_their_shards(ranks: int, number: int) -> None:
    """Bit-equal to shards cut from whole tensors, at the lower bound of bytes, twice."""
    call(ranks, run_case, number, CASES[ranks][number])


@pytest.mark.parametrize("ranks", RANKS)
def test_a_changed_parameter_is_refused_on_every_rank(ranks: int) -> None:
    call(ranks, refused_everywhere, CASES[ranks][0])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("number", "kind"), [(0, "hash"), (4, "sums"), (5, "sums")])
def test_a_sync_arrives_whole_or_is_refused(ranks: int, number: int, kind: Kind) -> None:
    call(ranks, whole_sync, CASES[ranks][number], kind)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_peer_that_dies_is_named(ranks: int) -> None:
    *survivors, dead = call(ranks, peer_dies, CASES[ranks][0])
    assert survivors == [True] * (ranks - 1)
    assert dead is None
