"""Which worker does which request.

A worker is whatever answers requests: a replica of the engine in the training processes, a server,
a simulated one. Where a request runs changes when it is answered, never what is answered: a request
is a pure function of the run's seed, the uid of its prompt, the number of the response and the
weight version. So a request may be handed out again after a loss, and an answer that comes
twice counts once.

Invariants of ``WorkQueue``, which ``tests/unit/scheduling`` checks after random events:

1. A request is in one place: it waits, or one worker runs it. Answered, it is in none.
2. A worker runs at most ``capacity`` requests.
3. A worker runs requests of its own weight version alone (``exact``), or of no newer one.
"""

import heapq
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Request(NamedTuple):
    """A response to sample, and the version of the weights to sample it with.

    Requests are handed out in this order: of the oldest version first, then in prompt order.

    Example: ``Request(version=3, group=17, response=0)``.
    """

    version: int
    group: int  # number of the prompt in the order of the stream
    response: int  # number in the group

    @property
    def place(self) -> tuple[int, int]:
        """Names the response, whatever its weights."""
        return self.group, self.response


class Assignment(NamedTuple):
    """``request`` is to run, or to end, on ``worker``."""

    worker: str
    request: Request


@dataclass
class Worker:
    """``capacity``: requests that it takes at a time; ``version``: of the weights that it has;
    ``is_held``: it is about to get others, and takes no requests until then."""

    capacity: int
    version: int
    running: set[Request] = field(default_factory=set)
    is_held: bool = False

    @property
    def is_free(self) -> bool:
        return len(self.running) < self.capacity and not self.is_held


class WorkQueue:
    """One queue over all workers."""

    def __init__(self, *, exact: bool = True) -> None:
        """``exact``: a request runs on the very version it names, else on that or a newer one."""
        self.workers: dict[str, Worker] = {}
        self._exact = exact
        self._waiting: dict[int, list[Request]] = {}  # by version, each a heap
        self._place: dict[Request, str] = {}  # the worker of each running request
        self._worker_of_group: dict[int, str] = {}  # that took the last request of a group

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def num_running(self) -> int:
        return len(self._place)

    def join(self, name: str, capacity: int, version: int) -> None:
        """Adds a worker that is new, or comes back."""
        assert name not in self.workers, f"worker {name} is there already"
        self.workers[name] = Worker(capacity, version)

    def leave(self, name: str) -> None:
        """Removes a worker; what it ran waits again. Does nothing if it is gone already."""
        if name in self.workers:
            self.recall(name)
            del self.workers[name]

    def switch(self, name: str, version: int) -> None:
        """A worker has other weights now. In an exact queue it must be idle, and may have gone back
        to older ones."""
        worker = self.workers[name]
        assert self._exact or version >= worker.version, f"worker {name} went back to {version}"
        assert not (self._exact and worker.running), f"worker {name} switched with work in it"
        worker.version = version
        worker.is_held = False

    def recall(self, name: str) -> list[Assignment]:
        """A worker is to get other weights, see ``switch``: it takes no requests until then, and
        what it runs waits again; the caller is to abort it there."""
        worker = self.workers[name]
        worker.is_held = True
        running = sorted(worker.running)  # a set has no order
        for request in running:
            self.fail(name, request)
        return [Assignment(name, request) for request in running]

    def has_older(self, version: int) -> bool:
        """In an exact queue: whether a request of an older version waits or runs."""
        if any(heap and older < version for older, heap in self._waiting.items()):
            return True
        return any(one.running and one.version < version for one in self.workers.values())

    @property
    def stranded(self) -> int | None:
        """In an exact queue: the version of the oldest requests that wait, where no worker has it
        and none is busy with an older one, after which it would get newer weights."""
        oldest = min((version for version, heap in self._waiting.items() if heap), default=None)
        if oldest is None:
            return None
        for worker in self.workers.values():
            if worker.version == oldest or (worker.running and worker.version < oldest):
                return None
        return oldest

    def is_drained(self, name: str) -> bool:
        """Whether a worker has nothing left to do with its weights: nothing runs there, and nothing
        waits for this version or an older one."""
        worker = self.workers[name]
        due = any(heap and version <= worker.version for version, heap in self._waiting.items())
        return not worker.running and not due

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            heapq.heappush(self._waiting.setdefault(request.version, []), request)

    def assign(self) -> list[Assignment]:
        """Hands out what waits to the workers that are free; the caller submits it there.

        Loads stay even. Requests of one group share their prompt, so they go to one worker as long
        as that has no more than its equal part of all work.
        """
        assigned: list[Assignment] = []
        for version in sorted(self._waiting):
            heap = self._waiting[version]
            fitting = {
                name: worker
                for name, worker in self.workers.items()
                if worker.version == version or (worker.version > version and not self._exact)
            }
            if heap and fitting:
                total = len(heap) + sum(len(worker.running) for worker in fitting.values())
                assigned += self._hand_out(heap, fitting, math.ceil(total / len(fitting)))
            if not heap:
                del self._waiting[version]
        return assigned

    def _hand_out(
        self, heap: list[Request], fitting: dict[str, Worker], equal_part: int
    ) -> list[Assignment]:
        # Least load first, of equal loads by name. Each free worker has one entry. It may be
        # out of date by the siblings that followed a request, and is corrected when it comes up.
        by_load = [(len(one.running), name) for name, one in fitting.items() if one.is_free]
        heapq.heapify(by_load)
        assigned = []
        while heap and by_load:
            name = self._worker_of_group.get(heap[0].group, "")
            sibling = fitting.get(name)
            if sibling is None or not sibling.is_free or len(sibling.running) >= equal_part:
                # To the least loaded one. Where its entry was out of date it goes back with its
                # load of now, and the next best is looked at.
                load, name = heapq.heappop(by_load)
                worker = fitting[name]
                if len(worker.running) != load:
                    if worker.is_free:
                        heapq.heappush(by_load, (len(worker.running), name))
                    continue
                if load + 1 < worker.capacity:
                    heapq.heappush(by_load, (load + 1, name))
            request = heapq.heappop(heap)
            fitting[name].running.add(request)
            self._place[request] = name
            self._worker_of_group[request.group] = name
            assigned.append(Assignment(name, request))
        return assigned

    def runs(self, name: str, request: Request) -> bool:
        """Whether a worker has this request."""
        return self._place.get(request) == name

    def finish(self, name: str, request: Request) -> bool:
        """Notes an answer; returns whether it counts. It does from the worker that has the request:
        not when that was cancelled, or given to another because this one was thought to be gone."""
        if not self.runs(name, request):
            return False
        del self._place[request]
        self.workers[name].running.remove(request)
        return True

    def fail(self, name: str, request: Request) -> None:
        """A worker could not answer: the request waits again, if it still counts."""
        if self.finish(name, request):
            self.add([request])

    def cancel(self, groups: Collection[int]) -> list[Assignment]:
        """Forgets the requests of some groups; returns those that run, for the caller to abort."""
        for version, heap in self._waiting.items():
            kept = [request for request in heap if request.group not in groups]
            heapq.heapify(kept)  # removing entries has broken the order of the heap
            self._waiting[version] = kept
        places = self._place.items()
        running = [Assignment(name, one) for one, name in places if one.group in groups]
        for name, request in running:
            self.finish(name, request)
        self.forget(groups)
        return running

    def forget(self, groups: Iterable[int]) -> None:
        """No request of these groups comes again."""
        for group in groups:
            self._worker_of_group.pop(group, None)
