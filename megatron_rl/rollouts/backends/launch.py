"""Generation in the training processes: every rank drives its part of an engine, rank 0 hands out
the work. ``scheduling/README.md`` says who agrees with whom, and how; each rank of a replica scores
its share of what has ended."""

import pickle
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.data.token_rows import Ranks
from megatron_rl.protocols import Generator
from megatron_rl.rollouts.backends.replica import Replica, ReplicaTask, worker_name
from megatron_rl.rollouts.dispatcher import Dispatcher, Event, GenerationRequest, StepSummary
from megatron_rl.rollouts.environments.turns import Turns
from megatron_rl.rollouts.jobs import GenerationJob
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.rollouts.rollouts import SampledStep
from megatron_rl.rollouts.rows.metrics import Clock
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Request

_TO_MAIN = "rank 0"
# Bounds of the pause of a rank with nothing to do, which doubles from one poll to the next.
_SHORTEST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.1


@dataclass
class LaunchBackend:
    """Implements ``GenerationBackend`` with the engines of a launch, one generation at a time: rank
    0 collects tasks for each replica and sends them."""

    engine: Generator
    rewards: RewardThread
    world: World
    display: Display
    turns: Turns | None = None
    _team: Any = None  # process group of the ranks of a replica, made when first needed
    _tasks: dict[int, ReplicaTask] = field(default_factory=lambda: defaultdict(ReplicaTask))

    def __post_init__(self) -> None:
        self._queues = StoreQueue(self.world)
        self._ranks_per_replica = self.world.size // self.engine.num_replicas
        # The first rank of each replica.
        self.leaders: Ranks = np.arange(0, self.world.size, self._ranks_per_replica)

    @property
    def leader(self) -> int:
        return int(self.leaders[self.engine.replica])

    # See GenerationBackend

    def submit(self, worker: str, wanted: GenerationRequest) -> None:
        self._tasks[int(worker)].begin.append(wanted)

    def abort(self, worker: str, request: Request) -> None:
        self._tasks[int(worker)].stop.append(request)

    def pause(self, level: int) -> None:
        for replica in range(len(self.leaders)):
            self._tasks[replica].level = level

    def events(self) -> list[Event]:
        return [event for events in self._queues.receive(_TO_MAIN) for event in events]

    def holder(self, worker: str | None, group: int) -> int:
        number = group % len(self.leaders) if worker is None else int(worker)
        return int(self.leaders[number])

    def _send_tasks(self, *, is_end: bool) -> None:
        """To replicas that have something to do; ``is_end``: tells all that the generation ends."""
        if is_end:
            self._tasks = {number: ReplicaTask(is_end=True) for number in range(len(self.leaders))}
        for replica, task in self._tasks.items():
            self._queues.send(_queue(replica), task)
        self._tasks = defaultdict(ReplicaTask)

    def dispatcher(self, job: GenerationJob, scheduler: Scheduler) -> Dispatcher:
        """For rank 0. Its workers are the replicas."""
        for replica in range(self.engine.num_replicas):
            scheduler.queue.join(worker_name(replica), self.engine.capacity, scheduler.version)
        return Dispatcher(job, scheduler, self, self.rewards)

    def answers(self, job: GenerationJob, what: str, clock: Clock) -> SampledStep:
        """Collective: a job of one step, with the weights that the engines have."""
        dispatcher = self.dispatcher(job, Scheduler(job.rules)) if self.world.is_main else None
        return SampledStep.of(self.run(job, dispatcher, what, clock), job, self.world.rank)

    def run(
        self, job: GenerationJob, dispatcher: Dispatcher | None, what: str, clock: Clock
    ) -> StepSummary:
        """Collective: generates until the next step of ``dispatcher`` (on rank 0) has its groups.
        The clock counts as ``reward`` the time in which all is sampled and only scores are missing,
        which rank 0 knows, and as ``rollout`` the rest. ``what``: for the display."""
        world = self.world
        number = world.rank - self.leader
        place = (number, self._ranks_per_replica)
        replica = Replica(self.engine, self.rewards, job, *place, self.turns)
        clock.add({"rollout": 0.0, "reward": 0.0})  # a metric of every step, also where it is 0
        with self.display.phase(f"{what}: generating", announced=False):
            self._generate(replica, dispatcher, what, clock)
        self.rewards.forget()
        if self.turns is not None:
            self.turns.forget()

        def taken() -> StepSummary:
            assert dispatcher is not None, "rank 0 has it"
            return dispatcher.take(sum(sampled))

        with clock("rollout"):
            sampled = world.all_gather(replica.num_tokens if number == 0 else 0)
            summary = world.from_main(taken)
        if world.is_main:
            self._queues.receive(_TO_MAIN)  # of responses that came too late to count
        return summary

    def _generate(
        self, replica: Replica, dispatcher: Dispatcher | None, what: str, clock: Clock
    ) -> None:
        """One turn after the other, until rank 0 says that it is over."""
        report = self.display.generating(what)
        pause_s = _SHORTEST_PAUSE_S
        is_over = False
        while not is_over:
            with clock("reward" if dispatcher and not dispatcher.num_left else "rollout"):
                has_heard = False
                if dispatcher is not None:
                    has_heard = dispatcher.turn()
                    # Sent before this rank reads its own tasks: the end stops it in this turn.
                    self._send_tasks(is_end=dispatcher.is_ready)
                    report(dispatcher.progress)
                tasks = self._next_tasks()
                for task in tasks:
                    replica.apply(task)
                is_over = any(task.is_end for task in tasks)
                events = replica.work()
                if events:
                    self._queues.send(_TO_MAIN, events)
                if has_heard or tasks or events or replica.is_busy:
                    pause_s = _SHORTEST_PAUSE_S
                elif self.world.rank == self.leader:  # the others wait for its broadcast
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _next_tasks(self) -> list[ReplicaTask]:
        """What this replica is to do, in order: equal on all of its ranks."""
        tasks: list[ReplicaTask] = []
        if self.world.rank == self.leader:
            tasks = self._queues.receive(_queue(self.engine.replica))
            if self.turns is not None and (outcomes := self.turns.take()):
                tasks.append(ReplicaTask(outcomes=outcomes))
        if self._ranks_per_replica == 1:
            return tasks
        if self._team is None:
            self._team = self.world.team(self._ranks_per_replica)
        carried: list[Any] = [tasks]
        dist.broadcast_object_list(carried, src=self.leader, group=self._team)
        return carried[0]


def _queue(replica: int) -> str:
    return f"replica {replica}"


class StoreQueue:
    """Queues by name, each emptied by one rank, in the order in which messages came.

    They live in the launch's store; polling an empty queue costs one request to it. Messages are
    pickled, as in collectives of the control group: the store serves the ranks of this launch
    alone. Call it from the main thread only.

    Example: ``queues.send("to rank 1", "start")``, and there ``queues.receive("to rank 1")``.
    """

    def __init__(self, world: World) -> None:
        # Any: it takes bytes, though its signature says text.
        self._store: Any = dist.HashStore()
        if world.size > 1:
            self._store = dist.distributed_c10d._get_default_store()

    def send(self, queue: str, message: Any) -> None:
        self._store.queue_push(f"megatron_rl/{queue}", pickle.dumps(message))

    def receive(self, queue: str) -> list[Any]:
        """All that has come since the last time."""
        name = f"megatron_rl/{queue}"
        waiting = range(self._store.queue_len(name))
        return [pickle.loads(self._store.queue_pop(name)) for _ in waiting]
