"""Replicas of a rollout engine as a formula.

Between two events a replica's sequences stay the same, so n decoding steps take the sum of an
arithmetic series.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from megatron_rl.scheduling.work import Request


@dataclass(frozen=True)
class DecodeStep:
    """Seconds of a decoding step of a replica: ``step_s``, ``sequence_s`` for each sequence and
    ``token_s`` for each token in the cache. ``prompt_tokens``: of every sequence, there from its
    start; ``resumed_s``: for each token that a response has when it continues, computed again.

    Example: ``DecodeStep(step_s=7e-3, sequence_s=2e-5, token_s=17e-9)``.
    """

    step_s: float
    sequence_s: float = 0.0
    token_s: float = 0.0
    prompt_tokens: int = 0
    resumed_s: float = 0.0


@dataclass
class Replica:
    """``steps``: made so far; a request that was begun at step a with n tokens to come ends at step
    a + n."""

    step: DecodeStep
    now_s: float = 0.0
    busy_s: float = 0.0  # with at least one sequence
    steps: float = 0.0
    context: float = 0.0  # tokens in the cache
    ends: dict[Request, float] = field(default_factory=dict)  # step at which a response ends
    begins: dict[Request, float] = field(default_factory=dict)
    held: dict[Request, int] = field(default_factory=dict)  # tokens in the cache at that step
    # A heap of ``ends``, and of some that are over by now: the least of a thousand, often.
    due: list[tuple[float, Request]] = field(default_factory=list)

    def seconds(self, steps: float) -> float:
        """Of so many further steps."""
        num = len(self.ends)
        of_steps = steps * (self.step.step_s + self.step.sequence_s * num)
        # The first step reads ``context`` tokens, each further one ``num`` more.
        return of_steps + self.step.token_s * steps * (self.context + num * (steps - 1) / 2)

    def steps_in(self, seconds: float) -> float:
        """The inverse of ``seconds``."""
        num = len(self.ends)
        linear = self.step.step_s + self.step.sequence_s * num
        linear += self.step.token_s * (self.context - num / 2)
        square = self.step.token_s * num / 2
        root = math.sqrt(linear * linear + 4 * square * seconds)
        return 2 * seconds / (linear + root)

    def advance(self, now_s: float) -> None:
        """To this moment, which is not after the next end."""
        if now_s <= self.now_s:
            return  # it is still computing what was resumed
        if self.ends:
            steps = self.steps_in(now_s - self.now_s)
            self.steps += steps
            self.context += steps * len(self.ends)
            self.busy_s += now_s - self.now_s
        self.now_s = now_s

    def begin(self, request: Request, num_tokens: int, num_there: int = 0) -> None:
        """``num_tokens``: to come; ``num_there``: sampled before, in an earlier step of the run."""
        again_s = num_there * self.step.resumed_s
        self.busy_s += again_s
        self.now_s += again_s
        self.held[request] = self.step.prompt_tokens + num_there
        self.context += self.held[request]
        self.begins[request] = self.steps
        self.ends[request] = self.steps + num_tokens
        heapq.heappush(self.due, (self.ends[request], request))

    def limit(self, num_tokens: float) -> None:
        """Responses end after so many tokens, those that have more at once."""
        for request, begin in self.begins.items():
            self.ends[request] = min(self.ends[request], begin + num_tokens)
        self.due = [(step, request) for request, step in self.ends.items()]
        heapq.heapify(self.due)

    def end(self, request: Request) -> float:
        """Ends a response, now; returns the tokens that it has."""
        del self.ends[request]
        length = self.steps - self.begins.pop(request)
        left = self.held.pop(request) + length
        self.context = self.context - left if self.ends else 0.0  # without what rounding leaves
        return length

    def next_end(self) -> tuple[float, Request] | None:
        """The moment at which the next response ends, and which."""
        while self.due and self.ends.get(self.due[0][1]) != self.due[0][0]:
            heapq.heappop(self.due)
        if not self.due:
            return None
        step, request = self.due[0]
        return self.now_s + self.seconds(max(0.0, step - self.steps)), request


class Fleet:
    """Several replicas and their next events."""

    def __init__(self, num_replicas: int, step: DecodeStep) -> None:
        self.replicas = [Replica(step) for _ in range(num_replicas)]
        self.now_s = 0.0
        self._due: list[tuple[float, int, int]] = []  # moment, replica, its change
        self._changes = [0] * num_replicas

    def _expect(self, number: int) -> None:
        """Looks up anew when a replica that has changed ends something."""
        self._changes[number] += 1
        ending = self.replicas[number].next_end()
        if ending is not None:
            heapq.heappush(self._due, (ending[0], number, self._changes[number]))

    def begin(self, number: int, request: Request, num_tokens: int, num_there: int = 0) -> None:
        """See ``Replica.begin``."""
        self.replicas[number].advance(self.now_s)
        self.replicas[number].begin(request, num_tokens, num_there)
        self._expect(number)

    def limit(self, num_tokens: float) -> None:
        """Everywhere, see ``Replica.limit``."""
        for number, replica in enumerate(self.replicas):
            if replica.ends:
                replica.advance(self.now_s)
                replica.limit(num_tokens)
                self._expect(number)

    def abort(self, number: int, request: Request) -> None:
        self.replicas[number].advance(self.now_s)
        self.replicas[number].end(request)
        self._expect(number)

    def next_moment(self) -> float:
        """Of the next end; infinity where nothing runs."""
        while self._due and self._due[0][2] != self._changes[self._due[0][1]]:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else math.inf

    def next_end(self) -> tuple[int, Request]:
        """Goes to the next end; the replica and the response."""
        self.now_s = self.next_moment()
        number = self._due[0][1]
        replica = self.replicas[number]
        ending = replica.next_end()
        assert ending is not None
        replica.advance(self.now_s)
        # Without the rounding of the square root.
        replica.steps = max(replica.steps, replica.ends[ending[1]])
        replica.end(ending[1])
        self._expect(number)
        return number, ending[1]

    def wait_until(self, now_s: float) -> None:
        """Nothing ends before this moment."""
        assert now_s <= self.next_moment() + 1e-9
        self.now_s = now_s

    def pause(self, number: int, seconds: float) -> None:
        """A replica does not decode for so long; what it runs or gets meanwhile continues then."""
        replica = self.replicas[number]
        replica.advance(self.now_s)
        replica.now_s += seconds
        self._expect(number)

    def busy_s(self) -> float:
        """Seconds so far in which a replica had a sequence, of all replicas together."""
        for replica in self.replicas:
            replica.advance(self.now_s)
        return sum(replica.busy_s for replica in self.replicas)
