"""Rows of a data file, and the one error that lists everything wrong with it."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow
import pyarrow.parquet

from megatron_rl.config.data_names import KINDS
from megatron_rl.errors import first_few, first_line, shortened
from megatron_rl.types import Image

_SHOWN_ROWS = 5
_SHOWN_CHARACTERS = 60
_SHOWN_KINDS = 10
_TO_UTF8 = "save the file as UTF-8, e.g. iconv -f {encoding} -t UTF-8 FILE > NEW"

Rows = list[tuple[int, Mapping[str, Any]]]  # row number, columns
Item = TypeVar("Item")


class Draft(NamedTuple):
    """A task of a source, its prompt not yet rendered.

    Example: ``Draft(7, "5 + 7 =", "12", "chain_sum", {})``.
    """

    row: int
    prompt: Any  # a text or a list of messages
    answer: str
    data_source: str
    extra: dict[str, Any]
    # None: the source has no column of images, so the prompt has no places for any.
    images: tuple[Image, ...] | None = None
    solution: Any = None  # a text where ``data.columns.solution`` is read


class Problems:
    """Collects what is wrong, row by row, and raises once.

    Calling ``add(3, "no answer", None, "drop the row")`` and the same for row 7 gives one line:
    ``rows 3, 7: no answer: None; drop the row``. A place is a row number, or a name where the
    source has no rows.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        # (what is wrong, remedy) -> (place, value) of every occurrence
        self._occurrences: dict[tuple[str, str], list[tuple[int | str, Any]]] = defaultdict(list)

    def add(self, place: int | str, what: str, value: Any, remedy: str) -> None:
        self._occurrences[what, remedy].append((place, value))

    def raise_if_any(self) -> None:
        """Raises ValueError: source, rows, first value and remedy of every kind of problem."""
        if not self._occurrences:
            return
        lines = [_line(*kind, occurrences) for kind, occurrences in self._occurrences.items()]
        lines = first_few(lines, _SHOWN_KINDS, "... and {} more kinds of problems")
        separator = "\n  - " if len(lines) > 1 else " "
        raise ValueError(f"{self.source}:{separator}{separator.join(lines)}")


def _line(what: str, remedy: str, occurrences: list[tuple[int | str, Any]]) -> str:
    first_place, first_value = occurrences[0]
    places = ", ".join(str(place) for place, _ in occurrences[:_SHOWN_ROWS])
    if len(occurrences) > _SHOWN_ROWS:
        places += f", ... ({len(occurrences)} in all)"
    if isinstance(first_place, int):
        noun = "row" if len(occurrences) == 1 else "rows"
        places = f"{noun} {places}"
    return f"{places}: {what}: {shortened(repr(first_value), _SHOWN_CHARACTERS)}; {remedy}"


def interleaved(sources: Sequence[Sequence[Item]]) -> list[Item]:
    """The items of all sources in turns, so that every prefix mixes them.

    Example: ``[[1, 2, 3], [4]]`` gives ``[1, 4, 2, 3]``.
    """
    turns = zip_longest(*sources)  # a source that is used up leaves None
    return [item for turn in turns for item in turn if item is not None]


def read_rows(path: Path) -> Rows:
    """(row number from 1, columns) of a .jsonl or .parquet file.

    In .jsonl the row number is the line number; blank lines are skipped.

    Raises:
        ValueError: no such file, another suffix, a line that is not a JSON object or not UTF-8, an
            unreadable parquet file, no row at all.
    """
    readers: Mapping[str, Callable[[Path], Rows]] = {
        ".jsonl": _read_jsonl,
        ".parquet": _read_parquet,
    }
    if path.suffix not in readers:
        raise ValueError(f"{path}: not a known kind of data file; {KINDS}")
    if not path.is_file():
        what = "not a regular file" if path.exists() else "no such file"
        raise ValueError(f"{path}: {what}; {KINDS}")
    rows = readers[path.suffix](path)
    if not rows:
        raise ValueError(f"{path}: the file has no row; give a file with at least one")
    return rows


def _read_jsonl(path: Path) -> Rows:
    _refuse_wide_characters(path)
    rows: Rows = []
    problems = Problems(str(path))
    # A byte order mark is no part of the first row. Bytes that are no UTF-8 are kept as lone
    # surrogates, so that their line is known.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            at = not_utf8(line)
            if at is not None:
                # A lone surrogate holds the byte in its low eight bits.
                what = f"not UTF-8 (byte 0x{ord(line[at]) & 0xFF:02x} at character {at + 1})"
                before = line[max(0, at - 20) : at]
                problems.add(number, what, before, _TO_UTF8.format(encoding="LATIN1"))
                continue
            remedy = "write one JSON object a line"
            try:
                row = json.loads(line, object_pairs_hook=_object)
            # A number of thousands of digits is a ValueError, but no JSONDecodeError.
            except (ValueError, RecursionError) as error:
                why = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
                problems.add(number, f"not JSON ({why})", line.strip(), remedy)
                continue
            if isinstance(row, dict):
                rows.append((number, row))
            else:
                problems.add(number, "not a JSON object", row, remedy)
    problems.raise_if_any()
    return rows


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("two equal keys in one object")
    return made


def not_utf8(text: str) -> int | None:
    """Index of the first character that UTF-8 cannot hold, half of a surrogate pair; else None."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def _refuse_wide_characters(path: Path) -> None:
    """Raises ValueError for UTF-16 and UTF-32: a byte order mark, or zero bytes."""
    with path.open("rb") as file:
        head = file.read(64)
    # JSON has no zero byte; of a text in UTF-16 every second one is, of one in UTF-32 most are.
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in head:
        raise ValueError(
            f"{path}: row 1: not UTF-8 (it looks like UTF-16, or like no text at all);"
            f" {_TO_UTF8.format(encoding='UTF-16')}"
        )


def _read_parquet(path: Path) -> Rows:
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(
            f"{path}: not a readable parquet file ({error}); write it again"
        ) from error
    return list(enumerate(table.to_pylist(), start=1))


def lookup(row: Mapping[str, Any], column: str) -> tuple[bool, Any]:
    """(found, value) of a column.

    ``a.b`` is the column of that very name if there is one, else field ``b`` of column ``a``;
    ``a.0`` is the first item of a list.
    """
    if column in row:
        return True, row[column]
    value: Any = row
    for field in column.split("."):
        if isinstance(value, list) and field.isdecimal() and int(field) < len(value):
            value = value[int(field)]
            continue
        if not isinstance(value, Mapping) or field not in value:
            return False, None
        value = value[field]
    return True, value
