"""What is to be generated, equal on every rank: the steps of a run, or answers to some prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_rl.rollouts.demonstrations import Demonstrations
from megatron_rl.rollouts.prompts import PromptStream
from megatron_rl.rollouts.rows.verdicts import VerdictRules
from megatron_rl.rollouts.sampling import SamplingPlan
from megatron_rl.rollouts.store import ResponseStore
from megatron_rl.scheduling.end_of_step import EndOfStep, StepRules
from megatron_rl.scheduling.token_level import PartialRules
from megatron_rl.scheduling.whole_groups import Rules
from megatron_rl.types import Completion, Prompt, Sampling, Score


class GenerationJob(Protocol):
    """Prompts by group, how they are sampled, and what is there already."""

    @property
    def rules(self) -> StepRules: ...

    @property
    def store(self) -> ResponseStore:
        """The tokens that lie on this rank."""

    def visit(self, group: int, end: EndOfStep | None = None) -> int:
        """On rank 0: see ``PromptStream.visit``. Without ``end``: what was said last."""

    def prompt(self, group: int, visit: int) -> Prompt: ...

    def sampling(self, step: int, prompt: Prompt, version: int) -> Sampling:
        """``step``: counted from 1."""

    def demonstration(self, prompt: Prompt, response: int) -> Completion | None:
        """A response that the prompt brings along."""

    def wants(self, scores: Sequence[Score]) -> bool:
        """Whether a group with these scores is trained on."""

    def forget(self, groups: Iterable[int]) -> None:
        """On rank 0: no step needs these groups any more."""


@dataclass(frozen=True)
class TrainingJob:
    """The steps of a run. ``verdicts``: what becomes of responses without one."""

    rules: StepRules
    stream: PromptStream
    plan: SamplingPlan
    wants_group: Callable[[Sequence[bool]], bool]
    verdicts: VerdictRules
    demonstrations: Demonstrations | None = None
    store: ResponseStore = field(default_factory=ResponseStore)

    @property
    def is_partial(self) -> bool:
        """Whether a response may continue in the next step."""
        return isinstance(self.rules, PartialRules)

    def visit(self, group: int, end: EndOfStep | None = None) -> int:
        return self.stream.visit(group, None if end is None else end.admission(group))

    def prompt(self, group: int, visit: int) -> Prompt:
        return self.stream.prompt(group, visit)

    def sampling(self, step: int, prompt: Prompt, version: int) -> Sampling:
        return self.plan(step, prompt, version)

    def demonstration(self, prompt: Prompt, response: int) -> Completion | None:
        known = self.demonstrations
        return None if known is None else known.get(prompt, response)

    def wants(self, scores: Sequence[Score]) -> bool:
        return self.wants_group([score.correct for score in scores if score.problem is None])

    def forget(self, groups: Iterable[int]) -> None:
        self.store.forget(groups)
        self.stream.forget_visits(groups)


@dataclass(frozen=True)
class PromptsJob:
    """All responses to some prompts, sampled by one rule."""

    prompts: Sequence[Prompt]
    how: Sampling
    demonstrations: Demonstrations | None = None
    store: ResponseStore = field(default_factory=ResponseStore)

    @property
    def rules(self) -> Rules:
        return Rules(len(self.prompts), self.how.num_responses)

    def visit(self, group: int, end: EndOfStep | None = None) -> int:
        return 1

    def prompt(self, group: int, visit: int) -> Prompt:
        return self.prompts[group]

    def sampling(self, step: int, prompt: Prompt, version: int) -> Sampling:
        return self.how

    def demonstration(self, prompt: Prompt, response: int) -> Completion | None:
        known = self.demonstrations
        return None if known is None else known.get(prompt, response)

    def wants(self, scores: Sequence[Score]) -> bool:
        return True

    def forget(self, groups: Iterable[int]) -> None:
        raise AssertionError("every prompt is answered")
