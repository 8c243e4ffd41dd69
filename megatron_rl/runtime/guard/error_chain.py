"""An exception and those that it was raised from."""

from __future__ import annotations

from collections.abc import Iterator


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and every exception that it keeps: what each was raised from, and what was handled
    meanwhile.

    Each comes once: ``raise a from b`` may close a ring, which Python does not look for.
    """
    seen: set[int] = set()
    left = [error]
    while left:
        link = left.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            left += [link.__context__, link.__cause__]
