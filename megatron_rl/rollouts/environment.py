"""What answers a response: the seat of several turns.

A response is sampled until its engine ends it. Then its environment is asked: it ends the response,
or appends tokens behind which the engine continues. What it appends was sampled by no weights, so
it is marked in ``Completion.sampled`` and counts in no loss, mean or check.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from megatron_rl.models.experts import not_given
from megatron_rl.types import PLACES, Completion, Prompt, VersionSpan

APPENDED = -3  # in place of the version of the weights that sampled a token


class Environment(Protocol):
    """One response to one prompt; deterministic, so that a request may be answered again."""

    def start(self, prompt: Prompt, seed: int) -> None:
        """Before the first turn."""

    def step(self, tokens: Sequence[int], seed: int) -> Sequence[int] | None:
        """``tokens``: all of the response so far, which its engine has ended; returns what is to be
        appended, or None where the response is complete. ``seed``: of this turn."""


class SingleTurn:
    """The default: a response is complete when its engine ends it."""

    def start(self, prompt: Prompt, seed: int) -> None:
        """There is nothing to prepare."""

    def step(self, tokens: Sequence[int], seed: int) -> None:
        return None


def appended(completion: Completion, tokens: Sequence[int]) -> Completion:
    """``completion`` with tokens behind it that were not sampled; it has not ended.

    Example: one sampled token and two appended have ``sampled`` (True, False, False).
    """
    length = len(completion.token_ids)
    sampled = [True] * length if completion.sampled is None else list(completion.sampled)
    places = {}
    for name, (typecode, free) in PLACES.items():  # free for what was not drawn
        values = getattr(completion, name)
        if values is not None and length:
            added = array(typecode, [free]) * (len(values) // length * len(tokens))
            places[name] = array(typecode, values) + added
    experts = completion.experts
    if experts is not None:
        experts = np.concatenate([experts, not_given(len(tokens), experts.shape[1])])
    return replace(
        completion,
        token_ids=array("i", completion.token_ids) + array("i", tokens),
        sampler_logprobs=array("f", completion.sampler_logprobs) + array("f", [0.0] * len(tokens)),
        truncated=False,
        spans=(*completion.spans, VersionSpan(APPENDED, length + len(tokens))),
        sampled=[*sampled, *([False] * len(tokens))],
        experts=experts,
        **places,
    )
