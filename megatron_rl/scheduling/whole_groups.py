"""Which groups a step trains: a rule on contents alone.

A step takes ``groups_per_step`` = P groups. Which ones follows from what is in the responses, not
from when they came or from how many workers there were::

    step s trains the first P groups, in prompt order from start(s) on, that the method wants;
    start(s + 1) is the group after the last of them;
    its responses are of weight version max(0, s - k), k being the staleness.

Without a filter every group is wanted, so step s trains the groups [sP, (s + 1)P). That a group is
admitted in time for its version is the bound of asynchronous training: with v updates done, version
s - k exists for all s <= v + k, so group i is admitted once i < (v + 1 + k)P.

With a filter (dynamic sampling) the number of prompts that a step takes is not known before. More
are sampled than are missing, by the share that was wanted of late; each refusal is made up for at
once. How many are sampled ahead changes the cost of a step, not its groups: what lies after the
last one is dropped, and its prompts are the first of the next step.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.scheduling.end_of_step import Admission, EndOfStep, StepGroups, StepRules
from megatron_rl.scheduling.work import Request


@dataclass
class KeptShare:
    """The share of groups that the method wanted lately; a step counts half as much as the next."""

    wanted: float = 0.0
    seen: float = 0.0

    @property
    def value(self) -> float:
        """As if one more group had been seen, and wanted: 1 before anything is known, and never 0,
        which would ask for groups without end."""
        return (self.wanted + 1) / (self.seen + 1)

    def note(self, wanted: int, seen: int) -> None:
        self.wanted = self.wanted / 2 + wanted
        self.seen = self.seen / 2 + seen


@dataclass
class Batch:
    """The groups of one step, from the first admission until it is trained.

    ``verdicts``: whether a group is wanted, of those whose responses are all there and judged.
    """

    rules: StepRules
    step: int
    start: int
    admitted: int = 0  # groups [start, start + admitted)
    verdicts: dict[int, bool] = field(default_factory=dict)
    _decided: int = 0  # groups from the start on without a gap that have a verdict
    _wanted: int = 0  # of these

    @property
    def version(self) -> int:
        return self.rules.version_of(self.step)

    @property
    def limit(self) -> int:
        """Groups that the step may look at."""
        return self.rules.groups_per_step * (self.rules.max_rounds or 1)

    @property
    def is_complete(self) -> bool:
        return self._wanted == self.rules.groups_per_step or self._decided == self.limit

    @property
    def end(self) -> int | None:
        """The first group of the next step; None while it is not known."""
        if not self.rules.is_filtered:
            return self.start + self.limit
        return self.start + self._decided if self.is_complete else None

    def decided(self, *, wanted: bool) -> list[int]:
        """The groups of a complete batch that were looked at, and are (not) ``wanted``."""
        assert self.is_complete, "a batch that is not complete"
        looked_at = range(self.start, self.start + self._decided)
        return [group for group in looked_at if self.verdicts[group] == wanted]

    @property
    def groups(self) -> range:
        """The groups that are admitted to this batch."""
        return range(self.start, self.start + self.admitted)

    def judge(self, group: int, *, wanted: bool) -> None:
        """Takes the verdict on a group that was admitted."""
        assert group in self.groups and group not in self.verdicts
        self.verdicts[group] = wanted
        # Verdicts come in any order, and only those without a gap before them decide: with groups
        # 0, 1 and 3 judged two are decided, and the verdict on 2 decides 2 and 3.
        while not self.is_complete and self.start + self._decided in self.verdicts:
            self._wanted += self.verdicts[self.start + self._decided]
            self._decided += 1

    def missing(self, share: float) -> int:
        """Groups to admit now so that, where ``share`` of them is wanted, enough will be: with one
        standard deviation to spare, because a group that is admitted late makes all wait.

        To find L wanted ones takes L / share groups in the mean, with a standard deviation of
        sqrt(L (1 - share)) / share (a negative binomial distribution). Example: 16 at a share of
        1/2 take 32 groups, and 5.7 to spare: 38.
        """
        lacking = self.rules.groups_per_step - sum(self.verdicts.values())
        if self.is_complete or lacking <= 0:
            return 0
        aim = math.ceil((lacking + math.sqrt(lacking * (1 - share))) / share)
        undecided = self.admitted - len(self.verdicts)  # these are under way already
        return max(0, min(aim - undecided, self.limit - self.admitted))

    def drop_unneeded(self) -> range:
        """Forgets the groups that cannot be trained in this step, and returns them: so many are
        wanted before them that the step has enough, whatever the verdicts on the others are."""
        first = last = self.start + self.admitted
        wanted = 0
        # Verdicts with gaps between them count, too: whatever the gaps bring, the step ends at
        # ``first`` or before it.
        for group in sorted(self.verdicts):
            wanted += self.verdicts[group]
            if wanted == self.rules.groups_per_step:
                first = group + 1
                break
        for group in range(first, last):
            self.verdicts.pop(group, None)
        self.admitted = first - self.start
        return range(first, last)


class WholeGroups(EndOfStep):
    """Every group is sampled wholly for the step that trains it.

    Without a filter the groups of a step are known at once, so with staleness k those of k + 1
    steps are open; with one the next step's start is known when the step before has its groups.
    """

    def __init__(self, rules: StepRules, step: int, version: int) -> None:
        super().__init__(rules, step, version)
        self.kept_share = KeptShare()
        self._start = 0  # the first group that a step may still take
        self._batches: list[Batch] = []  # not yet taken, in the order of steps
        self._answered: dict[int, set[int]] = {}  # group -> its responses that are there
        self.admit()

    @property
    def oldest_needed(self) -> int:
        """A run that resumes from a checkpoint has the newest weights alone: in lockstep it is
        ``state`` that waits until these are all that is needed."""
        for batch in self._batches:
            if not batch.is_complete:
                return batch.version
        return self.rules.version_of(self.step + len(self._batches))

    @property
    def num_answered(self) -> int:
        return sum(map(len, self._answered.values()))

    @property
    def is_ready(self) -> bool:
        return bool(self._batches) and self._batches[0].is_complete

    def ended(self, request: Request, num_tokens: int) -> None:
        self._answered.setdefault(request.group, set()).add(request.response)

    def judged(self, version: int, group: int, *, wanted: bool) -> None:
        """What no step can need any more is dropped; what is missing instead is admitted. A verdict
        on responses that were dropped meanwhile changes nothing."""
        batch = self._batch_with(group)
        # A dropped group may be back, in a batch of other weights, or not whole again yet.
        if batch is None or batch.version != version:
            return
        if group in batch.verdicts or not self.is_whole(group):
            return
        batch.judge(group, wanted=wanted)
        if self.rules.is_filtered and wanted:
            dropped = batch.drop_unneeded()
            self.dropped.update(dropped)
            self._forget(dropped)
        self.admit()

    def is_whole(self, group: int) -> bool:
        return len(self._answered.get(group, ())) == self.rules.responses_per_group

    def to_judge(self) -> list[tuple[int, int]]:
        return [
            (batch.version, group)
            for batch in self._batches
            for group in batch.groups
            if self.is_whole(group) and group not in batch.verdicts
        ]

    def step_of(self, group: int) -> int | None:
        batch = self._batch_with(group)
        return None if batch is None else batch.step

    def admission(self, group: int) -> Admission:
        batch = self._batch_with(group)
        assert batch is not None, f"group {group} is of no step to come"
        start = batch.start
        return Admission(batch.step, (), lambda place: start + place)

    def take(self) -> StepGroups:
        assert self.is_ready, "the next step has not all of its groups"
        batch = self._batches.pop(0)
        groups = batch.decided(wanted=True)
        refused = batch.decided(wanted=False)
        self.kept_share.note(len(groups), len(groups) + len(refused))
        self.step = batch.step + 1
        # A complete batch has no group after the last that was looked at: those were dropped.
        self._start = batch.groups.stop
        self._forget(batch.groups)
        self.admit()
        return StepGroups(batch.step, groups, refused, self._start)

    def skip_to(self, step: int) -> None:
        assert not self._batches, "a step is begun"
        self.step = step

    def admit(self) -> None:
        """Opens the batches of all steps whose weights are published and whose start is known, and
        admits what they lack."""
        while self.rules.version_of(self.step + len(self._batches)) <= self.version:
            start = self._batches[-1].end if self._batches else self._start
            if start is None:
                break
            self._batches.append(Batch(self.rules, self.step + len(self._batches), start))
        share = self.kept_share.value if self.rules.is_filtered else 1.0
        for batch in self._batches:
            first = batch.groups.stop
            batch.admitted += batch.missing(share)
            self._request(batch, range(first, batch.groups.stop))

    def _request(self, batch: Batch, groups: Iterable[int]) -> None:
        for group in groups:
            there = self._answered.get(group, set())
            missing = set(range(self.rules.responses_per_group)) - there
            self.new += [Request(batch.version, group, response) for response in missing]

    def _batch_with(self, group: int) -> Batch | None:
        return next((batch for batch in self._batches if group in batch.groups), None)

    def _forget(self, groups: Iterable[int]) -> None:
        for group in groups:
            self._answered.pop(group, None)

    def state(self) -> dict[str, Any]:
        """The position, the batches that are open, and which of their responses are there (the
        caller keeps those)."""
        return {
            "step": self.step,
            "start": self._start,
            "version": self.version,
            "kept_share": [self.kept_share.wanted, self.kept_share.seen],
            "batches": [
                {"admitted": one.admitted, "start": one.start, "verdicts": dict(one.verdicts)}
                for one in self._batches
            ],
            "answered": {group: sorted(there) for group, there in self._answered.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self._start = state["start"]
        self.version = state["version"]
        self.kept_share = KeptShare(*state["kept_share"])
        self._answered = {group: set(there) for group, there in state["answered"].items()}
        self._batches = []
        self.new = []
        for number, saved in enumerate(state["batches"]):
            # Its step follows from its place among the batches.
            batch = Batch(self.rules, self.step + number, saved["start"], saved["admitted"])
            for group in sorted(saved["verdicts"]):
                batch.judge(group, wanted=saved["verdicts"][group])
            self._batches.append(batch)
            self._request(batch, batch.groups)
        self.admit()
