"""Stand-ins for a rollout engine whose responses are a function of the prompt and their number."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.protocols import NOTHING
from megatron_rl.types import Completion, Prompt, Sampling


class Answering:
    """One response ends in each ``poll``, in the order they were begun. Subclasses say what it is.

    ``begun``: prompts and numbers of all responses so far.
    """

    replica = 0
    num_replicas = 1
    weight_version = 0
    capacity = 1000

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self._open: deque[tuple[int, Completion]] = deque()

    def response(self, prompt: Prompt, sampling: Sampling, number: int) -> Completion:
        raise NotImplementedError

    def submit(
        self,
        prompt: Prompt,
        responses: Sequence[int],
        sampling: Sampling,
        so_far: Mapping[int, Sequence[int]] = NOTHING,
    ) -> list[int]:
        assert not so_far
        request_ids = []
        for number in responses:
            request_ids.append(len(self.begun))
            self.begun.append((prompt.uid, number))
            self._open.append((request_ids[-1], self.response(prompt, sampling, number)))
        return request_ids

    def poll(self) -> list[tuple[int, Completion]]:
        return [self._open.popleft()] if self._open else []

    def abort(self, request_ids: Sequence[int]) -> int:
        dropped = [entry for entry in self._open if entry[0] in set(request_ids)]
        for entry in dropped:
            self._open.remove(entry)
        return sum(len(completion.token_ids) for _, completion in dropped)

    def running_lengths(self) -> dict[int, int]:
        return {request_id: len(completion.token_ids) for request_id, completion in self._open}


END = 1000  # the last token of a response, or of a turn


class Stepwise:
    """Each ``poll`` gives some tokens to every open response, more or fewer by its mood; what they
    are, and whether one is the last, follows from ``token`` alone."""

    replica = 0
    num_replicas = 1
    weight_version = 0
    capacity = 1000

    def __init__(self, mood: int = 0) -> None:
        self.mood = random.Random(mood)
        self.num_begun = 0
        self._open: dict[int, Growing] = {}

    def token(self, response: Growing) -> tuple[int, float, bool]:
        """Id, logprob, and whether it ends the response. ``new`` has those before it."""
        draw = random.Random(
            f"{response.sampling.seed}/{response.prompt.uid}/{response.number}/"
            f"{response.so_far}/{len(response.new)}/{self.weight_version}"
        )
        number = int(re.findall(r"\d+", response.prompt.uid)[0])
        is_last = draw.random() < 0.04 * (1 + number % 4)
        token_id = draw.randrange(END)
        return END if is_last else token_id, -draw.random(), is_last

    def submit(
        self,
        prompt: Prompt,
        responses: Sequence[int],
        sampling: Sampling,
        so_far: Mapping[int, Sequence[int]] = NOTHING,
    ) -> list[int]:
        first = self.num_begun
        for number in responses:
            there = list(so_far.get(number, ()))
            self._open[self.num_begun] = Growing(prompt, sampling, number, there)
            self.num_begun += 1
        return list(range(first, self.num_begun))

    def poll(self) -> list[tuple[int, Completion]]:
        ended = []
        for request_id, response in list(self._open.items()):
            for _ in range(self.mood.randrange(9)):
                if is_last := self.grow(response):
                    completion = response.completion(self.weight_version, is_last == "length")
                    ended.append((request_id, completion))
                    del self._open[request_id]
                    break
        self.mood.shuffle(ended)
        return ended

    def grow(self, response: Growing) -> str:
        """One token more; why it is the last: "stop" or "length", else ""."""
        token_id, logprob, is_last = self.token(response)
        response.new.append((token_id, logprob))
        if is_last:
            return "stop"
        length = len(response.so_far) + len(response.new)
        return "length" if length == response.sampling.max_response_tokens else ""

    def pause(self, request_ids: Sequence[int]) -> list[Completion]:
        paused = [self._open.pop(request_id) for request_id in request_ids]
        return [response.completion(self.weight_version, False) for response in paused]

    def abort(self, request_ids: Sequence[int]) -> int:
        return sum(len(self._open.pop(request_id).new) for request_id in request_ids)

    def running_lengths(self) -> dict[int, int]:
        return {request_id: len(response.new) for request_id, response in self._open.items()}


@dataclass
class Growing:
    """A response of ``Stepwise``: what it had, and what it has got."""

    prompt: Prompt
    sampling: Sampling
    number: int
    so_far: list[int]
    new: list[tuple[int, float]] = field(default_factory=list)

    def completion(self, version: int, truncated: bool) -> Completion:
        ids = [token_id for token_id, _ in self.new]
        return Completion(ids, [logprob for _, logprob in self.new], truncated, version)
