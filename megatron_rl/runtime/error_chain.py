"""An exception and those that it was raised from."""

from __future__ import annotations

from collections.abc import Iterator


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, what it was raised from (else: while what was handled), and so on.

    Each comes once: ``raise a from b`` may close a ring, which Python does not look for.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
