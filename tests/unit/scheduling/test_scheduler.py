"""The scheduler by hand: what is aborted, what no longer counts, when a worker may get new weights,
what a checkpoint holds."""

from dataclasses import replace

from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.whole_groups import KeptShare
from megatron_rl.scheduling.work import Request

PLAIN = StepRules(groups_per_step=2, responses_per_group=2)
FILTERED = replace(PLAIN, max_rounds=5)


def scheduler_of(rules: StepRules, capacity: int = 100) -> Scheduler:
    scheduler = Scheduler(rules)
    scheduler.queue.join("w", capacity, 0)
    return scheduler


def answer(scheduler: Scheduler, group: int, version: int = 0) -> None:
    """All responses of a group that runs."""
    for response in range(2):
        assert scheduler.finished("w", Request(version, group, response))


def judge(scheduler: Scheduler, *groups: int, version: int = 0, wanted: bool = True) -> None:
    """Each is answered, then judged."""
    for group in groups:
        answer(scheduler, group, version)
        scheduler.judged(version, group, wanted=wanted)


def publish(scheduler: Scheduler, version: int) -> None:
    """The worker gets the weights at once."""
    scheduler.published(version)
    scheduler.switch("w", version)


def requests(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Version and group of what is to be submitted now."""
    return sorted({(request.version, request.group) for _, request in scheduler.assign()})


def test_refusals_are_made_up_for_and_what_is_not_needed_is_aborted() -> None:
    scheduler = scheduler_of(FILTERED)
    assert requests(scheduler) == [(0, 0), (0, 1)]
    judge(scheduler, 0, wanted=False)
    assert requests(scheduler) == [(0, 2)]
    judge(scheduler, 2, wanted=False)
    assert requests(scheduler) == [(0, 3)]
    judge(scheduler, 1, 3)
    assert scheduler.is_ready and scheduler.to_abort() == []
    batch = scheduler.take()
    assert (batch.groups, batch.refused, batch.end) == ([1, 3], [0, 2], 4)
    assert scheduler.end.kept_share.value == 0.6  # 2 of 4, and one of one to begin with
    publish(scheduler, 1)
    # (2 + sqrt(2 * 0.4)) / 0.6 = 4.8: the next step begins behind the last group, and ahead.
    assert requests(scheduler) == [(1, 4), (1, 5), (1, 6), (1, 7), (1, 8)]
    judge(scheduler, 5, 4, version=1)
    aborted = {request for _, request in scheduler.to_abort()}
    assert aborted == {Request(1, group, number) for group in (6, 7, 8) for number in range(2)}
    assert scheduler.to_abort() == [], "told once"
    assert not scheduler.finished("w", Request(1, 6, 0))
    assert scheduler.take().groups == [4, 5]
    publish(scheduler, 2)
    assert requests(scheduler)[0] == (2, 6), "a prompt that was dropped is the first of the next"


def test_a_verdict_on_responses_that_were_dropped_counts_for_nothing() -> None:
    rules = replace(FILTERED, staleness=1)
    scheduler = Scheduler(rules, version=-1)
    scheduler.queue.join("w", 100, 0)
    scheduler.end.kept_share = KeptShare(wanted=10, seen=21)
    scheduler.published(0)
    assert requests(scheduler) == [(0, group) for group in range(6)]
    for group in (3, 0, 1):
        answer(scheduler, group)
    for group in (0, 1):
        scheduler.judged(0, group, wanted=True)
    # Group 3 is of the next step now, which has the same weights, and is sampled again.
    scheduler.judged(0, 3, wanted=True)
    assert (0, 3) in requests(scheduler)
    answer(scheduler, 3)
    scheduler.take()
    judge(scheduler, 2, 4)
    assert not scheduler.is_ready, "group 3 is not judged yet"
    scheduler.judged(0, 3, wanted=False)
    assert scheduler.take().groups == [2, 4]
    # The third step is of version 1 and begins with group 5.
    publish(scheduler, 1)
    assert requests(scheduler)[0] == (1, 5)
    answer(scheduler, 5, version=1)
    scheduler.judged(0, 5, wanted=True)
    assert scheduler.end._batches[0].verdicts == {}, "a verdict on responses of other weights"
    scheduler.judged(1, 5, wanted=False)
    assert scheduler.end._batches[0].verdicts == {5: False}


def test_groups_are_admitted_in_time_for_their_weights_and_not_earlier() -> None:
    for staleness, groups in ((0, 2), (1, 4), (2, 6)):
        scheduler = scheduler_of(replace(PLAIN, staleness=staleness))
        assert requests(scheduler) == [(0, group) for group in range(groups)]
        judge(scheduler, 0, 1)
        scheduler.take()
        assert requests(scheduler) == [], "nothing before the next weights"
        scheduler.published(1)
        admitted = {request.group for heap in scheduler.queue._waiting.values() for request in heap}
        assert admitted == {groups, groups + 1}, "i < (v + 1 + k)P"


def test_in_lockstep_a_worker_ends_its_work_before_it_gets_new_weights() -> None:
    scheduler = scheduler_of(replace(PLAIN, staleness=1))
    scheduler.assign()
    judge(scheduler, 0, 1)
    scheduler.take()
    scheduler.published(1)
    assert not scheduler.may_switch("w"), "groups 2 and 3 are of version 0"
    for group in (2, 3):
        answer(scheduler, group)
    assert scheduler.may_switch("w")
    free = scheduler_of(replace(PLAIN, staleness=1, lockstep=False))
    free.assign()
    assert free.may_switch("w")


def test_under_a_filter_a_worker_stays_while_more_of_its_weights_may_be_wanted() -> None:
    scheduler = scheduler_of(replace(FILTERED, staleness=1))
    scheduler.queue.join("idle", 100, 0)
    scheduler.assign()
    scheduler.queue.leave("idle")
    scheduler.assign()
    for group in (0, 1):
        answer(scheduler, group)
    assert not scheduler.may_switch("w"), "nothing runs, but both may be refused"
    for group in (0, 1):
        scheduler.judged(0, group, wanted=True)
    assert not scheduler.may_switch("w"), "the second step is of version 0 too"


def test_a_run_goes_on_from_its_state() -> None:
    rules = replace(FILTERED, staleness=1)
    first = scheduler_of(rules)
    first.assign()
    judge(first, 0, wanted=False)
    first.assign()
    answer(first, 2)
    assert first.finished("w", Request(0, 1, 1))
    second = Scheduler.restored(rules, first.state())
    assert second.state() == first.state()
    second.queue.join("new", 100, 0)
    left = {(request.group, request.response) for _, request in second.assign()}
    assert left == {(1, 0)}, "what was running is asked for again, what was answered is not"
    second.judged(0, 2, wanted=True)
    assert second.finished("new", Request(0, 1, 0))
    second.judged(0, 1, wanted=True)
    assert second.take().groups == [1, 2]
    assert second.end.oldest_needed == 0, "the second step is of version 0 as well"
