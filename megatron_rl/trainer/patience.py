"""How long a request to a server may take, by what the others take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median

_SHORTEST_LIMIT_S = 60.0
_REMEMBERED = 256


@dataclass
class Patience:
    """A request is overdue after ``factor`` times as long as a response of full length takes, and
    not before a minute: the median, over the last answers, of seconds / tokens x tokens at most.
    While nothing is answered nothing is overdue. ``factor``: None for a wait without end.

    Requests ``in_line`` (an evaluation sends all of its own at once) stand behind each other and
    make others wait. So nothing of a server is overdue before its last answer to one of them is as
    old, too.

    Example: answers of 100 tokens take 5 s, 4,000 are allowed, the factor is 4: 800 s.
    """

    factor: float | None
    clock: Callable[[], float] = time.monotonic
    _full_lengths_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _waiting: dict[int, tuple[str, float]] = field(default_factory=dict)  # server, since when
    _answered_in_line: dict[str, float] = field(default_factory=dict)  # by server, when last
    _names: Iterator[int] = field(default_factory=count)

    @contextmanager
    def waiting(
        self, server: str, max_tokens: int, *, in_line: bool = False
    ) -> Iterator[Callable[[int], None]]:
        """A request is under way inside; what it gives is told the tokens of the answer."""
        name = next(self._names)
        begin_s = self.clock()
        self._waiting[name] = (server, begin_s)

        def answered(num_tokens: int) -> None:
            now_s = self.clock()
            seconds = now_s - begin_s
            if in_line:
                self._answered_in_line[server] = now_s
            self._full_lengths_s.append(seconds * max_tokens / max(1, num_tokens))

        try:
            yield answered
        finally:
            del self._waiting[name]

    @property
    def limit_s(self) -> float | None:
        """None: not known, or none."""
        if self.factor is None or not self._full_lengths_s:
            return None
        return max(_SHORTEST_LIMIT_S, self.factor * median(self._full_lengths_s))

    def overdue(self) -> dict[str, str]:
        """Servers that have kept a request for too long, and why they count as lost."""
        limit_s = self.limit_s
        if limit_s is None:
            return {}
        now_s = self.clock()
        why = f"it has not answered a request for {limit_s:.0f} s, much longer than answers take"
        since = {
            (server, max(begin_s, self._answered_in_line.get(server, begin_s)))
            for server, begin_s in self._waiting.values()
        }
        return {server: why for server, begin_s in since if now_s - begin_s > limit_s}
