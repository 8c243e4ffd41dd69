"""Stand-ins for a rollout engine whose responses are a function of the prompt and their number."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

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

    def submit(self, prompt: Prompt, responses: Sequence[int], sampling: Sampling) -> list[int]:
        tickets = []
        for number in responses:
            tickets.append(len(self.begun))
            self.begun.append((prompt.uid, number))
            self._open.append((tickets[-1], self.response(prompt, sampling, number)))
        return tickets

    def poll(self) -> list[tuple[int, Completion]]:
        return [self._open.popleft()] if self._open else []

    def abort(self, tickets: Sequence[int]) -> int:
        dropped = [entry for entry in self._open if entry[0] in set(tickets)]
        for entry in dropped:
            self._open.remove(entry)
        return sum(len(completion.token_ids) for _, completion in dropped)

    def running_lengths(self) -> list[int]:
        return [len(completion.token_ids) for _, completion in self._open]
