"""The regular expressions of ``reward.answer_pattern`` and ``reward.format_pattern``.

A dot matches a line break as well.

Python's ``re`` tries alternatives one after the other: on a response that almost matches,
``<think>.*</think>\\s*<answer>.*</answer>`` takes the square of its length, and nested repetitions
take forever. RE2 reads the text once. A pattern whose meaning RE2 shares is therefore given to RE2,
written so that every class of characters is Python's; the others (look-around, back references,
``\\b``, flags) stay with ``re`` and are stopped by ``reward.timeout_s``.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import re2

_SAME_FLAGS = re.DOTALL | re.UNICODE | re.VERBOSE  # flags whose effect is in the parsed pattern
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    code.CATEGORY_SPACE: str.isspace,
    code.CATEGORY_DIGIT: str.isdecimal,
    code.CATEGORY_WORD: lambda character: character.isalnum() or character == "_",
}
_OPPOSITES = {
    code.CATEGORY_NOT_SPACE: code.CATEGORY_SPACE,
    code.CATEGORY_NOT_DIGIT: code.CATEGORY_DIGIT,
    code.CATEGORY_NOT_WORD: code.CATEGORY_WORD,
}
_ANCHORS = {code.AT_BEGINNING: r"\A", code.AT_BEGINNING_STRING: r"\A", code.AT_END_STRING: r"\z"}


class _NotShared(ValueError):
    """RE2 lacks this construct, or gives it another meaning."""


class ResponsePattern:
    """One pattern, applied to responses."""

    def __init__(self, pattern: str) -> None:
        self._compiled = re.compile(pattern, re.DOTALL)
        self._search = linear(pattern, whole=False)
        self._whole = linear(pattern, whole=True)

    def last_group(self, text: str) -> str | None:
        """First group of the last match; None without a match, or where the group is not in it."""
        last = None
        if self._search is None:
            for last in self._compiled.finditer(text):  # noqa: B007 - only the last one is wanted
                pass
            return None if last is None else last.group(1)
        for last in self._search.finditer(_as_utf8(text)):  # noqa: B007 - as above
            pass
        if last is None or last.group(1) is None:
            return None
        return last.group(1).decode("utf-8")

    def matches_all(self, text: str) -> bool:
        """Whether the whole text is one match."""
        if self._whole is None:
            return self._compiled.fullmatch(text) is not None
        return self._whole.fullmatch(_as_utf8(text)) is not None


def linear(pattern: str, *, whole: bool) -> Any:
    """``pattern`` for RE2; None where RE2 would match something else or exceed its memory.

    Args:
        whole: the pattern is only used to match whole texts. Then it does not matter which
            alternative is tried first, and a ``$`` at the end is the end.
    """
    tree = parser.parse(pattern, re.DOTALL)
    if tree.state.flags & ~_SAME_FLAGS:
        return None
    items = list(tree)
    if whole and items and items[-1] == (code.AT, code.AT_END):
        items.pop()
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(_sequence(items, whole).encode("utf-8"), options)
    except (_NotShared, re2.error):
        return None


def _as_utf8(text: str) -> bytes:
    """UTF-8; half of a surrogate pair, which UTF-8 cannot hold, becomes U+FFFD.

    By way of UTF-16, where two halves that stand together become the character that they make.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode("utf-8")


def _sequence(items: Any, whole: bool) -> str:
    return "".join(_item(operator, argument, whole) for operator, argument in items)


def _item(operator: Any, argument: Any, whole: bool) -> str:
    """One node of a parsed pattern in the syntax of RE2.

    Raises:
        _NotShared: it has no equal there.
    """
    if operator is code.LITERAL:
        return _character(argument)
    if operator is code.NOT_LITERAL:
        return f"[^{_character(argument)}]"
    if operator is code.ANY:
        return "(?s:.)"
    if operator is code.IN:
        return _class(argument)
    if operator in (code.MAX_REPEAT, code.MIN_REPEAT):
        return _repeat(*argument, lazy=operator is code.MIN_REPEAT, whole=whole)
    if operator is code.BRANCH:
        return "(?:" + "|".join(_sequence(branch, whole) for branch in argument[1]) + ")"
    if operator is code.SUBPATTERN:
        group, added, removed, content = argument
        if added or removed:
            raise _NotShared("flags of a group")
        opening = "(?:" if group is None else "("
        return f"{opening}{_sequence(content, whole)})"
    if operator is code.AT and argument in _ANCHORS:
        return _ANCHORS[argument]
    raise _NotShared(str(operator))


def _repeat(least: int, most: Any, content: Any, *, lazy: bool, whole: bool) -> str:
    if not whole and content.getwidth()[0] == 0:
        # Python and RE2 differ in what a group holds after an empty repetition.
        raise _NotShared("how often nothing is repeated")
    highest = "" if most is code.MAXREPEAT else most  # {2,} and {2,5}
    times = f"{{{least},{highest}}}"
    suffix = "?" if lazy else ""
    return f"(?:{_sequence(content, whole)}){times}{suffix}"


def _class(members: Any) -> str:
    prefix = ""
    if members[0] == (code.NEGATE, None):
        prefix = "^"
        members = members[1:]
    ranges = "".join(_member(operator, argument) for operator, argument in members)
    return f"[{prefix}{ranges}]"


def _member(operator: Any, argument: Any) -> str:
    if operator is code.LITERAL:
        return _character(argument)
    if operator is code.RANGE:
        return f"{_character(argument[0])}-{_character(argument[1])}"
    if operator is code.CATEGORY and argument in _CATEGORIES:
        return _category(argument, True)
    if operator is code.CATEGORY and argument in _OPPOSITES:
        return _category(_OPPOSITES[argument], False)
    raise _NotShared(str(operator))


@functools.cache
def _category(category: Any, wanted: bool) -> str:
    """The characters of a class as Python's ``re`` has it, whatever the Unicode version of RE2."""
    belongs = _CATEGORIES[category]
    all_points = range(sys.maxunicode + 1)
    ranges = []
    # Runs of characters that are all members, or all none.
    runs = itertools.groupby(all_points, lambda point: belongs(chr(point)) == wanted)
    for are_members, run in runs:
        if are_members:
            points = list(run)
            ranges += _without_surrogates(points[0], points[-1])
    return "".join(f"{_character(first)}-{_character(last)}" for first, last in ranges)


def _without_surrogates(first: int, last: int) -> list[tuple[int, int]]:
    """The range without U+D800 to U+DFFF, for which UTF-8 has no code."""
    below = (first, min(last, 0xD7FF))
    above = (max(first, 0xE000), last)
    return [(begin, end) for begin, end in (below, above) if begin <= end]


def _character(point: int) -> str:
    if 0xD800 <= point <= 0xDFFF:
        raise _NotShared("half of a surrogate pair")
    return rf"\x{{{point:x}}}"


@functools.cache
def compile_pattern(pattern: str) -> ResponsePattern:
    return ResponsePattern(pattern)
