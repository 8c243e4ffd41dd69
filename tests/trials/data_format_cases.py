"""Parquet files, encodings and odd letters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trials.data_cases import Writer, rows_with
from tests.trials.makers import data_case
from tests.trials.material import plain_rows, write_rows
from tests.trials.place import Case
from tests.trials.verdicts import Ends, Refused


def encoded(encoding: str, text: str = "caf\u00e9 = ") -> Writer:
    rows = [row | {"prompt": text + row["prompt"]} for row in plain_rows(8)]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return lambda path: path.write_bytes(content.encode(encoding))


def parquet(change: Callable[[list[dict[str, Any]]], Any] = lambda rows: rows) -> Writer:
    def write(path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        rows = [row | {"extra": {"n": 1}} for row in plain_rows(8)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(change(rows)), path)

    return write


def parquet_files() -> list[Case]:
    """Good and spoiled parquet files."""
    return [
        data_case("dat_parquet", "a parquet file", parquet(), Ends(), file="data.parquet"),
        data_case(
            "dat_parquet_plain",
            "parquet of prompt and answer only",
            parquet(prompt_and_answer),
            Ends(),
            file="data.parquet",
        ),
        data_case(
            "dat_parquet_types",
            "parquet with prompts of numbers",
            parquet(lambda rows: [row | {"prompt": 3} for row in rows]),
            Refused((r"data\.parquet", "prompt")),
            file="data.parquet",
        ),
        data_case(
            "dat_parquet_dates",
            "parquet with dates as answers",
            parquet(dates),
            Refused((r"data\.parquet", "answer")),
            file="data.parquet",
        ),
        data_case(
            "dat_parquet_null",
            "parquet with a null answer",
            parquet(lambda rows: [rows[0] | {"answer": None}, *rows[1:]]),
            Refused((r"data\.parquet", "answer", r"\b1\b")),
            file="data.parquet",
        ),
        data_case(
            "dat_parquet_cut",
            "a cut parquet file",
            cut_parquet,
            Refused((r"data\.parquet",)),
            file="data.parquet",
        ),
        data_case(
            "dat_parquet_fake",
            "a file that only begins as parquet",
            lambda path: path.write_bytes(b"PAR1" + bytes(200)),
            Refused((r"data\.parquet",)),
            file="data.parquet",
        ),
        data_case(
            "dat_parquet_empty",
            "parquet without rows",
            empty_parquet,
            Refused((r"data\.parquet", "row")),
            file="data.parquet",
        ),
    ]


def prompt_and_answer(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]


def dates(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    import datetime

    return [row | {"answer": datetime.date(2024, 1, 2)} for row in rows]


def cut_parquet(path: Path) -> None:
    parquet()(path)
    path.write_bytes(path.read_bytes()[:-100])


def empty_parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    prompts = pyarrow.array([], pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts}), path)


def encodings() -> list[Case]:
    """Texts in other encodings, and other line ends."""
    utf8 = ("UTF-8|encoding",)
    return [
        data_case(
            "dat_utf16", "UTF-16", encoded("utf-16"), Refused((r"data\.jsonl", *utf8, r"line|row"))
        ),
        data_case(
            "dat_latin1", "Latin-1", encoded("latin-1"), Refused((r"data\.jsonl", *utf8, r"\b1\b"))
        ),
        data_case(
            "dat_latin1_late",
            "Latin-1 in line 7 alone",
            late_latin1,
            Refused((r"data\.jsonl", *utf8, r"\b7\b")),
        ),
        data_case(
            "dat_bom",
            "UTF-8 with a byte order mark",
            encoded("utf-8-sig"),
            Ends(),
            Refused((r"data\.jsonl", "BOM|byte order mark")),
        ),
        data_case(
            "dat_crlf",
            "lines of Windows",
            windows_lines,
            Ends(),
        ),
        data_case(
            "dat_no_newline",
            "no line end at the end",
            lambda path: path.write_bytes(write_rows(path, plain_rows(8)).read_bytes().rstrip()),
            Ends(),
        ),
    ]


def windows_lines(path: Path) -> None:
    path.write_bytes(write_rows(path, plain_rows(8)).read_bytes().replace(b"\n", b"\r\n"))


def late_latin1(path: Path) -> None:
    good = write_rows(path, plain_rows(6)).read_bytes()
    path.write_bytes(good + '{"prompt": "caf\u00e9", "answer": "1"}\n'.encode("latin-1"))


def letters() -> list[Case]:
    """Odd letters and numbers, columns that nobody reads."""
    return [
        data_case(
            "dat_emoji",
            "emoji and other scripts",
            encoded("utf-8", "\U0001f600 \u4f60\u597d \u0645 "),
            Ends(),
        ),
        data_case(
            "dat_nul",
            "NUL in a prompt",
            rows_with({"prompt": "a\x00b"}),
            Ends(),
            Refused((r"data\.jsonl", "NUL|control")),
        ),
        data_case(
            "dat_surrogate",
            "half of a surrogate pair",
            rows_with({"prompt": "a\ud800b"}),
            Ends(),
            Refused((r"data\.jsonl", r"\b3\b")),
        ),
        data_case(
            "dat_special",
            "tokens of the template in a prompt",
            rows_with({"prompt": "<eos><pad><assistant>"}),
            Ends(),
        ),
        data_case(
            "dat_digits", "an answer of 300 digits", rows_with({"answer": int("7" * 300)}), Ends()
        ),
        data_case("dat_numbers", "answers that are numbers", rows_with({"answer": 3.5}), Ends()),
        data_case(
            "dat_more_columns",
            "columns that nobody reads",
            rows_with({"level": 3, "solution": {"a": [1]}}),
            Ends(),
        ),
    ]


def cases() -> list[Case]:
    return [*parquet_files(), *encodings(), *letters()]
