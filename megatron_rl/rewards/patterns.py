"""The regular expressions of ``reward.answer_pattern`` and ``reward.format_pattern``.

A dot matches a line break as well; ``\\s``, ``\\d`` and ``\\w`` are those of ASCII.

Python's ``re`` tries alternatives one after the other: on a response that almost matches,
``<think>.*</think>\\s*<answer>.*</answer>`` takes the square of its length, and nested repetitions
take forever. RE2 reads the text once. A pattern whose meaning RE2 shares is therefore given to RE2;
the others (look-around, back references, flags) stay with ``re`` and are stopped by
``reward.timeout_s``.
"""

import re
from collections import deque
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import re2

# Constructs that both read, but differently: flags, "$" before a last line break, {,3} (literal in
# RE2), names of classes, [[:alpha:]] (only in RE2), and \B in an empty text.
_DIFFERENT = re.compile(r"\(\?[^:P]|\$|\{,|\[\[|\\B")
# A group that is repeated may be empty the last time; the two differ in what it then holds. So do
# they in what follows an empty match.
_REPEATED_GROUP = re.compile(r"\)[*+?{]")


class ResponsePattern:
    """One pattern, applied to responses."""

    def __init__(self, pattern: str) -> None:
        self._compiled = re.compile(pattern, re.DOTALL | re.ASCII)
        may_be_empty = parser.parse(pattern).getwidth()[0] == 0
        differs = may_be_empty or _REPEATED_GROUP.search(pattern)
        self._search = None if differs else linear(pattern)
        # Of a whole text the end is the end, so "$" there changes nothing.
        ends_text = pattern.endswith("$") and not pattern.endswith("\\$")
        self._whole = linear(pattern[:-1] if ends_text else pattern)

    def last_group(self, text: str) -> str | None:
        """First group of the last match; None without a match, or where the group is not in it."""
        if self._search is None:
            matches = self._compiled.finditer(text)
        else:
            matches = self._search.finditer(_as_utf8(text))
        groups = [match.group(1) for match in deque(matches, maxlen=1)]  # of the last one
        group = groups[0] if groups else None
        return group.decode("utf-8") if isinstance(group, bytes) else group

    def matches_all(self, text: str) -> bool:
        """Whether the whole text is one match."""
        if self._whole is None:
            return self._compiled.fullmatch(text) is not None
        return self._whole.fullmatch(_as_utf8(text)) is not None


def linear(pattern: str) -> Any:
    """``pattern`` for RE2; None where RE2 would match something else or exceed its memory."""
    if _DIFFERENT.search(pattern):
        return None
    options = re2.Options()
    options.dot_nl = True
    options.log_errors = False
    try:
        return re2.compile(pattern.encode("utf-8"), options)
    except (re2.error, UnicodeEncodeError):
        return None


def _as_utf8(text: str) -> bytes:
    """UTF-8; half of a surrogate pair, which UTF-8 cannot hold, becomes U+FFFD.

    By way of UTF-16, where two halves that stand together become the character that they make.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode("utf-8")
