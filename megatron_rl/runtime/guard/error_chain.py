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


def linked(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and every exception that it keeps: what each was raised from, and what was handled
    meanwhile, which ``chain`` leaves out where there is both."""
    seen: set[int] = set()
    left = [error]
    while left:
        link = left.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            left += [link.__cause__, link.__context__]
