"""What a run trains on, and when a step has its groups: the strategies of ``Scheduler``.

``whole_groups.py`` trains groups that were begun for the step; ``token_level.py`` ends a step at a
number of tokens, and what has not ended continues in the next one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_rl.scheduling.work import Request


@dataclass(frozen=True)
class StepRules:
    """What a run trains on, and how old it may be.

    Attributes:
        groups_per_step: P.
        responses_per_group: R.
        max_rounds: Under dynamic sampling, sampling rounds of P groups that a step looks at (of
            partial rollouts: groups that one slot looks at); then it trains what was found. None:
            every group is wanted.
        staleness: k, most updates between the weights that sample and those that are trained.
        lockstep: Responses are wholly of version max(0, s - k), bit for bit; else of that or a
            newer one.
        groups_in_flight: Of partial rollouts, groups that are open at the start of a step, between
            P and 2 P, so that those of one age fit into a step. None: every group is sampled
            wholly for the step that trains it.
        max_age: Of partial rollouts, most steps between the one that begins a group and the one
            that trains it.

    Example: ``StepRules(128, 8, max_rounds=10)``, ``StepRules(128, 8, groups_in_flight=160,
    max_age=3)``.
    """

    groups_per_step: int
    responses_per_group: int
    max_rounds: int | None = None
    staleness: int = 0
    lockstep: bool = True
    groups_in_flight: int | None = None
    max_age: int = 1

    def __post_init__(self) -> None:
        most = self.groups_in_flight
        assert most is None or self.groups_per_step <= most <= 2 * self.groups_per_step
        assert self.max_age >= 1

    @property
    def is_filtered(self) -> bool:
        return self.max_rounds is not None

    @property
    def is_partial(self) -> bool:
        """Whether a response may continue in the next step."""
        return self.groups_in_flight is not None

    def version_of(self, step: int) -> int:
        """Version, counted from 0 in updates, of the weights that sample for ``step``."""
        return max(0, step - self.staleness)


@dataclass(frozen=True)
class StepGroups:
    """The groups of a step, by their numbers in the stream of prompts.

    Attributes:
        step: Counted from 0; so many updates were done before it.
        groups: Those that are trained, in prompt order.
        refused: Those that dynamic sampling refused in it, in prompt order.
        end: The first group that a later step may take.
        limits: By group, how many tokens of this step its responses may keep; of a group that is
            not named here: all.
        level: The largest limit; None: there are no limits.
        first_steps: The step in which each trained group was begun.

    Example: ``StepGroups(3, groups=[12, 14], refused=[13], end=15)``.
    """

    step: int
    groups: Sequence[int]
    refused: Sequence[int] = ()
    end: int = 0
    limits: Mapping[int, int] = field(default_factory=dict)
    level: int | None = None
    first_steps: Sequence[int] = ()

    @property
    def gone(self) -> set[int]:
        """Groups that no later step has."""
        return {*self.groups, *self.refused}

    @property
    def open(self) -> set[int]:
        """Groups that continue in the next step."""
        return self.limits.keys() - self.gone


class Admission(NamedTuple):
    """The order in which a step takes new prompts. It decides on uids: a prompt that comes twice
    among these groups needs two.

    Attributes:
        step: The step whose order it is.
        kept: Groups that are open from steps before.
        number: The group at each place of the order, from 0.
    """

    step: int
    kept: Sequence[int]
    number: Callable[[int], int]


class EndOfStep(ABC):
    """Decides from verdicts and token counts alone, so that the groups of a step are the same for
    any timing and any number of workers.

    Attributes:
        step: The next one, counted from 0.
        version: The newest weights that are published.
        new: Responses that were requested since the scheduler took them last.
        dropped: Groups that no step can need any more, since then.
        level: Tokens of a step after which its responses are paused; None: not known, or never.
    """

    def __init__(self, rules: StepRules, step: int, version: int) -> None:
        self.rules = rules
        self.step = step
        self.version = version
        self.new: list[Request] = []
        self.dropped: set[int] = set()
        self.level: int | None = None

    def published(self, version: int) -> None:
        """Notes that the weights of ``version`` exist."""
        self.version = version
        self.admit()

    @abstractmethod
    def admit(self) -> None:
        """Requests what is missing for the steps whose weights are published."""

    @property
    @abstractmethod
    def oldest_needed(self) -> int:
        """Version of the oldest weights that something is still to be sampled with."""

    @property
    @abstractmethod
    def num_answered(self) -> int:
        """Responses that are there, of groups that no step has taken yet."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the next step has its groups, where nothing runs below its ``level``."""

    @abstractmethod
    def ended(self, request: Request, num_tokens: int) -> None:
        """A response has ended, ``num_tokens`` after the start of its step."""

    def paused(self, request: Request) -> None:
        """A response has sampled as many tokens in its step as ``level`` allows."""
        raise AssertionError("there is no level")

    @abstractmethod
    def judged(self, version: int, group: int, *, wanted: bool) -> None:
        """Whether the method trains on a whole group, whose requests named ``version``."""

    @abstractmethod
    def is_whole(self, group: int) -> bool:
        """Whether all responses of a group are there."""

    @abstractmethod
    def to_judge(self) -> list[tuple[int, int]]:
        """Version and number of every group that is whole and waits for its verdict."""

    @abstractmethod
    def step_of(self, group: int) -> int | None:
        """The step that a group is sampled for; None: no step wants it any more."""

    @abstractmethod
    def admission(self, group: int) -> Admission:
        """The order of that step."""

    def begin_of(self, group: int) -> int:
        """The part of the step's ``level`` that had passed when the group was begun."""
        return 0

    @abstractmethod
    def take(self) -> StepGroups:
        """The groups of the next step, which leave."""

    @abstractmethod
    def skip_to(self, step: int) -> None:
        """Called between two steps: the next one is ``step``."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse. Requests that were running are made again."""
