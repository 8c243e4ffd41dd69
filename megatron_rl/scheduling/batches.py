"""Which groups a step trains: a rule on contents alone.

A step takes ``groups_per_step`` = P groups. Which ones follows from what is in the responses, not
from when they came or from how many workers there were::

    step s trains the first P groups, in prompt order from start(s) on, that the method wants;
    start(s + 1) is the group after the last of them;
    its responses are of weight version max(0, s - k), k being the staleness.

Without a filter every group is wanted, so step s trains the groups [sP, (s + 1)P). That a group is
admitted in time for its version is the bound of asynchronous training: with v updates done, version
s - k exists for all s <= v + k, so group i is admitted once i < (v + 1 + k)P.

With a filter (dynamic sampling) nobody knows how many prompts a step takes. More are sampled than
are missing, by the share that was wanted of late; each refusal is made up for at once. How many are
sampled ahead changes the cost of a step, not its groups: what lies behind the last one is dropped,
and its prompts are the first of the next step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rules:
    """What a run trains on. ``max_groups``: at most so many groups are looked at for a step under a
    filter; then it trains on those found. None: no filter, every group is wanted.

    Example: ``Rules(groups_per_step=128, responses_per_group=8, max_groups=1280)``.
    """

    groups_per_step: int
    responses_per_group: int
    max_groups: int | None = None
    staleness: int = 0  # k: updates between the weights that sample and those that are trained
    # Responses wholly of version max(0, s - k), bit for bit; else of that or a newer one.
    lockstep: bool = True

    @property
    def is_filtered(self) -> bool:
        return self.max_groups is not None

    def version_of(self, step: int) -> int:
        """Of the weights that sample for ``step``, counted from 0 in updates."""
        return max(0, step - self.staleness)


@dataclass
class KeptShare:
    """The share of groups that the method has wanted of late; a step counts half of the next."""

    wanted: float = 0.0
    seen: float = 0.0

    @property
    def value(self) -> float:
        """1 before anything is known; never 0, which would ask for groups without end: as if one
        group more had been seen, and wanted."""
        return (self.wanted + 1) / (self.seen + 1)

    def note(self, wanted: int, seen: int) -> None:
        self.wanted = self.wanted / 2 + wanted
        self.seen = self.seen / 2 + seen


@dataclass
class Batch:
    """The groups of one step, from the first admission until it is trained.

    ``verdicts``: whether a group is wanted, of those whose responses are all there and judged.
    """

    rules: Rules
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
        if self.rules.max_groups is None:
            return self.rules.groups_per_step
        return self.rules.max_groups

    @property
    def is_complete(self) -> bool:
        return self._wanted == self.rules.groups_per_step or self._decided == self.limit

    @property
    def end(self) -> int | None:
        """The first group of the next step; None while it is not known."""
        if not self.rules.is_filtered:
            return self.start + self.limit
        if not self.is_complete:
            return None
        return self.start + self._decided

    @property
    def groups(self) -> list[int]:
        """Those that a complete batch trains."""
        assert self.is_complete, "a batch that is not complete"
        looked_at = range(self.start, self.start + self._decided)
        return [group for group in looked_at if self.verdicts[group]]

    @property
    def num_refused(self) -> int:
        return self._decided - self._wanted

    def has(self, group: int) -> bool:
        """Whether a group is admitted here."""
        return self.start <= group < self.start + self.admitted

    def judge(self, group: int, *, wanted: bool) -> None:
        """Takes the verdict on a group that was admitted."""
        assert self.has(group) and group not in self.verdicts
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
        for group in sorted(self.verdicts):
            wanted += self.verdicts[group]
            if wanted == self.rules.groups_per_step:
                first = group + 1
                break
        for group in range(first, last):
            self.verdicts.pop(group, None)
        self.admitted = first - self.start
        return range(first, last)
