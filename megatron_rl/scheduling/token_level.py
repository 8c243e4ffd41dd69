"""Partial rollouts: a step ends when enough groups are whole; the other responses continue in the
next step with their tokens, sampled by its weights.

When a step ends must not depend on timing. So it ends not at a moment but at a *level*, a number of
tokens that each response samples in it: the least level at which ``groups_per_step`` = P groups are
whole. A response that is ahead of the level waits, and what was sampled beyond it is discarded. The
level follows from lengths alone::

    level of a group in a step: most tokens that one of its responses still takes to its end
    level of the step: the P-th smallest level of its groups, but at least that of every group
                       that is ``max_age`` steps old
    the step trains the first P groups whose level is not above it, in the order in which they were
    begun, those of one step in prompt order

Under dynamic sampling only wanted groups count towards P. A group that is refused at level l is
replaced in its slot: the new one begins at l, and l counts into its level. So the F slots are F
clocks that run alike, and what has happened by a level follows from lengths and verdicts. So does
which prompt replaces which: the r-th replacement in slot i is prompt r F + i of the step's new
ones. A prompt that was not begun by the level of the step is among the first new ones of the next.

``level`` is an upper bound of the level, which falls as groups end: a response that has sampled so
many tokens in this step is paused. The bound is the level when nothing runs below it. A level can
be 0: where enough groups became whole with the level of the step before.

Invariants, checked after random events: a group is trained once, whole, and no later than
``max_age`` steps after the one it was begun in; groups and levels are those of a plain computation
from lengths and verdicts.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_rl.scheduling.end_of_step import Admission, EndOfStep, StepGroups, StepRules
from megatron_rl.scheduling.work import Request

# Of ``TokenLevel``, what a checkpoint keeps besides the groups.
_STATE = ("step", "version", "_next", "_gaps", "_kept", "_num_begun", "_is_begun")


@dataclass
class OpenGroup:
    """A group that no step has trained.

    Attributes:
        slot: Its place among the groups in flight.
        number_in_slot: Groups that the slot had before it in this step.
        begin: The level of the step at which it was begun; 0 where it was open at the start.
        ends: Of each response that has ended, the tokens that it got in this step; 0 where it
            ended before.
        wanted: The verdict; None: not known.
    """

    first_step: int
    slot: int = 0
    number_in_slot: int = 0
    begin: int = 0
    ends: dict[int, int] = field(default_factory=dict)
    wanted: bool | None = None

    @property
    def level(self) -> int:
        """The level of a whole group. A replacement counts as one token at least, so that a group
        that begins at the level of a step does not belong to this step."""
        return self.begin + max([min(1, self.number_in_slot), *self.ends.values()])


class TokenLevel(EndOfStep):
    """See the head of this file. ``level``: the bound that is known; it falls."""

    def __init__(self, rules: StepRules, step: int, version: int) -> None:
        super().__init__(rules, step, version)
        self._groups: dict[int, OpenGroup] = {}
        self._next = 0  # no prompt from here on was ever given to a slot
        self._gaps: list[int] = []  # those before it that were not begun, ascending
        self._kept: list[int] = []  # open since before this step
        self._num_begun = 0  # new groups at the start of this step
        self._is_begun = False
        self._open: set[Request] = set()  # asked for, neither ended nor paused
        self.admit()

    @property
    def _first(self) -> int:
        """The first group that a step may still take."""
        return min([*self._groups, *self._gaps, self._next])

    @property
    def oldest_needed(self) -> int:
        return self.rules.version_of(self.step + self.is_ready)

    @property
    def num_answered(self) -> int:
        return sum(len(group.ends) for group in self._groups.values())

    @property
    def is_ready(self) -> bool:
        level = self.level
        if level is None or self._open or not self._is_begun:
            return False
        # A verdict that is out may bring a group into the step, or another in its place.
        return not self.rules.is_filtered or not any(
            self._has_passed(group, level) and group.wanted is None
            for group in self._groups.values()
        )

    def ended(self, request: Request, num_tokens: int) -> None:
        group = self._groups[request.group]
        group.ends[request.response] = num_tokens
        self._open.discard(request)
        if self._is_whole(group):
            self._bound()

    def paused(self, request: Request) -> None:
        self._open.discard(request)

    def judged(self, version: int, group: int, *, wanted: bool) -> None:
        found = self._groups.get(group)
        if found is None or found.wanted is not None or not self._is_whole(found):
            return
        found.wanted = wanted
        if self.rules.is_filtered:
            if not wanted:
                self._replace(found)
            self._bound()

    def is_whole(self, group: int) -> bool:
        return group in self._groups and self._is_whole(self._groups[group])

    def to_judge(self) -> list[tuple[int, int]]:
        version = self.rules.version_of(self.step)
        return [
            (version, number)
            for number, group in sorted(self._groups.items())
            if self._is_whole(group) and group.wanted is None
        ]

    def step_of(self, group: int) -> int | None:
        return self.step if group in self._groups else None

    def admission(self, group: int) -> Admission:
        return Admission(self.step, self._kept, self._candidate)

    def begin_of(self, group: int) -> int:
        return self._groups[group].begin

    def take(self) -> StepGroups:
        """The caller, who keeps the tokens, cuts every response that is not trained to the
        ``limits``, also one that has ended beyond them."""
        level = self.level
        assert level is not None and self.is_ready, "the level of the step is not known"
        in_order = sorted(self._groups, key=lambda one: (self._groups[one].first_step, one))
        passed = [one for one in in_order if self._has_passed(self._groups[one], level)]
        refused = [number for number in passed if self._groups[number].wanted is False]
        wanted = [number for number in passed if number not in set(refused)]
        # More than P may have passed where groups have one level: the youngest wait.
        groups = wanted[: self.rules.groups_per_step]
        limits = {number: level - group.begin for number, group in self._groups.items()}
        self._note_gaps()
        first_steps = [self._groups.pop(number).first_step for number in groups]
        assert all(self.step - first <= self.rules.max_age for first in first_steps)
        for number in refused:
            del self._groups[number]
        for number, group in self._groups.items():
            # A response that ended within the level has ended before the next step (0 tokens in
            # it); one that ended beyond is cut to the level, and continues.
            ends = {one: 0 for one, end in group.ends.items() if end <= limits[number]}
            wanted_already = group.wanted if self._has_passed(group, level) else None
            self._groups[number] = OpenGroup(group.first_step, ends=ends, wanted=wanted_already)
        taken = StepGroups(self.step, groups, refused, self._first, limits, level, first_steps)
        self.step += 1
        self._is_begun = False
        self.level = None
        self.admit()
        return taken

    def skip_to(self, step: int) -> None:
        assert not self._is_begun, "a step is begun"
        self.step = step

    def admit(self) -> None:
        """Begins a step whose weights are there: admits groups, asks for what open ones lack."""
        if self._is_begun or self.rules.version_of(self.step) > self.version:
            return
        self._is_begun = True
        self._kept = sorted(self._groups)
        assert self.rules.groups_in_flight is not None
        self._num_begun = self.rules.groups_in_flight - len(self._groups)
        for place in range(self._num_begun):
            self._groups[self._candidate(place)] = OpenGroup(self.step)
        # Slots by group number, not by who came first: a resumed run has the same ones.
        for slot, number in enumerate(sorted(self._groups)):
            self._groups[number].slot = slot
            self._ask(number)
        self._bound()

    def _candidate(self, place: int) -> int:
        """Prompts that may be begun, in order: those that earlier steps left out, then new ones."""
        if place < len(self._gaps):
            return self._gaps[place]
        return self._next + place - len(self._gaps)

    def _ask(self, number: int) -> None:
        version = self.rules.version_of(self.step)
        missing = set(range(self.rules.responses_per_group)) - self._groups[number].ends.keys()
        requests = [Request(version, number, response) for response in sorted(missing)]
        self._open.update(requests)
        self.new += requests

    def _replace(self, refused: OpenGroup) -> None:
        """The next group of a slot, which begins where the refused one has ended."""
        count = refused.number_in_slot + 1
        if count == self.rules.max_rounds:
            return
        if self.level is not None and refused.level >= self.level:
            return
        # Its number follows from slot and count alone, not from which slot was refused first:
        # after the groups of the start come rows of F candidates, one for each slot.
        assert self.rules.groups_in_flight is not None
        place = self._num_begun + (count - 1) * self.rules.groups_in_flight + refused.slot
        number = self._candidate(place)
        self._groups[number] = OpenGroup(self.step, refused.slot, count, refused.level)
        self._ask(number)

    def _bound(self) -> None:
        """Sets ``level`` to what is known of the level of the step."""
        self.level = self._known_level()
        if self.level is None:
            return
        # The bound falls, so a replacement that was begun may lie beyond it now.
        for number, group in list(self._groups.items()):
            if group.number_in_slot and group.begin >= self.level:
                del self._groups[number]
                self.dropped.add(number)
                self._open = {request for request in self._open if request.group != number}

    def _known_level(self) -> int | None:
        groups = self._groups.values()
        whole = [group for group in groups if self._is_whole(group)]
        decided = [group for group in whole if not self.rules.is_filtered or group.wanted]
        oldest = [group for group in groups if self.step - group.first_step == self.rules.max_age]
        if len(decided) < self.rules.groups_per_step and self._is_exhausted:
            return max((group.level for group in whole), default=0)
        if len(decided) < self.rules.groups_per_step or not all(map(self._is_whole, oldest)):
            return None
        # The P-th smallest level. It falls as more groups become whole, and that of the oldest
        # groups, which must leave in this step, is fixed once they are.
        levels = sorted(group.level for group in decided)
        of_oldest = max((group.level for group in oldest), default=0)
        return max(levels[self.rules.groups_per_step - 1], of_oldest)

    @property
    def _is_exhausted(self) -> bool:
        """Whether no slot may look at another group, and every verdict is known."""
        if not self.rules.is_filtered:
            return False
        return all(
            self._is_whole(group)
            and (group.wanted or (group.wanted is False and self._is_last(group)))
            for group in self._groups.values()
        )

    def _is_last(self, group: OpenGroup) -> bool:
        """Whether a refused group is not replaced, or has been already."""
        return group.number_in_slot + 1 == self.rules.max_rounds or any(
            other.slot == group.slot and other.number_in_slot == group.number_in_slot + 1
            for other in self._groups.values()
        )

    def _note_gaps(self) -> None:
        """Called before groups leave: notes the prompts that the next step may begin first."""
        new = self._groups.keys() - set(self._kept)
        following = max([self._next, *(number + 1 for number in new)])
        there = [*self._gaps, *range(self._next, following)]
        self._gaps = [number for number in there if number not in new]
        self._next = following

    def _is_whole(self, group: OpenGroup) -> bool:
        return len(group.ends) == self.rules.responses_per_group

    def _has_passed(self, group: OpenGroup, level: int) -> bool:
        return self._is_whole(group) and group.level <= level

    def state(self) -> dict[str, Any]:
        groups = {number: asdict(group) for number, group in self._groups.items()}
        return {name: getattr(self, name) for name in _STATE} | {"groups": groups}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, state[name])
        self._groups = {number: OpenGroup(**group) for number, group in state["groups"].items()}
        if self._is_begun:
            for number in sorted(self._groups):
                self._ask(number)
            self._bound()
        self.admit()
