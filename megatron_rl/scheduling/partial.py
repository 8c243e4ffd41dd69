"""Partial rollouts: a step ends when enough groups are whole; the other responses go on in the next
step with their tokens, sampled by its weights.

When that is must not depend on timing. So a step ends at a *level*, a number of tokens that each
response gets in it, and not at a moment: at the least level at which ``groups_per_step`` = P groups
are whole. Who is ahead of it waits, and what was sampled beyond it is thrown away. It follows from
lengths alone::

    level of a group in a step: most tokens that one of its responses still takes to its end
    level of the step: the P-th smallest level of its groups, but at least that of every group
                       that is ``max_age`` steps old
    the step trains the first P groups, in prompt order, whose level is not above it

As groups come to their ends the bound that is known falls, and ``limit`` says it: a response that
has got so many tokens in this step need not go on. The bound is the level when nothing runs below
it. A level can be 0: where enough groups became whole with the level of the step before.

Invariants, checked after random events: a group is trained once, whole, and no later than
``max_age`` steps after the one it was begun in; groups and levels are those of a plain computation
from the lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megatron_rl.scheduling.work import Assignment, Request, WorkQueue


@dataclass(frozen=True)
class PartialRules:
    """``groups_in_flight``: groups that are open at the start of a step, between P and 2 P, so that
    those of one age fit into a step.

    Example: ``PartialRules(groups_per_step=128, responses_per_group=8, groups_in_flight=160,
    max_age=3)``.
    """

    groups_per_step: int
    responses_per_group: int
    groups_in_flight: int
    max_age: int

    def __post_init__(self) -> None:
        assert self.groups_per_step <= self.groups_in_flight <= 2 * self.groups_per_step
        assert self.max_age >= 1


@dataclass
class OpenGroup:
    """A group that no step has trained. ``ends``: of each response that has ended, the tokens that
    it got in the present step; 0 where it ended before."""

    first_step: int
    ends: dict[int, int] = field(default_factory=dict)

    @property
    def level(self) -> int:
        return max(self.ends.values())


@dataclass(frozen=True)
class PartialStep:
    """What a step trains, and the tokens that each response may keep of it."""

    step: int
    groups: list[int]
    level: int
    first_steps: list[int]  # in which each group was begun


class PartialScheduler:
    """Driven like ``Scheduler``; ``Request.version`` is the step in which a response is sampled
    on."""

    def __init__(
        self,
        rules: PartialRules,
        *,
        step: int = 0,
        groups: Mapping[int, OpenGroup] | None = None,
    ) -> None:
        """``groups``: those that are open in ``step``, by number; what is missing of
        ``groups_in_flight`` is admitted behind them."""
        self.rules = rules
        self.queue = WorkQueue(exact=False)
        self.step = step
        self._groups: dict[int, OpenGroup] = dict(groups or {})
        self._num_admitted = max(self._groups, default=-1) + 1
        self._paused: set[Request] = set()
        self._begin()

    @property
    def age(self) -> int:
        """Steps since the oldest open group was begun."""
        return max((self.step - group.first_step for group in self._groups.values()), default=0)

    def assign(self) -> list[Assignment]:
        """What is to be submitted now: begun, or gone on with from the tokens that are there."""
        return self.queue.assign()

    def finished(self, worker: str, request: Request, num_tokens: int) -> bool:
        """A response has ended, ``num_tokens`` after the start of the step; whether it counts."""
        if not self.queue.finish(worker, request):
            return False
        self._groups[request.group].ends[request.response] = num_tokens
        return True

    def paused(self, worker: str, request: Request) -> bool:
        """A response has got as many tokens in this step as ``limit`` said, or more."""
        counts = self.queue.finish(worker, request)
        if counts:
            self._paused.add(request)
        return counts

    @property
    def limit(self) -> int | None:
        """Tokens after which a response need not go on in this step; None: not known yet."""
        groups = self._groups.values()
        levels = sorted(group.level for group in groups if self._is_whole(group))
        oldest = [group for group in groups if self._is_oldest(group)]
        if len(levels) < self.rules.groups_per_step or not all(map(self._is_whole, oldest)):
            return None
        # The P-th smallest level. It falls as more groups become whole, and that of the oldest
        # groups, which must be in the step, is fixed once they are.
        of_oldest = max((group.level for group in oldest), default=0)
        return max(levels[self.rules.groups_per_step - 1], of_oldest)

    @property
    def is_ready(self) -> bool:
        """Whether the level of the step is known: nothing runs below it."""
        runs = self.queue.num_running + self.queue.num_waiting
        return not runs and self.limit is not None

    def take(self) -> PartialStep:
        """What the step trains; the next one begins. Whoever keeps the tokens cuts every response
        that is not trained to ``level`` tokens of this step, also one that has ended beyond it."""
        level = self.limit
        assert level is not None and self.is_ready
        whole = []
        for number, group in sorted(self._groups.items()):
            if self._is_whole(group) and group.level <= level:
                whole.append(number)
        groups = whole[: self.rules.groups_per_step]
        first_steps = [self._groups.pop(number).first_step for number in groups]
        assert self.step - min(first_steps) <= self.rules.max_age
        taken = PartialStep(self.step, groups, level, first_steps)
        # Of the others, a response that ended within the level has ended before the next step (0
        # tokens in it); one that ended beyond is cut to the level, and goes on.
        for group in self._groups.values():
            group.ends = {number: 0 for number, end in group.ends.items() if end <= level}
        self.step += 1
        self._begin()
        return taken

    def _begin(self) -> None:
        """Admits groups, and queues all that is not there of the open ones."""
        while len(self._groups) < self.rules.groups_in_flight:
            self._groups[self._num_admitted] = OpenGroup(self.step)
            self._num_admitted += 1
        self._paused = set()
        for number, group in self._groups.items():
            self.queue.add(self._left(number, group))

    def _left(self, number: int, group: OpenGroup) -> Iterable[Request]:
        for response in range(self.rules.responses_per_group):
            if response not in group.ends:
                yield Request(self.step, number, response)

    def _is_whole(self, group: OpenGroup) -> bool:
        return len(group.ends) == self.rules.responses_per_group

    def _is_oldest(self, group: OpenGroup) -> bool:
        return self.step - group.first_step == self.rules.max_age
