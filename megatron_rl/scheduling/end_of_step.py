"""When a step has its groups, and which they are: the strategies of ``Scheduler``.

``whole_groups.py`` trains groups that were begun for the step; ``token_level.py`` ends a step at a
number of tokens, and what has not ended continues in the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from megatron_rl.scheduling.work import Request


@dataclass(frozen=True)
class StepGroups:
    """The groups of a step, by their numbers in the stream of prompts.

    Attributes:
        step: Counted from 0; so many updates were done before it.
        groups: Those that are trained, in prompt order.
        refused: Those that dynamic sampling refused in it, in prompt order.
        start: The first group that the step could take.
        end: The first group that a later step may take.
        limits: Tokens that a response of a group may keep of this step, by group; of a group that
            is not named here: all.
        level: The most of these; None: there are none.
        first_steps: The step in which each trained group was begun.

    Example: ``StepGroups(3, groups=[12, 14], refused=[13], start=12, end=15)``.
    """

    step: int
    groups: Sequence[int]
    refused: Sequence[int] = ()
    start: int = 0
    end: int = 0
    limits: Mapping[int, int] = field(default_factory=dict)
    level: int | None = None
    first_steps: Sequence[int] = ()

    @property
    def num_refused(self) -> int:
        return len(self.refused)

    @property
    def age(self) -> int:
        """Steps since the oldest group that is trained was begun."""
        return max((self.step - first for first in self.first_steps), default=0)


class Admission(NamedTuple):
    """The order in which a step takes new prompts, for their names: one that comes twice among
    these groups needs two.

    Attributes:
        step: It belongs to.
        kept: Groups that are open since before.
        number: The group at each place of the order, from 0.
    """

    step: int
    kept: Sequence[int]
    number: Callable[[int], int]


class EndOfStep(Protocol):
    """Decides from verdicts and token counts alone, so that the groups of a step are the same for
    any timing and any number of workers."""

    @property
    def step(self) -> int:
        """The next one, counted from 0."""

    @property
    def start(self) -> int:
        """The first group that a step may still take."""

    @property
    def oldest_needed(self) -> int:
        """The oldest weights that something is still to be sampled with."""

    @property
    def num_answered(self) -> int:
        """Responses that are there, of groups that no step has taken yet."""

    @property
    def is_ready(self) -> bool:
        """Whether the next step has its groups, where nothing runs below its ``level``."""

    def requests(self) -> list[Request]:
        """Responses that are wanted since the last call."""

    def dropped(self) -> set[int]:
        """Groups that no step can need any more since the last call."""

    def assigned(self, request: Request, version: int) -> None:
        """A request goes to a worker whose weights are of ``version``."""

    def ended(self, request: Request, num_tokens: int) -> None:
        """A response has ended, ``num_tokens`` after the start of its step."""

    def paused(self, request: Request) -> None:
        """A response has got as many tokens in its step as ``level`` lets it."""

    def judged(self, version: int, group: int, *, wanted: bool) -> None:
        """Whether the method trains on a whole group."""

    def is_whole(self, group: int) -> bool:
        """Whether all responses of a group are there."""

    def to_judge(self) -> list[tuple[int, int]]:
        """Version and number of every group that is whole and waits for its verdict."""

    def step_of(self, group: int) -> int | None:
        """The step that a group is sampled for; None: no step wants it any more."""

    def admission(self, group: int) -> Admission:
        """To that step."""

    @property
    def level(self) -> int | None:
        """Tokens of a step after which its responses are paused; None: not known, or never."""

    def begin_of(self, group: int) -> int:
        """The part of it that had passed when the group was begun."""

    def take(self) -> StepGroups:
        """The groups of the next step, which leave."""

    def skip_to(self, step: int) -> None:
        """Between two steps: the next one is ``step``."""

    def published(self, version: int) -> None:
        """The weights of ``version`` exist."""

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse."""


class StepRules(Protocol):
    """What a run trains on, and how old it may be."""

    @property
    def groups_per_step(self) -> int: ...

    @property
    def responses_per_group(self) -> int: ...

    @property
    def staleness(self) -> int: ...

    @property
    def lockstep(self) -> bool: ...

    @property
    def is_filtered(self) -> bool: ...

    def version_of(self, step: int) -> int:
        """The weights that sample for ``step``, counted from 0 in updates."""

    def end_of_step(self, step: int, start: int, version: int) -> EndOfStep:
        """The strategy, at the beginning of ``step``."""
