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
        write_rows(path, [{names.get(key, key): row[key] for key in keys} for row in plain_rows(count)])

    return write


def lines(*texts: str) -> Writer:
    return lambda path: write_rows(path, [*plain_rows(4), *texts])


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


def broken() -> list[Case]:
    """Files that are no data."""
    row3 = (r"data\.jsonl", r"\b3\b")
    return [
        data_case("dat_missing", "the file does not exist", None, Refused((r"data\.(train|jsonl)", "no such file"))),
        data_case("dat_empty", "an empty file", lambda path: path.write_text(""), Refused((r"data\.jsonl",))),
        data_case("dat_blank", "blank lines only", lambda path: path.write_text("\n \n\n"), Refused((r"data\.jsonl",))),
        data_case("dat_broken_line", "line 5 is cut", lines('{"prompt": "a", "ans'), Refused((r"data\.jsonl", r"\b5\b"))),
        data_case("dat_50_broken", "50 broken lines", lines(*["{not json"] * 50), Refused((r"data\.jsonl", "50"))),
        data_case("dat_null_answer", "an answer of null", rows_with({"answer": None}), Refused((*row3, "answer"))),
        data_case("dat_no_answer", "a row without answer", rows_with({"answer": ...}), Refused((*row3, "answer"))),
        data_case("dat_empty_answer", "an answer of blanks", rows_with({"answer": "  "}), Refused((*row3, "answer"))),
        data_case("dat_prompt_int", "a prompt that is a number", rows_with({"prompt": 7}), Refused((*row3, "prompt"))),
        data_case("dat_prompt_null", "a prompt of null", rows_with({"prompt": None}), Refused((*row3, "prompt"))),
        data_case("dat_prompt_texts", "a prompt that is a list of texts", rows_with({"prompt": ["a", "b"]}), Refused((*row3, "prompt"))),
        data_case("dat_no_prompt", "a row without prompt", rows_with({"prompt": ...}), Refused((*row3, "prompt"))),
        data_case("dat_empty_prompt", "an empty prompt", rows_with({"prompt": ""}), Refused((*row3, "prompt"))),
        data_case("dat_bool_answer", "an answer of true", rows_with({"answer": True}), Refused((*row3, "answer"))),
        data_case("dat_list_answer", "a list of answers", rows_with({"answer": ["1", "2"]}), Refused((*row3, "answer"))),
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
        data_case("dat_deep", "10000 brackets deep", lines("[" * 10000 + "]" * 10000), Refused((r"data\.jsonl", r"\b5\b"))),
        data_case(
            "dat_huge_int",
            "a number of 6000 digits",
            lines('{"prompt": "a", "answer": ' + "9" * 6000 + "}"),
            Refused((r"data\.jsonl", r"\b5\b")),
        ),
        data_case("dat_extra_text", "extra is a text", rows_with({"extra": "x"}), Refused((*row3, "extra"))),
        data_case("dat_source_int", "data_source is a number", rows_with({"data_source": 3}), Refused((*row3, "data_source"))),
        data_case(
            "dat_mixed",
            "rows of two schemas",
            lambda path: write_rows(path, [*plain_rows(4), {"question": "a", "gold": "b"}]),
            Refused((r"data\.jsonl", r"\b5\b")),
        ),
        data_case("dat_folder", "a folder", lambda path: path.mkdir(), Refused((r"data\.", "file|folder"))),
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


def parquet_files() -> list[Case]:
    """Good and spoiled parquet files."""
    fake = lambda path: path.write_bytes(b"PAR1" + bytes(200))  # noqa: E731
    return [
        data_case("dat_parquet", "a parquet file", parquet(), Ends(), file="data.parquet"),
        data_case(
            "dat_parquet_plain",
            "parquet of prompt and answer only",
            parquet(lambda rows: [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]),
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
            "dat_parquet_dates", "parquet with dates as answers", parquet(dates), Refused((r"data\.parquet", "answer")), file="data.parquet"
        ),
        data_case(
            "dat_parquet_null",
            "parquet with a null answer",
            parquet(lambda rows: [rows[0] | {"answer": None}, *rows[1:]]),
            Refused((r"data\.parquet", "answer", r"\b1\b")),
            file="data.parquet",
        ),
        data_case("dat_parquet_cut", "a cut parquet file", cut_parquet, Refused((r"data\.parquet",)), file="data.parquet"),
        data_case("dat_parquet_fake", "a file that only begins as parquet", fake, Refused((r"data\.parquet",)), file="data.parquet"),
        data_case("dat_parquet_empty", "parquet without rows", empty_parquet, Refused((r"data\.parquet", "row")), file="data.parquet"),
    ]


def encodings() -> list[Case]:
    """Texts in other encodings, and with odd letters."""
    utf8 = ("UTF-8|encoding",)
    return [
        data_case("dat_utf16", "UTF-16", encoded("utf-16"), Refused((r"data\.jsonl", *utf8, r"line|row"))),
        data_case("dat_latin1", "Latin-1", encoded("latin-1"), Refused((r"data\.jsonl", *utf8, r"\b1\b"))),
        data_case("dat_latin1_late", "Latin-1 in line 7 alone", late_latin1, Refused((r"data\.jsonl", *utf8, r"\b7\b"))),
        data_case(
            "dat_bom", "UTF-8 with a byte order mark", encoded("utf-8-sig"), Ends(), Refused((r"data\.jsonl", "BOM|byte order mark"))
        ),
        data_case(
            "dat_crlf",
            "lines of Windows",
            lambda path: path.write_bytes(write_rows(path, plain_rows(8)).read_bytes().replace(b"\n", b"\r\n")),
            Ends(),
        ),
        data_case(
            "dat_no_newline",
            "no line end at the end",
            lambda path: path.write_bytes(write_rows(path, plain_rows(8)).read_bytes().rstrip()),
            Ends(),
        ),
        data_case("dat_emoji", "emoji and other scripts", encoded("utf-8", "\U0001f600 \u4f60\u597d \u0645 "), Ends()),
        data_case("dat_nul", "NUL in a prompt", rows_with({"prompt": "a\x00b"}), Ends(), Refused((r"data\.jsonl", "NUL|control"))),
        data_case(
            "dat_surrogate", "half of a surrogate pair", rows_with({"prompt": "a\ud800b"}), Ends(), Refused((r"data\.jsonl", r"\b3\b"))
        ),
        data_case("dat_special", "tokens of the template in a prompt", rows_with({"prompt": "<eos><pad><assistant>"}), Ends()),
        data_case("dat_digits", "an answer of 300 digits", rows_with({"answer": int("7" * 300)}), Ends()),
        data_case("dat_numbers", "answers that are numbers", rows_with({"answer": 3.5}), Ends()),
        data_case("dat_more_columns", "columns that nobody reads", rows_with({"level": 3, "solution": {"a": [1]}}), Ends()),
    ]


def dates(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    import datetime

    return [row | {"answer": datetime.date(2024, 1, 2)} for row in rows]


def cut_parquet(path: Path) -> None:
    parquet()(path)
    path.write_bytes(path.read_bytes()[:-100])


def empty_parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)


def late_latin1(path: Path) -> None:
    good = write_rows(path, plain_rows(6)).read_bytes()
    path.write_bytes(good + '{"prompt": "caf\u00e9", "answer": "1"}\n'.encode("latin-1"))


def cases() -> list[Case]:
    return [*broken(), *kinds(), *parquet_files(), *encodings()]
