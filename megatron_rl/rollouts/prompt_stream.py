"""The prompts of a run by their number, and what was answered to those that are under way."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_rl.data.loader import PromptLoader, WeightedLoader, numbered
from megatron_rl.types import Completion, Prompt, Score, VersionSpan


class PromptStream:
    """The prompts of a run by their number in the stream, equal on every rank that has an equal
    loader; drawn as they are asked for."""

    def __init__(self, loader: PromptLoader | WeightedLoader) -> None:
        self._loader = loader
        self._prompts: dict[int, Prompt] = {}
        self._before: dict[int, dict[str, Any]] = {}  # where the loader was before each of them
        # As a step has them: each is asked for once a response.
        self._distinct: dict[tuple[int, int], Prompt] = {}
        self._next = 0

    def of_step(self, start: int, number: int) -> Prompt:
        """Prompt ``number`` for a step whose first one is ``start``. One that comes again in a step
        has another uid there: requests are told apart by it."""
        while self._next <= number:
            self._before[self._next] = self._loader.state()
            (self._prompts[self._next],) = self._loader.take(1)
            self._next += 1
        if (start, number) not in self._distinct:
            prompt = self._prompts[number]
            before = range(start, number)
            count = 1 + sum(self._prompts[other].uid == prompt.uid for other in before)
            self._distinct[start, number] = numbered(prompt, count)
        return self._distinct[start, number]

    def forget_below(self, number: int) -> None:
        """No prompt before this one is asked for again."""
        for old in [old for old in self._prompts if old < number]:
            del self._prompts[old], self._before[old]
        for place in [place for place in self._distinct if place[1] < number]:
            del self._distinct[place]

    def state(self) -> dict[str, Any]:
        """Where the first prompt lies that may still be asked for."""
        first = min(self._prompts, default=self._next)
        return {"number": first, "loader": self._before.get(first, self._loader.state())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError when the state belongs to other prompts."""
        self._loader.restore(state["loader"])
        self._prompts = {}
        self._before = {}
        self._distinct = {}
        self._next = state["number"]


@dataclass(frozen=True)
class FinishedGroup:
    """One prompt and all that was answered to it, in the order of responses."""

    prompt: Prompt
    completions: Sequence[Completion]
    scores: Sequence[Score]


@dataclass
class OpenGroup:
    """What of a group is there, for the step it is admitted to: ``completions`` by number of the
    response."""

    prompt: Prompt
    step: int
    completions: dict[int, Completion] = field(default_factory=dict)
    scores: Sequence[Score] | None = None

    def in_order(self) -> list[Completion]:
        return [self.completions[response] for response in sorted(self.completions)]

    def finished(self) -> FinishedGroup:
        assert self.scores is not None, "a group that was accepted has its verdicts"
        return FinishedGroup(self.prompt, self.in_order(), self.scores)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: tensors and plain values."""
        completions = {number: saved_completion(one) for number, one in self.completions.items()}
        scores = None
        if self.scores is not None:
            scores = [saved_score(one) for one in self.scores]
        return {"completions": completions, "scores": scores}

    @classmethod
    def restored(cls, prompt: Prompt, step: int, state: Mapping[str, Any]) -> OpenGroup:
        """The inverse of ``state``, which keeps neither prompt nor step."""
        completions = {
            number: restored_completion(one) for number, one in state["completions"].items()
        }
        scores = state["scores"]
        if scores is not None:
            scores = [restored_score(one) for one in scores]
        return cls(prompt, step, completions, scores)


def saved_completion(completion: Completion) -> dict[str, Any]:
    """For a checkpoint: tensors and plain values."""
    return {
        "token_ids": torch.tensor(completion.token_ids, dtype=torch.int32),
        "sampler_logprobs": torch.tensor(completion.sampler_logprobs, dtype=torch.float32),
        "truncated": completion.truncated,
        "weight_version": completion.weight_version,
        "spans": [list(span) for span in completion.spans],
    }


def restored_completion(state: Mapping[str, Any]) -> Completion:
    """The inverse of ``saved_completion``."""
    return Completion(
        array("i", state["token_ids"].tolist()),
        array("f", state["sampler_logprobs"].tolist()),
        state["truncated"],
        state["weight_version"],
        tuple(VersionSpan(*span) for span in state["spans"]),
    )


def saved_score(score: Score) -> dict[str, Any]:
    """For a checkpoint: plain values."""
    return {**vars(score), "parts": dict(score.parts)}


def restored_score(state: Mapping[str, Any]) -> Score:
    """The inverse of ``saved_score``."""
    return Score(**state)
