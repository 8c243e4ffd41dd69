"""What an environment makes of a response that has ended a turn, and the tokens of its turns."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_rl.models.experts import not_given
from megatron_rl.types import APPENDED, PLACES, Completion, Score, VersionSpan


class Outcome(NamedTuple):
    """What becomes of a response.

    Attributes:
        tokens: Appended to it; it then continues. Empty: it has ended.
        truncated: A limit has ended it (of turns, tokens or seconds).
        score: By the environment; None: the reward of the run judges it.
        facts: Of a response that has ended, for the metrics ``environment/``.
    """

    tokens: Sequence[int] = ()
    truncated: bool = False
    score: Score | None = None
    facts: Mapping[str, float] = {}

    @property
    def is_over(self) -> bool:
        return not self.tokens


def appended(completion: Completion, tokens: Sequence[int]) -> Completion:
    """``completion`` with tokens behind it that were not sampled; it has not ended.

    Example: one sampled token of version 4 and two appended have the spans ``((4, 1), (APPENDED,
    3))``.
    """
    length = len(completion.token_ids)
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
        experts=experts,
        **places,
    )


def turns_of(completion: Completion) -> list[Sequence[int]]:
    """The sampled tokens of each turn.

    Example: of tokens 5 6 7 8 with the spans ``((3, 1), (4, 2), (APPENDED, 3), (4, 4))`` they are
    5 6 and 8; one that ends with what was appended has an empty last turn.
    """
    turns: list[Sequence[int]] = []
    begin = end = 0
    for span in completion.spans:
        if span.version == APPENDED:
            turns.append(completion.token_ids[begin:end])
            begin = span.end
        end = span.end
    return [*turns, completion.token_ids[begin:]]


def last_turn(completion: Completion) -> list[int]:
    return list(turns_of(completion)[-1])
