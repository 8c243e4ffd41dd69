"""Data files as people have them, and as accidents leave them."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trials.makers import data_case
from tests.trials.material import plain_rows, write_rows
from tests.trials.place import Case
from tests.trials.verdicts import Ends, Refused

Writer = Callable[[Path], object]


def rows_with(change: dict[str, Any], row: int = 2, count: int = 8) -> Writer:
    """Plain rows, of which one has other values (``...`` removes the key)."""

    def write(path: Path) -> None:
        rows = plain_rows(count)
        for key, value in change.items():
            if value is ...:
                rows[row].pop(key)
            else:
                rows[row][key] = value
        write_rows(path, rows)

    return write


def only(*keys: str, rename: dict[str, str] | None = None, count: int = 8) -> Writer:
    """Rows with these keys only, some under other names."""
    names = rename or {}

    def write(path: Path) -> None:
        rows = plain_rows(count)
        write_rows(path, [{names.get(key, key): row[key] for key in keys} for row in rows])

    return write


def lines(*texts: str) -> Writer:
    return lambda path: write_rows(path, [*plain_rows(4), *texts])


def no_rows() -> list[Case]:
    """Files without a row that can be read."""
    return [
        data_case(
            "dat_missing",
            "the file does not exist",
            None,
            Refused((r"data\.(train|jsonl)", "no such file")),
        ),
        data_case(
            "dat_empty",
            "an empty file",
            lambda path: path.write_text(""),
            Refused((r"data\.jsonl",)),
        ),
        data_case(
            "dat_blank",
            "blank lines only",
            lambda path: path.write_text("\n \n\n"),
            Refused((r"data\.jsonl",)),
        ),
        data_case(
            "dat_broken_line",
            "line 5 is cut",
            lines('{"prompt": "a", "ans'),
            Refused((r"data\.jsonl", r"\b5\b")),
        ),
        data_case(
            "dat_50_broken",
            "50 broken lines",
            lines(*["{not json"] * 50),
            Refused((r"data\.jsonl", "50")),
        ),
    ]


def missing_values() -> list[Case]:
    """Rows without a prompt or an answer, or with one of another type."""
    row3 = (r"data\.jsonl", r"\b3\b")
    return [
        data_case(
            "dat_null_answer",
            "an answer of null",
            rows_with({"answer": None}),
            Refused((*row3, "answer")),
        ),
        data_case(
            "dat_no_answer",
            "a row without answer",
            rows_with({"answer": ...}),
            Refused((*row3, "answer")),
        ),
        data_case(
            "dat_empty_answer",
            "an answer of blanks",
            rows_with({"answer": "  "}),
            Refused((*row3, "answer")),
        ),
        data_case(
            "dat_prompt_int",
            "a prompt that is a number",
            rows_with({"prompt": 7}),
            Refused((*row3, "prompt")),
        ),
        data_case(
            "dat_prompt_null",
            "a prompt of null",
            rows_with({"prompt": None}),
            Refused((*row3, "prompt")),
        ),
        data_case(
            "dat_prompt_texts",
            "a prompt that is a list of texts",
            rows_with({"prompt": ["a", "b"]}),
            Refused((*row3, "prompt")),
        ),
        data_case(
            "dat_no_prompt",
            "a row without prompt",
            rows_with({"prompt": ...}),
            Refused((*row3, "prompt")),
        ),
        data_case(
            "dat_empty_prompt",
            "an empty prompt",
            rows_with({"prompt": ""}),
            Refused((*row3, "prompt")),
        ),
    ]


def odd_json() -> list[Case]:
    """Answers of other types, JSON in other shapes."""
    row3 = (r"data\.jsonl", r"\b3\b")
    return [
        data_case(
            "dat_bool_answer",
            "an answer of true",
            rows_with({"answer": True}),
            Refused((*row3, "answer")),
        ),
        data_case(
            "dat_list_answer",
            "a list of answers",
            rows_with({"answer": ["1", "2"]}),
            Refused((*row3, "answer")),
        ),
        data_case(
            "dat_nan",
            "an answer of NaN",
            lines('{"prompt": "a", "answer": NaN, "data_source": "s", "extra": {}}'),
            Refused((r"\b5\b", "answer|nan")),
            Ends(),
        ),
        data_case(
            "dat_pretty",
            "one object over many lines",
            lambda path: path.write_text(json.dumps(plain_rows(4), indent=2)),
            Refused((r"data\.jsonl", "line")),
        ),
        data_case(
            "dat_array",
            "a JSON array on one line",
            lambda path: path.write_text(json.dumps(plain_rows(4))),
            Refused((r"data\.jsonl", r"\b1\b")),
        ),
        data_case(
            "dat_deep",
            "10000 brackets deep",
            lines("[" * 10000 + "]" * 10000),
            Refused((r"data\.jsonl", r"\b5\b")),
        ),
        data_case(
            "dat_huge_int",
            "a number of 6000 digits",
            lines('{"prompt": "a", "answer": ' + "9" * 6000 + "}"),
            Refused((r"data\.jsonl", r"\b5\b")),
        ),
    ]


def odd_columns() -> list[Case]:
    """Columns of other types, and paths that are no files."""
    row3 = (r"data\.jsonl", r"\b3\b")
    return [
        data_case(
            "dat_extra_text",
            "extra is a text",
            rows_with({"extra": "x"}),
            Refused((*row3, "extra")),
        ),
        data_case(
            "dat_source_int",
            "data_source is a number",
            rows_with({"data_source": 3}),
            Refused((*row3, "data_source")),
        ),
        data_case(
            "dat_mixed",
            "rows of two schemas",
            lambda path: write_rows(path, [*plain_rows(4), {"question": "a", "gold": "b"}]),
            Refused((r"data\.jsonl", r"\b5\b")),
        ),
        data_case(
            "dat_folder", "a folder", lambda path: path.mkdir(), Refused((r"data\.", "file|folder"))
        ),
        data_case("dat_fifo", "a named pipe", os.mkfifo, Refused((r"data\.", "file"))),
    ]


def kinds() -> list[Case]:
    """Other kinds of files."""
    return [
        data_case(
            "dat_json",
            "a .json file",
            lambda path: write_rows(path, plain_rows(8)),
            Refused((r"data\.json", r"\.jsonl")),
            Ends(),
            file="data.json",
        ),
        data_case(
            "dat_csv",
            "a .csv file",
            lambda path: path.write_text("prompt,answer\na,b\n"),
            Refused((r"data\.csv", r"\.jsonl")),
            file="data.csv",
        ),
        data_case(
            "dat_gz",
            "a .jsonl.gz file",
            lambda path: path.write_bytes(gzip.compress(b"{}\n")),
            Refused((r"data\.jsonl\.gz", r"\.jsonl")),
            file="data.jsonl.gz",
        ),
        data_case(
            "dat_gz_named",
            "a gzip file named .jsonl",
            lambda path: path.write_bytes(gzip.compress(b"{}\n" * 99)),
            Refused((r"data\.jsonl", "gzip|UTF-8|JSON")),
        ),
    ]


def cases() -> list[Case]:
    return [*no_rows(), *missing_values(), *odd_json(), *odd_columns(), *kinds()]
