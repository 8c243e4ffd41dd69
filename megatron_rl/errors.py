"""Errors that name what they concern. A ``ValueError`` is the user's: it is shown as one message,
without a traceback. Anything else is a fault of the program and comes with its traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MAX_CHARACTERS = 300


class NonFiniteError(ValueError):
    """Training has reached numbers that are not finite, and stops."""


@contextmanager
def concerning(
    subject: str, remedy: str, kinds: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Inside, an error of a library becomes a ValueError that names the file, row or key.

    Libraries say what is wrong, not where: ``SafetensorError: header too large`` does not name the
    file. An error that already is of this kind of message (a ValueError raised by this package)
    should not be wrapped twice, so name the library's own exception classes.

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


def first_line(error: BaseException) -> str:
    """The first line of a message that says something, cut to a readable length.

    Example: ``KeyError("x")`` gives ``KeyError: 'x'``, an empty ``MemoryError()`` its name.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    text = lines[0] if lines else name
    # The text of a KeyError is the key alone: without the name of the class nobody understands it.
    if isinstance(error, LookupError) and lines:
        text = f"{name}: {text}"
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 3] + "..."
