"""Runs at simulated replicas whose times are counted by hand: a decoding step takes a second."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.config.schema import PartialConfig
from megatron_rl.scheduling.work import Request
from tests.unit.planning_of_7b import config
from tools.planning.rollout_time import Engines, partial_step, step_beside_training
from tools.planning.simulated_fleet import DecodeStep, Fleet
from tools.planning.simulated_rollouts import Push, Steady

SECOND = DecodeStep(1.0)


def beside(
    staleness: int, schedule: str, update_s: float, push: Push, tokens: tuple[int, int] = (4, 10)
) -> Steady:
    """A step is a group of two responses on two servers of one slot."""
    settings = config(
        "source=servers", f"source.staleness={staleness}", f"source.schedule={schedule}"
    )
    engines = Engines(2, 1, SECOND)
    return step_beside_training(np.array([tokens]), engines, settings.source, update_s, push)


def test_in_turns_nothing_is_done_at_the_same_time() -> None:
    assert beside(0, "lockstep", update_s=3, push=Push(2)).seconds == pytest.approx(10 + 3 + 2)


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_in_lockstep_servers_sample_while_weights_come(staleness: int) -> None:
    """And stop only to go over to them."""
    found = beside(staleness, "lockstep", 3, Push(2, switch_s=1), tokens=(10, 10))
    assert found.seconds == pytest.approx(10 + 1)
    assert found.idle == pytest.approx(1 / 11)
    found = beside(staleness, "lockstep", 30, Push(2))
    assert found.seconds == pytest.approx(30 + 2)


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_a_server_does_not_wait_for_the_longest_response_of_another(schedule: str) -> None:
    """With several steps open the servers have 14 tokens a step to share, 7 s."""
    found = beside(3, schedule, update_s=1, push=Push(2))
    assert 7 <= found.seconds < 10


def test_what_runs_pauses() -> None:
    fleet = Fleet(1, SECOND)
    fleet.begin(0, Request(0, 0, 0), 10)
    fleet.wait_until(3)
    fleet.pause(0, 4)
    assert fleet.now_s == 3 and fleet.next_moment() == pytest.approx(14)
    fleet.next_end()
    assert fleet.busy_s() == pytest.approx(10)


def test_the_cache_of_a_response_that_went_on_is_free_at_its_end() -> None:
    """A second for each token in the cache: the first has 100 and 2 more to come, the second 4. Two
    steps of both read 100 and 102, two of the second alone 2 and 3."""
    fleet = Fleet(1, DecodeStep(0.0, token_s=1.0))
    first, second = Request(0, 0, 0), Request(0, 0, 1)
    fleet.begin(0, first, 2, 100)
    fleet.begin(0, second, 4)
    assert fleet.next_end() == (0, first) and fleet.now_s == pytest.approx(100 + 102)
    assert fleet.next_end() == (0, second) and fleet.now_s == pytest.approx(202 + 2 + 3)


def test_tokens_that_are_there_are_computed_again() -> None:
    fleet = Fleet(1, DecodeStep(1.0, resumed_s=0.5))
    fleet.begin(0, Request(0, 0, 0), 3, 10)
    fleet.next_end()
    assert fleet.now_s == pytest.approx(10 / 2 + 3)


def test_a_long_response_goes_on_in_the_next_step() -> None:
    """Groups of one response of 2, 2, 2 and 14 tokens in turn, four a step, on eight slots. A step
    that waits for the longest takes 14 s; here its tokens are spread over the steps that it is
    open."""
    partial = PartialConfig(groups_in_flight=8, max_age=3)
    found = partial_step(np.array([[2], [2], [2], [14]]), Engines(1, 8, SECOND), partial)
    assert found.seconds < 14 / 2
