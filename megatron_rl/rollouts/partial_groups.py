"""Groups of partial rollouts that no step has trained: what each response has so far.

Equal on every rank, so that any replica can go on with any response and a checkpoint is asked of
no other rank. That takes 8 bytes of host memory a token; at most as many groups are kept from one
step to the next as a step trains.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatron_rl.data.loader import PromptLoader, WeightedLoader, numbered
from megatron_rl.rollouts.prompt_stream import (
    PromptStream,
    restored_completion,
    restored_score,
    saved_completion,
    saved_score,
)
from megatron_rl.scheduling.partial import OpenGroup, PartialRules, PartialScheduler
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Prompt, Score, VersionSpan


class Answer(NamedTuple):
    """What a response has. ``score``: None while it has not ended."""

    completion: Completion
    score: Score | None


@dataclass
class PartialGroup:
    """``answers``: by number of the response, of those that have a token."""

    prompt: Prompt
    first_step: int
    answers: dict[int, Answer] = field(default_factory=dict)


class PartialGroups:
    """The open groups by their number in the stream of prompts; steps are counted from 1."""

    def __init__(self, loader: PromptLoader | WeightedLoader, rules: PartialRules) -> None:
        self.rules = rules
        self._stream = PromptStream(loader)
        self._open: dict[int, PartialGroup] = {}
        self._next = 0

    def __getitem__(self, number: int) -> PartialGroup:
        return self._open[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._open)

    def admit(self, step: int) -> None:
        """Fills up with the next prompts. One that is open already gets another uid: requests are
        told apart by it."""
        uids = {group.prompt.uid for group in self._open.values()}
        while len(self._open) < self.rules.groups_in_flight:
            prompt = self._drawn(self._next)
            count = 1
            while numbered(prompt, count).uid in uids:
                count += 1
            prompt = numbered(prompt, count)
            uids.add(prompt.uid)
            self._open[self._next] = PartialGroup(prompt, step)
            self._next += 1

    def scheduler(self, step: int) -> PartialScheduler:
        """For the groups that are open in ``step``."""
        groups = {}
        for number, group in self._open.items():
            ended = {each: 0 for each, answer in group.answers.items() if answer.score is not None}
            groups[number] = OpenGroup(group.first_step, ended)
        return PartialScheduler(self.rules, step=step, groups=groups)

    def so_far(self, request: Request) -> Completion | None:
        """What a response had at the start of the step."""
        answer = self._open[request.group].answers.get(request.response)
        return None if answer is None else answer.completion

    def length(self, request: Request) -> int:
        """Tokens of the same."""
        there = self.so_far(request)
        return 0 if there is None else len(there.token_ids)

    def close(self, number: int) -> PartialGroup:
        """A group that is trained leaves."""
        group = self._open.pop(number)
        self._stream.forget_below(min(self._open, default=self._next))
        return group

    def note(self, number: int, response: int, answer: Answer) -> None:
        """What a response has at the end of a step."""
        if len(answer.completion.token_ids) or answer.score is not None:
            self._open[number].answers[response] = answer

    @property
    def num_tokens(self) -> int:
        """Of all that is open."""
        total = 0
        for group in self._open.values():
            total += sum(len(answer.completion.token_ids) for answer in group.answers.values())
        return total

    def _drawn(self, number: int) -> Prompt:
        return self._stream.of_step(number, number)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: tensors and plain values."""
        groups = {}
        for number, group in self._open.items():
            answers = {
                each: {
                    "completion": saved_completion(answer.completion),
                    "score": None if answer.score is None else saved_score(answer.score),
                }
                for each, answer in group.answers.items()
            }
            groups[number] = {
                "uid": group.prompt.uid,
                "first_step": group.first_step,
                "answers": answers,
            }
        return {"stream": self._stream.state(), "next": self._next, "open_groups": groups}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where the state belongs to other prompts or rules."""
        if "open_groups" not in state:
            raise ValueError(
                "resume: the checkpoint is of a run without source.partial; go on with the source"
                " of that run, or start with resume=never in a new run_dir"
            )
        saved = state["open_groups"]
        most = self.rules.groups_in_flight
        if len(saved) > most:
            raise ValueError(
                f"resume: the checkpoint has {len(saved)} groups that are begun,"
                f" source.partial.groups_in_flight is {most}; resume with as many as before"
            )
        self._stream.restore(state["stream"])
        self._next = state["next"]
        self._open = {}
        for number in sorted(saved):
            group = saved[number]
            prompt = replace(self._drawn(number), uid=group["uid"])
            self._open[number] = PartialGroup(prompt, group["first_step"])
            for each, answer in group["answers"].items():
                score = None if answer["score"] is None else restored_score(answer["score"])
                completion = restored_completion(answer["completion"])
                self._open[number].answers[each] = Answer(completion, score)


def joined(first: Completion | None, more: Completion) -> Completion:
    """What a response had, and what it has got since.

    Example: two tokens of version 3 and one of version 4 have the spans
    ``(VersionSpan(3, end=2), VersionSpan(4, end=3))``.
    """
    if first is None:
        return more
    if not more.token_ids:
        return replace(first, truncated=more.truncated)
    behind = len(first.token_ids)
    later = [VersionSpan(span.version, behind + span.end) for span in more.spans]
    return Completion(
        array("i", first.token_ids) + array("i", more.token_ids),
        array("f", first.sampler_logprobs) + array("f", more.sampler_logprobs),
        more.truncated,
        first.weight_version,
        (*first.spans, *later),
    )


def cut(completion: Completion, length: int) -> Completion:
    """Its first tokens, as of a response that has not ended. Example: of 5 tokens of version 3 and
    2 of version 4, cut to 6, the spans are ``(VersionSpan(3, 5), VersionSpan(4, 6))``."""
    ends = [0, *(span.end for span in completion.spans)]
    spans = tuple(
        VersionSpan(span.version, min(span.end, length))
        for span, start in zip(completion.spans, ends, strict=False)
        if start < length
    )
    return Completion(
        completion.token_ids[:length],
        completion.sampler_logprobs[:length],
        False,
        completion.weight_version,
        spans,
    )
