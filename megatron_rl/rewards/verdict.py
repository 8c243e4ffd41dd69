"""What a verifier says, and what a verifier is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megatron_rl.types import Prompt


@dataclass(frozen=True)
class Verdict:
    """Accuracy of one answer, in [0, 1]. ``problem`` says why the verifier itself could not judge; accuracy is 0 then.

    Example: ``Verdict(1.0)``; ``Verdict(0.0, "ValueError: not a number")``.
    """

    accuracy: float
    problem: str | None = None


@runtime_checkable
class Verifier(Protocol):
    """Answers in, verdicts out; deterministic. ``answers`` are texts already cut out of the responses."""

    def check(self, prompts: Sequence[Prompt]) -> list[str]:
        """What makes these prompts impossible to verify, one sentence each; empty when nothing does."""

    def verify(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[Verdict]: ...
