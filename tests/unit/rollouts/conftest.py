"""Backends of servers, and the runs of the trainer's tests, as fixtures."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import replace

import pytest

from megatron_rl.rollouts.backends.failures import RequestTimeouts
from megatron_rl.rollouts.backends.loop_thread import LoopThread
from megatron_rl.rollouts.backends.requests import ServerParts
from megatron_rl.rollouts.backends.servers import ServerBackend
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.scheduling.end_of_step import StepRules
from tests.unit.evaluation.conftest import run
from tests.unit.rollouts.server_fakes import (
    RULES,
    FirstTokenIsOdd,
    Fleet,
    job_of,
    text_of,
)
from tests.unit.trainer.conftest import build, plain_figure
from tests.unit.trainer.fakes import prompts

__all__ = ["build", "plain_figure", "run"]


@pytest.fixture
def made_dispatchers() -> Iterator[list[ServerBackend]]:
    dispatchers: list[ServerBackend] = []
    yield dispatchers
    for dispatcher in dispatchers:
        dispatcher.close()


@pytest.fixture
def bounded_waits(monkeypatch) -> None:
    """Nobody waits for a dispatcher without end."""

    call = LoopThread.call

    def in_time(self: LoopThread, work: Coroutine, *rest):
        return call(self, asyncio.wait_for(work, 30.0), *rest)

    monkeypatch.setattr(LoopThread, "call", in_time)


@pytest.fixture
def start(made_dispatchers, bounded_waits):
    def start(
        fleet: Fleet, rules: StepRules = RULES, saved=None, *, reward=None, wants=None, **changes
    ) -> ServerBackend:
        job = job_of(rules, prompts(7), wants)
        if saved is not None:
            job.stream.restore(saved["prompts"])
            job.store.restore(saved["store"])
        parts = ServerParts(
            connect=fleet.connect,
            switch=fleet.switch,
            rewards=lambda wake: RewardThread(reward or FirstTokenIsOdd(), text_of, wake=wake),
            capacity=4,
            timeouts=RequestTimeouts(None),
            longest_response=4,
        )
        made_dispatchers.append(ServerBackend(job, replace(parts, **changes), fleet, saved))
        return made_dispatchers[-1]

    return start
