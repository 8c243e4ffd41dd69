"""The regular expressions of ``reward.answer_pattern`` and ``reward.format_pattern``; a dot matches a line break as well."""

from __future__ import annotations

import re


class Pattern:
    """One pattern, applied to responses."""

    def __init__(self, pattern: str) -> None:
        self._compiled = re.compile(pattern, re.DOTALL)

    def last_group(self, text: str) -> str | None:
        """First group of the last match (None where it took no part in it); None without a match."""
        last = None
        for last in self._compiled.finditer(text):  # noqa: B007 - only the last one is wanted
            pass
        return None if last is None else last.group(1)

    def matches_all(self, text: str) -> bool:
        """Whether the whole text is one match."""
        return self._compiled.fullmatch(text) is not None


def compile_pattern(pattern: str) -> Pattern:
    return Pattern(pattern)
