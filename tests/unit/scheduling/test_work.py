"""Placement: even loads, groups together where that costs nothing, nothing lost."""

from collections.abc import Iterable

from megatron_rl.scheduling.work import Request, WorkQueue


def requests(num_groups: int, num_responses: int, version: int = 0) -> list[Request]:
    return [
        Request(version, group, response)
        for group in range(num_groups)
        for response in range(num_responses)
    ]


def queue_of(num_workers: int, capacity: int) -> WorkQueue:
    queue = WorkQueue()
    for number in range(num_workers):
        queue.join(f"w{number}", capacity, 0)
    return queue


def assigned(num_workers: int, capacity: int, wanted: Iterable[Request]) -> WorkQueue:
    """With these requests handed out as far as workers are free."""
    queue = queue_of(num_workers, capacity)
    queue.add(wanted)
    queue.assign()
    return queue


def by_worker(queue: WorkQueue) -> dict[str, list[int]]:
    """Group numbers of what each worker runs."""
    return {
        name: sorted(request.group for request in worker.running)
        for name, worker in queue.workers.items()
    }


def test_groups_stay_whole_where_there_are_enough_of_them() -> None:
    queue = assigned(2, 100, requests(4, 3))
    assert by_worker(queue) == {"w0": [0, 0, 0, 2, 2, 2], "w1": [1, 1, 1, 3, 3, 3]}


def test_groups_are_cut_where_workers_would_stand_idle() -> None:
    queue = assigned(4, 100, requests(2, 6))
    assert by_worker(queue) == {"w0": [0] * 3, "w1": [0] * 3, "w2": [1] * 3, "w3": [1] * 3}


def test_what_comes_later_goes_where_most_room_is() -> None:
    queue = assigned(2, 100, requests(2, 4))
    for response in range(3):
        assert queue.finish("w1", Request(0, 1, response))
    queue.add([Request(0, 2, 0), Request(0, 2, 1)])
    assert [worker for worker, _ in queue.assign()] == ["w1", "w1"]


def test_no_more_than_the_capacity_in_prompt_order() -> None:
    queue = queue_of(num_workers=1, capacity=3)
    queue.add(reversed(requests(num_groups=3, num_responses=2)))
    assert [request for _, request in queue.assign()] == requests(3, 2)[:3]
    assert queue.assign() == [] and queue.num_waiting == 3
    queue.finish("w0", Request(0, 0, 0))
    assert [request for _, request in queue.assign()] == [Request(0, 1, 1)]


def test_what_a_lost_worker_ran_goes_elsewhere_and_its_late_answer_does_not_count() -> None:
    queue = assigned(2, 100, requests(2, 2))
    queue.leave("w0")
    queue.leave("w0")
    assert queue.num_waiting == 2
    assert queue.assign() == [("w1", Request(0, 0, 0)), ("w1", Request(0, 0, 1))]
    assert not queue.finish("w0", Request(0, 0, 0))
    assert queue.finish("w1", Request(0, 0, 0))
    assert not queue.finish("w1", Request(0, 0, 0)), "an answer counts once"


def test_a_failed_request_waits_again() -> None:
    queue = assigned(1, 1, [Request(0, 0, 0)])
    queue.fail("w0", Request(0, 0, 0))
    assert queue.assign() == [("w0", Request(0, 0, 0))]


def test_weights_of_a_request_are_those_of_its_worker_or_where_allowed_newer_ones() -> None:
    for exact, taken in ((True, [Request(1, 5, 0)]), (False, [Request(0, 4, 0), Request(1, 5, 0)])):
        queue = WorkQueue(exact=exact)
        queue.join("new", 8, version=1)
        queue.add([Request(0, 4, 0), Request(1, 5, 0), Request(2, 6, 0)])
        assert [request for _, request in queue.assign()] == taken


def test_a_worker_keeps_its_weights_while_something_wants_them() -> None:
    queue = assigned(1, 1, [Request(0, 0, 0), Request(0, 1, 0)])
    queue.finish("w0", Request(0, 0, 0))
    assert not queue.is_drained("w0"), "one waits"
    queue.assign()
    assert not queue.is_drained("w0"), "one runs"
    queue.finish("w0", Request(0, 1, 0))
    assert queue.is_drained("w0")


def test_a_worker_that_is_held_takes_nothing_until_it_has_other_weights() -> None:
    queue = queue_of(num_workers=2, capacity=4)
    queue.add([Request(0, 0, 0), Request(0, 1, 0)])
    assert queue.recall("w0") == []
    assert {name for name, _ in queue.assign()} == {"w1"}
    assert queue.recall("w1") == [("w1", Request(0, 0, 0)), ("w1", Request(0, 1, 0))]
    assert (queue.num_waiting, queue.num_running, queue.assign()) == (2, 0, [])
    queue.switch("w1", 1)
    assert queue.assign() == []
    queue.switch("w0", 0)
    assert {name for name, _ in queue.assign()} == {"w0"}


def test_what_no_worker_has_the_weights_for_is_stranded() -> None:
    queue = queue_of(num_workers=2, capacity=1)
    assert queue.stranded is None and not queue.has_older(1)
    queue.add([Request(0, 0, 0), Request(1, 1, 0)])
    assert queue.stranded is None and queue.has_older(1) and not queue.has_older(0)
    queue.assign()
    assert queue.stranded is None and queue.has_older(1), "a worker is busy with version 0"
    queue.finish("w0", Request(0, 0, 0))
    assert queue.stranded == 1 and not queue.has_older(1)
    queue.switch("w0", 1)
    assert queue.stranded is None
    queue.add([Request(0, 2, 0)])
    queue.switch("w1", 1)
    assert queue.stranded == 0, "the oldest"
    queue.switch("w1", 0)
    assert queue.stranded is None


def test_cancelled_requests_are_gone_and_those_that_run_are_named() -> None:
    queue = assigned(1, 3, requests(2, 2))
    assert queue.cancel({1}) == [("w0", Request(0, 1, 0))]
    assert (queue.num_waiting, queue.num_running) == (0, 2)
    assert not queue.finish("w0", Request(0, 1, 0))
