"""The errors of the package, and what their messages are made of.

A ``ValueError`` is the user's: it is shown as one message, without a traceback. Anything else is a
fault of the program and comes with its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

_MAX_CHARACTERS = 300
_SHOWN_PROBLEMS = 12  # a message fits on a screen; the next start shows the rest


class ConfigError(ValueError):
    """A configuration that cannot be used. The message lists every problem: key, value, remedy."""

    def __init__(self, problems: Sequence[str], where: str) -> None:
        self.problems = list(problems)
        self._where = where
        shown = first_few(self.problems, _SHOWN_PROBLEMS, "... and {} more")
        lines = "\n".join(f"  - {problem}" for problem in shown)
        plural = "s" * (len(problems) != 1)
        super().__init__(f"{len(problems)} problem{plural} in {where}:\n{lines}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str], str]]:
        """Rank 0 sends its errors to the other ranks, and pickle would call it with the text."""
        return ConfigError, (self.problems, self._where)


class RegistrationError(ValueError):
    """A plug-in registers something that cannot be used; the message names it and says why."""


class NonFiniteError(ValueError):
    """Training has reached numbers that are not finite, and stops."""


class WeightSyncError(RuntimeError):
    """An engine received other weights than were sent. The message names the tensors."""


class LostPeerError(WeightSyncError):
    """Another process of the sync is gone, or leaves it: what is wrong is wrong there."""


def first_few(entries: Sequence[str], limit: int = 8, rest: str = "and {} more") -> list[str]:
    """The first ``limit`` entries, and behind them what stands for the ``rest``, if there is one.

    Example: ``first_few(["a", "b", "c"], 1)`` gives ``["a", "and 2 more"]``.
    """
    num_left = len(entries) - limit
    return [*entries[:limit], *([rest.format(num_left)] if num_left > 0 else [])]


@contextmanager
def concerning(
    subject: str, remedy: str, kinds: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Inside, an error of a library becomes a ValueError that names the file, row or key.

    Libraries say what is wrong, not where: ``SafetensorError: header too large`` does not name the
    file. A ValueError of this package names it already, so give the library's own exception classes
    where both can come.

    Args:
        subject: what is being read or built, e.g. ``"model.path: /m/model-00001.safetensors"``.
        remedy: what the user can do, without a full stop.
        kinds: the exceptions that are turned; others pass.

    Raises:
        ValueError: ``<subject>: <first line of the library's message>; <remedy>``.
    """
    try:
        yield
    except kinds as error:
        raise ValueError(f"{subject}: {first_line(error)}; {remedy}") from error


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


def first_line(error: BaseException) -> str:
    """The first line of a message that is not empty, cut to a readable length.

    Example: ``KeyError("x")`` gives ``KeyError: 'x'``, an empty ``MemoryError()`` its name.
    """
    while isinstance(error, BaseExceptionGroup):  # whose own text only counts
        error = error.exceptions[0]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    text = lines[0] if lines else name
    # The text of a KeyError is the key alone, which says nothing without the name of the class.
    if isinstance(error, LookupError) and lines:
        text = f"{name}: {text}"
    return shortened(text, _MAX_CHARACTERS)


def shortened(text: str, max_characters: int) -> str:
    """``text``, cut to ``max_characters`` with ``...`` as the last three."""
    return text if len(text) <= max_characters else text[: max_characters - 3] + "..."


def close_names(
    name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6
) -> list[str]:
    """Up to ``count`` of the ``known`` names that ``name`` may be a misspelling of, best first.

    Args:
        cutoff: how similar a name must be, from 0 (anything) to 1 (equal).
    """
    return difflib.get_close_matches(name, list(known), n=count, cutoff=cutoff)


def did_you_mean(candidates: Sequence[str]) -> str:
    """``did you mean a or b?``; empty where there is no candidate."""
    return f"did you mean {' or '.join(candidates)}?" if candidates else ""
