"""Requests that servers fail at, servers that fail, and how long a request may take, estimated from
the answers so far."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from megatron_rl.errors import first_few

MOST_SERVERS = 3  # where so many fail at one request the run ends
Asked = tuple[str, int]  # what a server is asked: the uid of a prompt, the number of the response
_SHOWN = 5
_SHORTEST_LIMIT_S = 60.0
_REMEMBERED = 256


class PromptFailureError(RuntimeError):
    """Server after server fails at a prompt."""


@dataclass
class RequestFailures:
    """Counts failures, by server and by request.

    A request that fails goes to another server. A server that fails twice without an answer in
    between is marked dead. Where ``MOST_SERVERS`` servers, one after the other, have failed at one
    request or were lost while they had it, the run ends: a prompt that ends every server it is sent
    to would end them all, again and again. Counted by request, not by prompt: a machine that fails
    takes several servers along, which may have had responses to one prompt."""

    _of_server: Counter[str] = field(default_factory=Counter)  # since its last answer
    _at_request: dict[Asked, set[str]] = field(default_factory=dict)  # servers

    @property
    def fatal(self) -> list[str]:
        """The uids of prompts that end the run."""
        found = self._at_request.items()
        return sorted({uid for (uid, _), servers in found if len(servers) >= MOST_SERVERS})

    def answered(self, server: str, asked: Asked) -> None:
        self._of_server.pop(server, None)
        self._at_request.pop(asked, None)

    def failed(self, server: str, asked: Asked, why: str) -> bool:
        """Notes that a running server failed at a request; returns whether to mark it dead."""
        self._of_server[server] += 1
        self.broke_off(server, [asked], why)
        return self._of_server[server] > 1

    def broke_off(self, server: str, requests: Iterable[Asked], why: str) -> None:
        """Notes that a server failed while it had these requests. Raises PromptFailureError."""
        for asked in requests:
            self._at_request.setdefault(asked, set()).add(server)
        if not self.fatal:
            return
        shown = ", ".join(first_few(self.fatal, _SHOWN))
        raise PromptFailureError(
            f"prompt {shown}: {MOST_SERVERS} servers, one after the other, have failed while"
            f" they had the same request to it; the last one: {why}. Look"
            " into the servers' logs; take a prompt that ends them out of the data, or start"
            " servers that can answer it, and resume"
        )


class _Waiting(NamedTuple):
    server: str
    begin_s: float
    max_tokens: int


@dataclass
class RequestTimeouts:
    """A request is overdue after ``factor`` times the time that a response of its full length is
    expected to take, but not before a minute. Expected are the median seconds per token of the last
    answers, times the tokens that the request may have. Before the first answer nothing is overdue.
    ``factor``: None: no request is ever overdue.

    Example: answers of 100 tokens take 5 s, the factor is 4: 800 s where 4,000 tokens are allowed,
    6,400 s where 32,000 are.
    """

    factor: float | None
    clock: Callable[[], float] = time.monotonic
    _token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _waiting: dict[object, _Waiting] = field(default_factory=dict)

    @contextmanager
    def waiting(self, server: str, max_tokens: int) -> Iterator[Callable[[int], None]]:
        """Context of one request; it yields what to call with the tokens of the answer."""
        name = object()
        begin_s = self.clock()
        self._waiting[name] = _Waiting(server, begin_s, max_tokens)

        def answered(num_tokens: int) -> None:
            self._token_s.append((self.clock() - begin_s) / max(1, num_tokens))

        try:
            yield answered
        finally:
            del self._waiting[name]

    def limit_s(self, max_tokens: int) -> float | None:
        """Time limit of a request for so many tokens; None: not known yet, or no limit."""
        if self.factor is None or not self._token_s:
            return None
        return max(_SHORTEST_LIMIT_S, self.factor * median(self._token_s) * max_tokens)

    def overdue(self) -> dict[str, str]:
        """Servers that have kept a request for too long, and why they count as lost."""
        now_s = self.clock()
        # One median for each length, not for each request.
        lengths = {waiting.max_tokens for waiting in self._waiting.values()}
        limits_s = {max_tokens: self.limit_s(max_tokens) for max_tokens in lengths}
        late = {}
        for server, begin_s, max_tokens in self._waiting.values():
            limit_s = limits_s[max_tokens]
            if limit_s is not None and now_s - begin_s > limit_s:
                late[server] = (
                    f"it has not answered a request for {limit_s:.0f} s, much longer than answers"
                    f" of at most {max_tokens} tokens take"
                )
        return late
