"""The tokens of responses that no step has trained, on the rank that has them."""

from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_rl.models.experts import NOT_GIVEN, filled_in
from megatron_rl.passes import EXPERTS
from megatron_rl.rollouts.environments.outcomes import Outcome
from megatron_rl.scheduling.end_of_step import StepGroups
from megatron_rl.types import (
    APPENDED,
    DEMONSTRATED,
    PLACES,
    Completion,
    Score,
    VersionSpan,
)

Place = tuple[int, int]  # a group and a response of it
Carried = list[tuple[Place, Completion]]


class ResponseStore:
    """Completions by group and response: those from earlier steps, and those of this step.

    Where responses continue in the next step and ranks have engines, the former are equal on every
    rank, so that any replica can continue any response and a checkpoint is asked of no other rank.
    That takes 8 bytes of host memory a token.
    """

    def __init__(self) -> None:
        self._held: dict[Place, Completion] = {}
        self._new: dict[Place, Completion] = {}

    def held(self, place: Place) -> Completion | None:
        """What a response had at the start of the step."""
        return self._held.get(place)

    def length(self, place: Place) -> int:
        there = self.held(place)
        return 0 if there is None else len(there.token_ids)

    def put(self, place: Place, whole: Completion) -> None:
        """``whole``: what was held of a response, and what it has got since."""
        self._new[place] = whole

    def get(self, place: Place) -> Completion | None:
        return self._new.get(place) or self._held.get(place)

    def forget(self, groups: Iterable[int]) -> None:
        """Nothing of these groups is needed any more."""
        gone = set(groups)
        for of_time in (self._held, self._new):
            for place in [place for place in of_time if place[0] in gone]:
                del of_time[place]

    def unfinished(self, groups: StepGroups, ended: Container[Place]) -> Carried:
        """New responses of the groups that stay open, for the next step to begin with: cut to the
        ``limits`` of the step, but whole where they have ``ended`` within them."""
        found = []
        stays = groups.open
        for place, completion in self._new.items():
            if place[0] in stays:
                if place not in ended:
                    completion = cut(completion, self.length(place) + groups.limits[place[0]])
                if completion.token_ids:
                    found.append((place, completion))
        return found

    def begin_step(self, carried: Carried) -> int:
        """From now on these responses, ended or paused, count as from an earlier step. Returns how
        many of their tokens were sampled since the last step began."""
        num_sampled = 0
        for place, completion in carried:
            if completion.weight_version != DEMONSTRATED:
                there = self.held(place)
                num_sampled += completion.num_sampled - (there.num_sampled if there else 0)
            self._held[place] = completion
            self._new.pop(place, None)
        return num_sampled

    def clear_new(self) -> None:
        """Drops the completions of this step that no later step needs."""
        self._new = {}

    @property
    def num_tokens(self) -> int:
        """Tokens from earlier steps."""
        return sum(len(completion.token_ids) for completion in self._held.values())

    def state(self) -> dict[str, Any]:
        """For a checkpoint: tensors and plain values."""
        return {"held": _saved(self._held), "new": _saved(self._new)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._held = _restored(state["held"])
        self._new = _restored(state["new"])

    def places(self) -> list[tuple[Place, Completion, bool]]:
        """All completions, and whether each is from an earlier step."""
        held = [(place, one, True) for place, one in self._held.items() if place not in self._new]
        return [*held, *((place, one, False) for place, one in self._new.items())]


def joined(first: Completion | None, more: Completion) -> Completion:
    """A response with what it has got since ``first``.

    Example: two tokens of version 3 and one of version 4 have the spans
    ``(VersionSpan(3, end=2), VersionSpan(4, end=3))``.
    """
    if first is None:
        return more
    if not more.token_ids:
        return replace(first, truncated=more.truncated)
    experts = more.experts  # includes those of ``first``, which the engine has computed again
    if experts is not None and first.experts is not None:
        experts = filled_in(first.experts, experts)
    behind = len(first.token_ids)
    places: dict[str, Any] = {
        name: array(typecode, getattr(first, name) or ()) + array(typecode, values)
        for name, (typecode, _) in PLACES.items()
        if (values := getattr(more, name)) is not None
    }
    later = [VersionSpan(span.version, behind + span.end) for span in more.spans]
    return Completion(
        array("i", first.token_ids) + array("i", more.token_ids),
        array("f", first.sampler_logprobs) + array("f", more.sampler_logprobs),
        more.truncated,
        first.weight_version,
        (*first.spans, *later),
        experts=experts,
        **places,
    )


def cut(completion: Completion, length: int) -> Completion:
    """Its first tokens, as of a response that has not ended; appended tokens of an environment are
    kept all or not at all. Example: of 5 tokens of version 3 and 2 of version 4, cut to 6, the
    spans are ``(VersionSpan(3, 5), VersionSpan(4, 6))``."""
    ends = [0, *(span.end for span in completion.spans)]
    for span, start in zip(completion.spans, ends, strict=False):
        if span.version == APPENDED and start < length < span.end:
            length = start
    spans = tuple(
        VersionSpan(span.version, min(span.end, length))
        for span, start in zip(completion.spans, ends, strict=False)
        if start < length
    )
    experts = completion.experts
    if experts is not None:
        # The last token has none: the forward that continues from it computes its experts.
        experts = experts[: len(experts) - len(completion.token_ids) + length].copy()
        experts[-1:] = NOT_GIVEN
    return Completion(
        completion.token_ids[:length],
        completion.sampler_logprobs[:length],
        False,
        completion.weight_version,
        spans,
        experts=experts,
    )


def _saved(completions: Mapping[Place, Completion]) -> list[dict[str, Any]]:
    """For a checkpoint: tensors and plain values."""
    return [
        {
            "group": group,
            "response": response,
            "token_ids": torch.tensor(one.token_ids, dtype=torch.int32),
            "sampler_logprobs": torch.tensor(one.sampler_logprobs, dtype=torch.float32),
            "truncated": one.truncated,
            "weight_version": one.weight_version,
            "spans": [list(span) for span in one.spans],
            **{
                name: torch.from_numpy(np.array(values))
                for name in PLACES
                if (values := getattr(one, name)) is not None
            },
            **({} if one.experts is None else {EXPERTS: torch.from_numpy(one.experts)}),
        }
        for (group, response), one in sorted(completions.items(), key=lambda pair: pair[0])
    ]


def _restored(saved: Sequence[Mapping[str, Any]]) -> dict[Place, Completion]:
    return {
        (one["group"], one["response"]): Completion(
            array("i", one["token_ids"].tolist()),
            array("f", one["sampler_logprobs"].tolist()),
            one["truncated"],
            one["weight_version"],
            tuple(VersionSpan(*span) for span in one["spans"]),
            **{name: one[name].tolist() for name in PLACES if name in one},
            experts=one[EXPERTS].numpy() if EXPERTS in one else None,
        )
        for one in saved
    }


def saved_score(score: Score) -> dict[str, Any]:
    """For a checkpoint: plain values, from which ``Score(**values)`` makes it again."""
    values = {**vars(score), "parts": dict(score.parts)}
    facts = dict(values.pop("environment"))
    return {**values, "environment": facts} if facts else values


def saved_outcome(outcome: Outcome) -> dict[str, Any]:
    """The same of a response that has ended, for ``restored_outcome``."""
    score = None if outcome.score is None else saved_score(outcome.score)
    return {"truncated": outcome.truncated, "score": score, "facts": dict(outcome.facts)}


def restored_outcome(saved: Mapping[str, Any]) -> Outcome:
    score = None if saved["score"] is None else Score(**saved["score"])
    return Outcome((), saved["truncated"], score, saved["facts"])
