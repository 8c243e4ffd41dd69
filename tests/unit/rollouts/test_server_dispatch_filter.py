"""Servers under a filter: verdicts ask for more groups, and drop what was sampled ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from megatron_rl.data.loader import PromptLoader
from megatron_rl.rollouts.prompts import PromptStream
from megatron_rl.types import Prompt, Score
from tests.unit.rollouts.server_fakes import (
    RULES,
    Fleet,
    contents,
    contents_of,
    groups_of,
    publish,
    run,
    start_published,
    tokens_of,
    uid_of,
    welcome,
)
from tests.unit.trainer.fakes import prompts

FILTERED = replace(RULES, max_rounds=4)


def first_is_correct(verdicts: Sequence[bool]) -> bool:
    return verdicts[0]


def test_groups_that_the_method_does_not_want_are_replaced_alike_by_any_servers(start):
    seen = []
    for names in ("a", "ab", "abc"):
        fleet = Fleet(registered=set(names))
        dispatcher = start_published(start, fleet, FILTERED, wants=first_is_correct)
        seen.append(contents_of(dispatcher, fleet, 1, 5))
    assert seen[0] == seen[1] == seen[2]
    uids = [uid for uid, _, _ in seen[0]]
    assert all(scores[0].correct for _, _, scores in seen[0])
    assert len(seen[0]) == 15 and uids != [uid for uid, _, _ in run(start, Fleet({}, {"a"}), 5)]


def test_all_die_before_a_verdict_asks_for_more_of_the_old_weights(start):
    """Version 0 is not past while a verdict is out on what it sampled."""
    gate = threading.Event()
    gate.set()

    class Strict:
        """Refuses nothing of step 1, so that no more than is missing is sampled for step 2."""

        def score(
            self, asked: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool]
        ) -> list[Score]:
            scores = []
            for prompt, text in zip(asked, texts, strict=True):
                first = tokens_of(text)[0]
                assert first < 1000 or gate.wait(30.0)
                is_wanted = first < 1000 or prompt.uid[:2] in ("p0", "p3", "p5")
                scores.append(Score(float(first), is_wanted))
            return scores

    alone = Fleet(registered={"a"})
    changes = {"reward": Strict(), "wants": first_is_correct}
    expected = contents_of(start_published(start, alone, FILTERED, **changes), alone, 1, 4)
    gate.clear()
    fleet = Fleet(registered={"a"})
    dispatcher = start_published(start, fleet, FILTERED, **changes)
    assert dispatcher.wait() is True
    first = groups_of(dispatcher.take())
    until(lambda: dispatcher._scheduler.end.to_judge() and not is_sampling(dispatcher))
    num_asked = len(fleet.asked)
    fleet.registered.clear()
    until(lambda: dispatcher.counts()["source/servers"] == 0)
    publish(dispatcher, fleet, 1)
    with ThreadPoolExecutor(1) as thread:
        settled = thread.submit(dispatcher.settled)
        dispatcher.state()  # answered by the thread that is asked for the other, too
        was_early = settled.done()
        gate.set()
        news = settled.result(timeout=30.0)
    assert not was_early and news.kind == "starved"
    fleet.registered.add("b")
    news = dispatcher.settled()
    assert news.version == 0
    welcome(dispatcher, fleet, news, 1)
    assert dispatcher.settled() is True
    assert fleet.asked[num_asked][:2] == ("b", 0)
    assert contents([first]) + contents_of(dispatcher, fleet, 2, 4) == expected


class Settled:
    """Judges when nothing is sampled any more, so that the groups sampled ahead are whole, and
    those that are dropped and admitted again are whole again when the verdict on them comes."""

    def __init__(self) -> None:
        self.dispatcher = None
        self.seen: set[tuple[str, int]] = set()  # uid, and step by the seed

    def score(
        self, asked: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        num_quiet = 0
        ends_at = time.monotonic() + 0.1  # nothing ends any more when the dispatcher is closed
        while num_quiet < 5 and time.monotonic() < ends_at:
            time.sleep(0.001)
            num_quiet = 0 if is_sampling(self.dispatcher) else num_quiet + 1
        found = []
        for prompt, text in zip(asked, texts, strict=True):
            tokens = tokens_of(text)
            self.seen.add((prompt.uid, tokens[0] // 1000))
            found.append(by_tokens(prompt, tokens))
        return found


def by_tokens(prompt: Prompt, tokens: Sequence[int]) -> Score:
    """Of which step it is can be told."""
    return Score(float(sum(tokens)), prompt.uid[1] < "3")


def test_a_group_that_was_dropped_is_sampled_anew_for_the_next_step(start):
    """A prompt that comes again in a step has another uid there: which one follows from the step,
    and so does the seed."""
    rules = replace(FILTERED, staleness=2, lockstep=False)
    fleet = Fleet(registered={"a"})
    judge = Settled()
    judge.dispatcher = dispatcher = start_published(
        start, fleet, rules, reward=judge, wants=first_is_correct
    )
    stream = PromptStream(PromptLoader(prompts(7), seed=1, shuffle=True))
    looked_at = set()
    first = 0
    for number in range(8):
        assert dispatcher.wait() is True
        sampled = dispatcher.take()
        batch, groups = sampled.summary.groups, groups_of(sampled)
        expected = [uid_of(stream, number, first, group) for group in batch.groups]
        assert [group.prompt.uid for group in groups] == expected
        for group in groups:
            expected_scores = [by_tokens(group.prompt, one.token_ids) for one in group.completions]
            assert group.scores == expected_scores
            assert [one.token_ids[0] // 1000 for one in group.completions] == [number, number]
        for group in range(first, first + len(batch.groups) + len(batch.refused)):
            looked_at.add((uid_of(stream, number, first, group), number))
        first = batch.end
        publish(dispatcher, fleet, number + 1)
    assert [pair for pair in judge.seen - looked_at if pair[1] < 8], "nothing was dropped"


def is_sampling(dispatcher) -> bool:
    queue = dispatcher._scheduler.queue
    return queue.num_waiting + queue.num_running > 0


def until(happens) -> None:
    ends_at = time.monotonic() + 30.0
    while not happens():
        assert time.monotonic() < ends_at, "it did not happen"
        time.sleep(0.001)
