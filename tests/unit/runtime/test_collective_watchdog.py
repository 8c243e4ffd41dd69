"""Who says which ranks are missing, and how many requests that costs the store of the launch."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from megatron_rl.runtime.guard import collective_watchdog
from megatron_rl.runtime.guard.collective_watchdog import FIRST_S, CollectiveWatchdog


class CountedStore:
    """A store of this process that counts what it is asked."""

    def __init__(self) -> None:
        self.requests = 0
        self._store = dist.HashStore()

    def __getattr__(self, name: str):
        self.requests += 1
        return getattr(self._store, name)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(collective_watchdog, "time", clock)
    return clock


def look_for(
    seconds: float, ranks: list[CollectiveWatchdog], store: CountedStore, clock: Clock
) -> None:
    """Each rank's thread looks every two seconds, in the order of the ranks from the last on."""
    for _ in range(int(seconds / 2)):
        clock.now += 2
        for rank in reversed(ranks):
            rank.check(store)


def lines(caplog) -> list[str]:
    return [record.message for record in caplog.records]


@pytest.mark.parametrize("missing", [0, 7])
def test_a_thousand_waiting_ranks_make_few_requests_and_one_line(clock, caplog, missing):
    size = 1024
    ranks = [CollectiveWatchdog(rank, size) for rank in range(size)]
    store = CountedStore()
    with ExitStack() as waiting:
        present = [rank for rank in ranks if rank is not ranks[missing]]
        for rank in present:
            waiting.enter_context(rank.collective())
        with caplog.at_level(logging.ERROR):
            look_for(FIRST_S + 2, present, store, clock)
            assert lines(caplog) == [f"waiting for rank {missing} for 30 s: busy, stopped or hung?"]
            assert store.requests <= 4 * size
            first = store.requests
            look_for(60, present, store, clock)
        assert len(lines(caplog)) == 2
        assert store.requests - first <= 2 * size


def test_rank_0_goes_on_saying_it_when_it_comes_late(clock, caplog):
    """Its lines alone are on the console where each rank has a file."""
    ranks = [CollectiveWatchdog(rank, 4) for rank in range(4)]
    store = CountedStore()
    with ExitStack() as waiting, caplog.at_level(logging.ERROR):
        for rank in ranks[1:3]:
            waiting.enter_context(rank.collective())
        look_for(40, ranks, store, clock)
        assert lines(caplog) == ["waiting for ranks 0, 3 for 30 s: busy, stopped or hung?"]
        waiting.enter_context(ranks[0].collective())
        look_for(90, ranks, store, clock)
    assert lines(caplog)[1:] == [
        f"waiting for rank 3 for {seconds} s: busy, stopped or hung?" for seconds in (30, 90)
    ]


def test_in_the_next_collective_all_begin_anew(clock, caplog):
    ranks = [CollectiveWatchdog(rank, 3) for rank in range(3)]
    store = CountedStore()
    with caplog.at_level(logging.ERROR):
        for absent in (0, 1, 0):
            with ExitStack() as waiting:
                for rank in ranks:
                    with ExitStack() as passing:
                        passing.enter_context(rank.collective())
                        if rank is not ranks[absent]:
                            waiting.enter_context(passing.pop_all())
                look_for(40, ranks, store, clock)
    assert [line.split(" for ")[1] for line in lines(caplog)] == ["rank 0", "rank 1", "rank 0"]
