"""How long a request to a server may take, by what the others take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import NamedTuple

_SHORTEST_LIMIT_S = 60.0
_REMEMBERED = 256


class _Waiting(NamedTuple):
    server: str
    begin_s: float
    max_tokens: int


@dataclass
class RequestTimeouts:
    """A request is overdue after ``factor`` times as long as a response of its full length takes,
    and not before a minute: the median, over the last answers, of seconds a token, times the tokens
    that this request may have. While nothing is answered nothing is overdue. ``factor``: None for a
    wait without end.

    Example: answers of 100 tokens take 5 s, the factor is 4: 800 s where 4,000 tokens are allowed,
    6,400 s where 32,000 are.
    """

    factor: float | None
    clock: Callable[[], float] = time.monotonic
    _token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    _names: Iterator[int] = field(default_factory=count)

    @contextmanager
    def waiting(self, server: str, max_tokens: int) -> Iterator[Callable[[int], None]]:
        """A request is under way inside; what it gives is told the tokens of the answer."""
        name = next(self._names)
        begin_s = self.clock()
        self._waiting[name] = _Waiting(server, begin_s, max_tokens)

        def answered(num_tokens: int) -> None:
            self._token_s.append((self.clock() - begin_s) / max(1, num_tokens))

        try:
            yield answered
        finally:
            del self._waiting[name]

    def limit_s(self, max_tokens: int) -> float | None:
        """Of a request that may have so many tokens; None: not known, or none."""
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
