"""The thread that keeps servers busy, with servers that answer, fall silent, die and come: what
they answer follows from the request and the weights, so what is trained must too."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from megatron_rl.data.loader import PromptLoader
from megatron_rl.rollouts.backends import loop_thread
from megatron_rl.rollouts.backends.failures import RequestTimeouts
from megatron_rl.rollouts.backends.readiness import NoServerError
from megatron_rl.rollouts.backends.servers import ServerBackend
from megatron_rl.rollouts.prompts import PromptStream
from megatron_rl.runtime.display import Progress
from megatron_rl.types import Sampling, Score
from tests.unit.rollouts.server_fakes import (
    IN_TWO_STEPS,
    RULES,
    FirstTokenIsOdd,
    Fleet,
    answers,
    contents,
    contents_of,
    groups_of,
    publish,
    run,
    start_published,
    step,
    uid_of,
    welcome,
)
from tests.unit.trainer.fakes import prompts


def test_a_step_gets_its_prompts_in_order_of_the_version_that_is_due(start):
    trained = run(start, Fleet(registered={"a"}), 4)
    stream = PromptStream(PromptLoader(prompts(7), seed=1, shuffle=True))
    uids = [uid_of(stream, number // 3, 3 * (number // 3), number) for number in range(12)]
    assert [uid for uid, _, _ in trained] == uids
    versions = [tokens[0][1] for _, tokens, _ in trained]
    assert versions == [0] * 6 + [1] * 3 + [2] * 3, "max(0, step - 1 - 1)"


def test_what_is_trained_does_not_depend_on_who_samples_it(start):
    alone = run(start, Fleet(registered={"a"}), 5)
    assert run(start, Fleet(registered={"a", "b", "c"}), 5) == alone


def test_requests_of_a_dead_server_are_answered_by_another(start):
    expected = run(start, Fleet(registered={"b"}), 4)
    fleet = Fleet(registered={"a", "b"}, silent={"a"})
    dispatcher = start_published(start, fleet)
    while not any(name == "a" for name, *_ in fleet.asked):
        dispatcher.counts()
    fleet.dead.add("a")
    trained = contents_of(dispatcher, fleet, 1, 4)
    assert trained == expected
    assert dispatcher.counts()["source/lost_servers"] == 1
    assert dispatcher.counts()["source/reissued_requests"] >= 1
    assert fleet.registered == {"b"}, "it is told that it is not wanted any more"


def test_a_silent_server_is_given_up_when_its_lease_ends(start):
    expected = run(start, Fleet(registered={"b"}), 3)
    fleet = Fleet(registered={"a", "b"}, silent={"a"})
    dispatcher = start_published(start, fleet)
    fleet.registered.remove("a")  # so the registry says
    assert contents_of(dispatcher, fleet, 1, 3) == expected


def test_a_server_that_never_answers_is_given_up_though_it_says_it_is_well(start):
    expected = run(start, Fleet(registered={"b"}), 3)
    fleet = Fleet(registered={"a", "b"}, silent={"a"})
    now_s = [0.0]
    patience = RequestTimeouts(4.0, lambda: now_s[0])
    dispatcher = start_published(start, fleet, timeouts=patience)
    while len(fleet.asked) < IN_TWO_STEPS or servers_awaited(patience) != {"a"}:
        dispatcher.counts()
    assert fleet.registered == {"a", "b"}
    now_s[0] = 61.0
    assert contents_of(dispatcher, fleet, 1, 3) == expected
    assert fleet.registered == {"b"}
    assert dispatcher.counts()["source/lost_servers"] == 1


def test_an_evaluation_is_answered_by_another_server_than_the_one_that_never_does(start):
    expected = answers(start_published(start, Fleet(registered={"b"})), ASKED, HELD_OUT)
    fleet = Fleet(registered={"a", "b"})
    now_s = [0.0]
    dispatcher = start_idle(start, fleet, RequestTimeouts(4.0, lambda: now_s[0]))
    fleet.silent.add("a")
    with ThreadPoolExecutor(1) as thread:
        evaluated = thread.submit(answers, dispatcher, ASKED, HELD_OUT)
        in_evaluation = len(ASKED) * HELD_OUT.num_responses
        while len(held_out(fleet)) < in_evaluation:
            dispatcher.counts()
        assert fleet.registered == {"a", "b"} and not evaluated.done()
        now_s[0] = 61.0
        try:
            assert evaluated.result(timeout=30.0) == expected
        finally:
            fleet.dead.add("a")  # nobody waits for it where the test fails
    assert fleet.registered == {"b"}
    by_a = [asked for asked in held_out(fleet) if asked[0] == "a"]
    assert by_a and len(held_out(fleet)) == in_evaluation + len(by_a), "what is there stays"


def test_an_evaluation_ends_when_nobody_watches_its_server_any_more(start):
    """The folder of registrations cannot be read: that is told, and no silent server waited for."""
    fleet = Fleet(registered={"a"}, silent={"a"})
    dispatcher = start_published(start, fleet)
    with ThreadPoolExecutor(1) as thread:
        evaluated = thread.submit(answers, dispatcher, ASKED, HELD_OUT)
        while not held_out(fleet):
            dispatcher.counts()
        fleet.unreadable = "Input/output error"
        with pytest.raises(OSError, match="Input/output error"):
            evaluated.result(timeout=30.0)


ASKED = [replace(prompt, uid=f"held-out:{prompt.uid}") for prompt in prompts(5)]
HELD_OUT = Sampling(3, 4, seed=9)


def held_out(fleet: Fleet) -> list[tuple[str, int, str, int]]:
    return [asked for asked in fleet.asked if asked[2].startswith("held-out:")]


def servers_awaited(patience: RequestTimeouts) -> set[str]:
    return {waiting.server for waiting in list(patience._waiting.values())}


def start_idle(start, fleet: Fleet, patience: RequestTimeouts) -> ServerBackend:
    """All that training wants so far is answered."""
    dispatcher = start_published(start, fleet, timeouts=patience)
    while len(fleet.asked) < IN_TWO_STEPS or servers_awaited(patience):
        dispatcher.counts()
    return dispatcher


def test_without_servers_it_says_so_once_and_goes_on_when_one_comes(start):
    expected = run(start, Fleet(registered={"a"}), 3)
    fleet = Fleet()
    dispatcher = start_published(start, fleet)
    news = dispatcher.wait()
    assert news.kind == "starved" and news.is_settled
    fleet.registered.add("b")
    news = dispatcher.wait()
    assert news[:3] == ("join", {"b": "at b"}, 0)
    welcome(dispatcher, fleet, news, 0)
    assert contents_of(dispatcher, fleet, 1, 3) == expected


def test_all_die_while_the_policy_trains_and_one_comes_for_the_old_weights(start):
    """In lockstep what is wanted of version 0 is sampled with version 0, also when version 1 is
    published."""
    expected = run(start, Fleet(registered={"a"}), 3)
    fleet = Fleet(registered={"a"}, answers={"a": IN_TWO_STEPS // 2})
    dispatcher = start_published(start, fleet)
    assert dispatcher.wait() is True
    first = groups_of(dispatcher.take())
    fleet.dead.add("a")
    publish(dispatcher, fleet, 1)
    news = dispatcher.wait()
    assert news.kind == "starved"
    assert not news.is_settled, "a checkpoint would lack the weights of version 0"
    fleet.registered.add("b")
    news = dispatcher.wait()
    assert news[:3] == ("join", {"b": "at b"}, 0)
    welcome(dispatcher, fleet, news, 1)
    assert contents([first]) + contents_of(dispatcher, fleet, 2, 3) == expected
    assert {0, 1} <= {version for name, version, *_ in fleet.asked if name == "b"}


def test_a_server_goes_over_to_new_weights_while_another_needs_the_old_ones(start):
    """And goes back to them when that one dies."""
    expected = run(start, Fleet(registered={"a"}), 4)
    fleet = Fleet(registered={"a", "b"}, answers={"b": 2})
    dispatcher = start_published(start, fleet)
    assert dispatcher.wait() is True
    first = groups_of(dispatcher.take())
    publish(dispatcher, fleet, 1)
    while ("a", 1) not in {asked[:2] for asked in fleet.asked}:
        assert fleet.versions["b"] == 0
        dispatcher.counts()
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(dispatcher.wait)
        fleet.dead.add("b")
        news = waits.result(timeout=30.0)
    assert news[:3] == ("join", {"a": "at a"}, 0)
    num_asked = len(fleet.asked)
    welcome(dispatcher, fleet, news, 1)
    assert contents([first]) + contents_of(dispatcher, fleet, 2, 4) == expected
    versions = [version for _, version, *_ in fleet.asked[num_asked:]]
    assert versions == sorted(versions) and versions[0] == 0 and 2 in versions


def test_a_server_that_does_not_go_over_is_given_up(start):
    expected = run(start, Fleet(registered={"a"}), 4)
    fleet = Fleet(registered={"a", "b"})
    dispatcher = start_published(start, fleet)
    first = contents_of(dispatcher, fleet, 1, 1)
    fleet.stuck.add("b")
    assert first + contents_of(dispatcher, fleet, 2, 4) == expected
    assert fleet.registered == {"a"}
    assert fleet.versions["b"] < 2


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_server_that_is_given_up_while_it_gets_weights_does_not_come_back(start, staleness):
    fleet = Fleet(registered={"a", "b"})
    dispatcher = start_published(start, fleet, replace(RULES, staleness=staleness))
    step(dispatcher, fleet, 1)
    assert dispatcher.wait() is True
    dispatcher.take()
    servers = dispatcher.drained(2)
    assert set(servers) == {"a", "b"}
    fleet.registered.remove("b")  # so the registry says, while the push is under way
    while dispatcher.counts()["source/lost_servers"] < 1:
        pass
    fleet.staged |= dict.fromkeys(servers, 2)
    fleet.versions |= dict.fromkeys(servers, 2 if staleness == 0 else 1)
    num_asked = len(fleet.asked)
    dispatcher.published(2, servers, {}, staged=staleness > 0)
    contents_of(dispatcher, fleet, 3, 4)
    assert {name for name, *_ in fleet.asked[num_asked:]} == {"a"}
    assert dispatcher.counts()["source/lost_servers"] == 1


def test_a_server_that_is_lost_in_two_ways_is_one(start):
    fleet = Fleet(registered={"a", "b"})
    dispatcher = start_published(start, fleet)
    step(dispatcher, fleet, 1)
    servers = dict(dispatcher.drained(2))
    fleet.registered.remove("b")
    while dispatcher.counts()["source/lost_servers"] < 1:
        pass
    servers.pop("b")
    fleet.staged |= dict.fromkeys(servers, 2)
    dispatcher.published(2, servers, {"b": "it took no weights"}, staged=True)
    assert dispatcher.counts()["source/lost_servers"] == 1


def test_a_server_that_is_lost_as_it_begins_to_go_over_ends_no_run(start):
    """Its task has been made, and has not begun."""
    expected = run(start, Fleet(registered={"a"}), 4)
    fleet = Fleet(registered={"a", "b"})
    dispatcher = start_idle(start, fleet, RequestTimeouts(None))
    assert dispatcher.wait() is True
    first = contents([groups_of(dispatcher.take())])
    servers = dispatcher.drained(1)
    fleet.staged |= dict.fromkeys(servers, 1)

    async def published_and_lost() -> None:
        await ServerBackend.published.__wrapped__(dispatcher, 1, servers, {}, staged=True)
        dispatcher._mark_dead("b", "it has left")

    dispatcher._thread.call(published_and_lost())
    assert first + contents_of(dispatcher, fleet, 2, 4) == expected
    assert fleet.registered == {"a"}


def test_a_run_that_goes_on_asks_for_nothing_twice(start):
    fleet = Fleet(registered={"a"})
    expected = run(start, Fleet(registered={"a"}), 5)
    dispatcher = start_published(start, fleet)
    trained = [step(dispatcher, fleet, version) for version in (1, 2)]
    while len(fleet.asked) < 3 * 6 + 4:  # some of step 4 are under way
        pass
    state = dispatcher.state()
    there = [one for one in state["store"]["new"] if one["group"] >= 9]
    other = Fleet(registered={"c"})
    resumed = start(other, saved=state)
    assert resumed.drained(2) == {"c": "at c"}, "the policy has what is wanted"
    publish(resumed, other, 2)
    trained += [step(resumed, other, version) for version in (3, 4, 5)]
    assert contents(trained) == expected
    of_step_4 = [asked for asked in other.asked if asked[1] == 2]
    assert len(of_step_4) == 6 - len(there) and not [one for one in other.asked if one[1] < 2]


def test_a_group_that_was_whole_and_not_judged_is_judged_by_the_run_that_goes_on(start):
    gate = threading.Event()

    class Slow(FirstTokenIsOdd):
        def score(self, *responses) -> list[Score]:
            gate.wait(30.0)
            return super().score(*responses)

    fleet = Fleet(registered={"a"})
    expected = run(start, Fleet(registered={"a"}), 1)
    dispatcher = start_published(start, fleet, reward=Slow())
    while len(dispatcher.state()["store"]["new"]) < 12:  # of steps 1 and 2
        pass
    state = dispatcher.state()
    gate.set()
    assert not state["scores"]
    other = Fleet(registered={"b"})
    resumed = start(other, saved=state)
    publish(resumed, other, 0)
    assert resumed.wait() is True and not other.asked
    assert contents([groups_of(resumed.take())]) == expected


@pytest.mark.parametrize("schedule", ["refused", "reward", "version"])
def test_what_no_other_server_could_mend_ends_the_run(start, schedule):
    fleet = Fleet(registered={"a"})

    class Fails(FirstTokenIsOdd):
        def score(self, *responses) -> list[Score]:
            raise RuntimeError("the judge is out")

    changes = {}
    error, words = ValueError, "prompt is too long"
    if schedule == "refused":
        fleet.refuses = "prompt is too long"
    elif schedule == "reward":
        changes, error, words = {"reward": Fails()}, RuntimeError, "the judge is out"
    else:
        error, words = ValueError, r"weights version 0 comes from \[5\]"
    dispatcher = start(fleet, **changes)
    servers = dispatcher.drained(0)
    fleet.versions["a"] = 5 if schedule == "version" else 0
    dispatcher.published(0, servers, {})
    with pytest.raises(error, match=words):
        dispatcher.wait()


def test_held_out_prompts_are_answered_beside_training(start):
    fleet = Fleet(registered={"a", "b"})
    dispatcher = start_published(start, fleet)
    groups = answers(dispatcher, ASKED, HELD_OUT)
    assert len(groups) == 5 * 3
    tokens = [one.token_ids[0] for one, _ in groups[3:6]]
    assert tokens == [tokens[0] + 7 * response for response in range(3)]
    assert dispatcher.score([(1, 2, 3), (4, 5)]) == [[2.0, 3.0], [5.0]]
    fleet.dead.add("a")
    assert answers(dispatcher, ASKED, HELD_OUT) == groups, "by the other"
    assert fleet.registered == {"b"}
    fleet.dead.add("b")
    with pytest.raises(NoServerError):
        dispatcher.score([(1, 2, 3)])
    assert answers(dispatcher, ASKED, HELD_OUT).kind == "starved"


def test_who_waits_is_told_how_far_it_is(start, monkeypatch):
    """A third of the answers for two steps come while it waits; then the server leaves."""
    monkeypatch.setattr(loop_thread, "REPORT_EVERY_S", 0.001)
    fleet = Fleet(registered={"a"}, answers={"a": 4}, silent={"a"})
    dispatcher = start_published(start, fleet)
    told = []

    def report(progress: Progress) -> None:
        told.append(progress)
        fleet.silent.clear()
        if progress.num_done == 4:
            fleet.registered.discard("a")

    assert dispatcher.wait(report).kind == "starved"
    assert told[-1] == Progress(4, IN_TWO_STEPS, 2 * 4, longest=0)


def test_a_server_that_scores_nothing_is_given_up_though_it_says_it_is_well(start):
    fleet = Fleet(registered={"a", "b"})
    now_s = [0.0]
    dispatcher = start_idle(start, fleet, RequestTimeouts(4.0, lambda: now_s[0]))
    while fleet.scored[-1:] != ["b"]:  # next it is the turn of a
        dispatcher.score([(1, 2, 3)])
    fleet.silent.add("a")
    with ThreadPoolExecutor(1) as thread:
        scores = thread.submit(dispatcher.score, [(1, 2, 3)])
        while fleet.scored[-1] != "a":
            dispatcher.counts()
        now_s[0] = 61.0
        try:
            assert scores.result(timeout=10.0) == [[2.0, 3.0]]
        finally:
            fleet.silent.discard("a")  # nobody waits for it where the test fails
    assert fleet.registered == {"b"}
