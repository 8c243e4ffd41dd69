"""Responses that come with a prompt, in its ``extra.given_responses``.

They take the first places of the prompt's group, and the engine samples the others. From there on
they are responses like all: judged, packed and scored by the policy. What nobody knows is how
likely their tokens were where they come from, so their sampler logprobs mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.protocols import NOTHING, Answers
from megatron_rl.types import Completion, Prompt, Sampling

KEY = "given_responses"
VERSION = -2  # in place of the weights that sampled a response
Encode = Callable[[str], Sequence[int]]


def encoder(encode: Encode, end: Sequence[int]) -> Encode:
    """From the text of a response to its tokens, the first of ``end`` behind them."""
    return lambda text: [*encode(text), *end[:1]]


def check_given(
    prompts: Iterable[Prompt], encode: Encode, num_responses: int, max_response_tokens: int
) -> None:
    """Raises ValueError where no prompt carries responses, or one carries what is none, too many
    or too long ones."""
    some = False
    for prompt in prompts:
        given = prompt.extra.get(KEY)
        if given is None:
            continue
        some = True
        if not _is_given(given):
            raise ValueError(
                f"prompt {prompt.uid}: extra.{KEY} = {given!r:.80}; give a list of texts, or of"
                " lists of token ids, none of them empty"
            )
        if len(given) > num_responses:
            raise ValueError(
                f"prompt {prompt.uid}: extra.{KEY} has {len(given)} responses, but a group has"
                f" {num_responses} (batch.responses_per_prompt); give at most so many"
            )
        longest = max(len(ids) for ids in _token_ids(given, encode))
        if longest > max_response_tokens:
            raise ValueError(
                f"prompt {prompt.uid}: a response of extra.{KEY} has {longest} tokens, and"
                f" rollout.max_response_tokens is {max_response_tokens}; drop it, or raise that"
            )
    if not some:
        raise ValueError(
            f"no prompt has extra.{KEY}, which the method trains on; add them to the data, or"
            " choose another method"
        )


def without_given(prompt: Prompt) -> Prompt:
    """To be answered by the engine alone."""
    extra = {key: value for key, value in prompt.extra.items() if key != KEY}
    return replace(prompt, extra=extra)


class GivenFirst:
    """An engine that answers with the responses a prompt carries where it has any."""

    def __init__(self, engine: Answers, encode: Encode) -> None:
        self._engine = engine
        self._encode = encode
        self._given: dict[int, Completion] = {}  # by request_id, below 0, of what is to end
        self._sampled: set[int] = set()
        self._next = -1

    @property
    def replica(self) -> int:
        return self._engine.replica

    @property
    def num_replicas(self) -> int:
        return self._engine.num_replicas

    @property
    def capacity(self) -> int:
        return self._engine.capacity

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    def submit(
        self,
        prompt: Prompt,
        responses: Sequence[int],
        sampling: Sampling,
        so_far: Mapping[int, Sequence[int]] = NOTHING,
    ) -> list[int]:
        """See protocols.Answers."""
        given = _token_ids(prompt.extra.get(KEY) or (), self._encode)
        others = [number for number in responses if number >= len(given)]
        sampled = self._engine.submit(prompt, others, sampling, so_far) if others else []
        self._sampled.update(sampled)
        request_ids = dict(zip(others, sampled, strict=True))
        for number in responses:
            if number < len(given):
                ids = given[number]
                request_ids[number] = self._next
                self._given[self._next] = Completion(ids, [0.0] * len(ids), False, VERSION)
                self._next -= 1
        return [request_ids[number] for number in responses]

    def poll(self) -> list[tuple[int, Completion]]:
        """See protocols.Answers."""
        ended = list(self._given.items())
        self._given = {}
        if self._sampled:
            of_engine = self._engine.poll()
            self._sampled -= {request_id for request_id, _ in of_engine}
            ended += of_engine
        return ended

    def abort(self, request_ids: Sequence[int]) -> int:
        """See protocols.Answers. A given response takes no sampling, so none is thrown away."""
        for request_id in request_ids:
            self._given.pop(request_id, None)
        stopped = [request_id for request_id in request_ids if request_id in self._sampled]
        self._sampled -= set(stopped)
        return self._engine.abort(stopped)

    def pause(self, request_ids: Sequence[int]) -> list[Completion]:
        """See protocols.Answers. Only what the engine samples can be open."""
        self._sampled -= set(request_ids)
        return self._engine.pause(request_ids)

    def running_lengths(self) -> dict[int, int]:
        """See protocols.Answers."""
        return self._engine.running_lengths()


def _is_given(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and all(map(_is_response, given))


def _is_response(response: Any) -> bool:
    if isinstance(response, str):
        return bool(response)
    if not isinstance(response, list | tuple) or not response:
        return False
    return all(type(token) is int and token >= 0 for token in response)


def _token_ids(given: Sequence[Any], encode: Encode) -> list[list[int]]:
    """Token ids are taken as they are."""
    return [list(encode(each) if isinstance(each, str) else each) for each in given]
