"""Requests that servers fail at: asked again elsewhere, and the prompt named that ends them all."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from megatron_rl.rollouts.backends.failures import PromptFailureError, RequestFailures
from megatron_rl.types import Sampling
from tests.unit.rollouts.server_fakes import (
    RULES,
    Fleet,
    answers,
    contents_of,
    run,
    start_published,
    step,
)
from tests.unit.trainer.fakes import prompts

NAMES = {"a", "b", "c", "d", "e", "f", "g"}
P = ("p", 0)
Q = ("q", 1)


def test_a_prompt_that_ends_every_server_ends_the_run_by_its_name(start) -> None:
    """Its two responses may be on two servers at a time: two servers for each, the one that is the
    third for either, and the one that has the other response then."""
    fleet = Fleet(registered=set(NAMES), poison="p3")
    dispatcher = start_published(start, fleet)
    with pytest.raises(PromptFailureError, match=r"p3.*3 servers, one after .*is dead.*resume"):
        for number in count(1):
            step(dispatcher, fleet, number)
    assert len(fleet.dead) <= 6


def test_a_request_that_has_ended_three_servers_goes_to_no_fourth(start) -> None:
    fleet = Fleet(registered=set(NAMES), poison="p3")
    rules = replace(RULES, responses_per_group=1, staleness=0)
    dispatcher = start_published(start, fleet, rules)
    with pytest.raises(PromptFailureError):
        for number in count(1):
            step(dispatcher, fleet, number)
    assert len(fleet.dead) == 3
    assert sum(uid == "p3" for _, _, uid, _ in fleet.asked) == 3


def test_a_held_out_prompt_that_ends_every_server_is_named(start) -> None:
    fleet = Fleet(registered=set(NAMES))
    dispatcher = start_published(start, fleet)
    step(dispatcher, fleet, 1)
    fleet.poison = "p4"
    with pytest.raises(PromptFailureError, match=r"p4.*3 servers, one after"):
        answers(dispatcher, prompts(5)[4:], Sampling(1, 4, seed=9))


def test_servers_that_are_all_gone_are_waited_for(start) -> None:
    """Nobody was at work where a request did not arrive."""
    fleet = Fleet(registered=set(NAMES), off=set(NAMES))
    dispatcher = start_published(start, fleet)
    assert dispatcher.wait().kind == "starved"


def test_a_failure_costs_one_more_request_and_no_server(start) -> None:
    expected = run(start, Fleet(registered={"a"}), 4)
    fleet = Fleet(registered={"a", "b"}, fails_once="p2")
    dispatcher = start_published(start, fleet)
    assert contents_of(dispatcher, fleet, 1, 4) == expected
    counts = dispatcher.counts()
    assert counts["source/lost_servers"] == 0 and counts["source/reissued_requests"] == 1
    fleet.fails_once = "p1"
    groups = answers(dispatcher, prompts(3), Sampling(2, 4, seed=9))
    assert len(groups) == 3 * 2
    assert dispatcher.counts()["source/lost_servers"] == 0


def test_a_server_that_fails_at_all_it_is_asked_is_given_up(start) -> None:
    expected = run(start, Fleet(registered={"a"}), 4)
    fleet = Fleet(registered={"a", "b"}, ill={"a"})
    dispatcher = start_published(start, fleet)
    assert contents_of(dispatcher, fleet, 1, 4) == expected
    assert fleet.registered == {"b"}


def test_answers_between_failures_clear_a_server_and_a_request() -> None:
    failures = RequestFailures()
    assert not failures.failed("a", P, "out of order")
    failures.answered("a", Q)
    assert not failures.failed("a", P, "out of order")
    failures.answered("b", P)
    assert failures.failed("a", P, "out of order"), "twice without an answer between"
    failures.broke_off("b", [P, P, Q], "gone")
    failures.broke_off("b", [P, Q], "gone")
    with pytest.raises(PromptFailureError, match=r"^prompt p: 3 servers.* the last one: gone"):
        failures.broke_off("c", [P, Q], "gone")


def test_a_machine_that_fails_with_its_servers_is_no_prompts_fault() -> None:
    """Eight responses to one prompt were on eight servers of one machine."""
    failures = RequestFailures()
    for number in range(8):
        failures.broke_off(f"server{number}", [("p", number)], "gone")
