"""The prompts of a run by their number in the stream."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.data.loader import PromptLoader, WeightedLoader, numbered
from megatron_rl.scheduling.end_of_step import Admission
from megatron_rl.types import Prompt


class PromptStream:
    """Prompts by number, equal on every rank that has an equal loader; drawn as they are asked for.

    Requests are told apart by the uid of their prompt. So a prompt that comes again in a step gets
    a number, ``visit``, which rank 0 chooses; see ``data.loader.numbered``.
    """

    def __init__(self, loader: PromptLoader | WeightedLoader) -> None:
        self._loader = loader
        self._prompts: dict[int, Prompt] = {}
        self._before: dict[int, dict[str, Any]] = {}  # where the loader was before each of them
        self._next = 0
        self._admissions: dict[int, _Visits] = {}  # by step
        self._visits: dict[int, int] = {}  # of groups of the last step that asked

    def prompt(self, number: int, visit: int = 1) -> Prompt:
        """As it comes for the ``visit``-th time in a step."""
        while self._next <= number:
            self._before[self._next] = self._loader.state()
            (self._prompts[self._next],) = self._loader.take(1)
            self._next += 1
        return numbered(self._prompts[number], visit)

    def visit(self, group: int, admission: Admission | None = None) -> int:
        """The lowest number that the prompt has in no group that is open from an earlier step or
        comes before this one in the step. Without ``admission``: the number returned last."""
        if admission is None:
            return self._visits[group]
        visits = self._admissions.get(admission.step)
        if visits is None:
            visits = _Visits({one: self._visits[one] for one in admission.kept})
            for kept, visit in visits.by_group.items():
                visits.uids.add(self.prompt(kept, visit).uid)
            self._admissions[admission.step] = visits
        while group not in visits.by_group:
            other = admission.number(visits.num_new)
            visits.num_new += 1
            visit = 1
            while self.prompt(other, visit).uid in visits.uids:
                visit += 1
            visits.uids.add(self.prompt(other, visit).uid)
            visits.by_group[other] = visit
        self._visits[group] = visits.by_group[group]
        return visits.by_group[group]

    def forget_visits(self, groups: Iterable[int]) -> None:
        """These groups are not begun any more."""
        for group in groups:
            self._visits.pop(group, None)

    def forget(self, step: int, below: int) -> None:
        """A step is taken, and no prompt below this one is asked for again."""
        for by_number in (self._prompts, self._before, self._visits):
            for old in [old for old in by_number if old < below]:
                del by_number[old]
        for old in [old for old in self._admissions if old <= step]:
            del self._admissions[old]

    def state(self) -> dict[str, Any]:
        """Where the first prompt lies that may still be asked for."""
        first = min(self._prompts, default=self._next)
        return {
            "number": first,
            "loader": self._before.get(first, self._loader.state()),
            "visits": {group: visit for group, visit in self._visits.items() if group >= first},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError when the state belongs to other prompts."""
        self._loader.restore(state["loader"])
        self._prompts = {}
        self._before = {}
        self._admissions = {}
        self._next = state["number"]
        self._visits = dict(state["visits"])


class FixedPrompts(PromptStream):
    """Some prompts with different uids, each of which comes once."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._fixed = prompts

    def prompt(self, number: int, visit: int = 1) -> Prompt:
        return self._fixed[number]

    def visit(self, group: int, admission: Admission | None = None) -> int:
        return 1


@dataclass
class _Visits:
    """The visits of the groups of one step, as far as they were asked for."""

    by_group: dict[int, int]
    uids: set[str] = field(default_factory=set)
    num_new: int = 0
