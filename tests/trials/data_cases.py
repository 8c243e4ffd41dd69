"""Data files as people have them, and as accidents leave them."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.trials.makers import data_case, looked_at
from tests.trials.material import plain_rows, small, write_rows
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Outcome, Refused

Writer = Callable[[Path], object]
GSM = "data.answer_after='####'"


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
        data_case("dat_nan", "an answer of NaN", lines('{"prompt": "a", "answer": NaN, "data_source": "s", "extra": {}}'), Refused((r"\b5\b", "answer|nan")), Ends()),
        data_case("dat_pretty", "one object over many lines", lambda path: path.write_text(json.dumps(plain_rows(4), indent=2)), Refused((r"data\.jsonl", "line"))),
        data_case("dat_array", "a JSON array on one line", lambda path: path.write_text(json.dumps(plain_rows(4))), Refused((r"data\.jsonl", r"\b1\b"))),
        data_case("dat_deep", "10000 brackets deep", lines("[" * 10000 + "]" * 10000), Refused((r"data\.jsonl", r"\b5\b"))),
        data_case("dat_huge_int", "a number of 6000 digits", lines('{"prompt": "a", "answer": ' + "9" * 6000 + "}"), Refused((r"data\.jsonl", r"\b5\b"))),
        data_case("dat_extra_text", "extra is a text", rows_with({"extra": "x"}), Refused((*row3, "extra"))),
        data_case("dat_source_int", "data_source is a number", rows_with({"data_source": 3}), Refused((*row3, "data_source"))),
        data_case("dat_mixed", "rows of two schemas", lambda path: write_rows(path, [*plain_rows(4), {"question": "a", "gold": "b"}]), Refused((r"data\.jsonl", r"\b5\b"))),
        data_case("dat_folder", "a folder", lambda path: path.mkdir(), Refused((r"data\.", "file|folder"))),
        data_case("dat_fifo", "a named pipe", os.mkfifo, Refused((r"data\.", "file"))),
    ]  # fmt: skip


def kinds() -> list[Case]:
    """Other kinds of files and texts."""
    fake = lambda path: path.write_bytes(b"PAR1" + bytes(200))  # noqa: E731
    utf8 = ("UTF-8|encoding",)
    return [
        data_case("dat_json", "a .json file", lambda path: write_rows(path, plain_rows(8)), Refused((r"data\.json", r"\.jsonl")), Ends(), file="data.json"),
        data_case("dat_csv", "a .csv file", lambda path: path.write_text("prompt,answer\na,b\n"), Refused((r"data\.csv", r"\.jsonl")), file="data.csv"),
        data_case("dat_gz", "a .jsonl.gz file", lambda path: path.write_bytes(gzip.compress(b"{}\n")), Refused((r"data\.jsonl\.gz", r"\.jsonl")), file="data.jsonl.gz"),
        data_case("dat_gz_named", "a gzip file named .jsonl", lambda path: path.write_bytes(gzip.compress(b"{}\n" * 99)), Refused((r"data\.jsonl", "gzip|UTF-8|JSON"))),
        data_case("dat_parquet", "a parquet file", parquet(), Ends(), file="data.parquet"),
        data_case("dat_parquet_plain", "parquet of prompt and answer only", parquet(lambda rows: [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]), Ends(), file="data.parquet"),
        data_case("dat_parquet_types", "parquet with prompts of numbers", parquet(lambda rows: [row | {"prompt": 3} for row in rows]), Refused((r"data\.parquet", "prompt")), file="data.parquet"),
        data_case("dat_parquet_dates", "parquet with dates as answers", parquet(dates), Refused((r"data\.parquet", "answer")), file="data.parquet"),
        data_case("dat_parquet_null", "parquet with a null answer", parquet(lambda rows: [rows[0] | {"answer": None}, *rows[1:]]), Refused((r"data\.parquet", "answer", r"\b1\b")), file="data.parquet"),
        data_case("dat_parquet_cut", "a cut parquet file", cut_parquet, Refused((r"data\.parquet",)), file="data.parquet"),
        data_case("dat_parquet_fake", "a file that only begins as parquet", fake, Refused((r"data\.parquet",)), file="data.parquet"),
        data_case("dat_parquet_empty", "parquet without rows", empty_parquet, Refused((r"data\.parquet", "row")), file="data.parquet"),
        data_case("dat_utf16", "UTF-16", encoded("utf-16"), Refused((r"data\.jsonl", *utf8, r"line|row"))),
        data_case("dat_latin1", "Latin-1", encoded("latin-1"), Refused((r"data\.jsonl", *utf8, r"\b1\b"))),
        data_case("dat_latin1_late", "Latin-1 in line 7 alone", late_latin1, Refused((r"data\.jsonl", *utf8, r"\b7\b"))),
        data_case("dat_bom", "UTF-8 with a byte order mark", encoded("utf-8-sig"), Ends(), Refused((r"data\.jsonl", "BOM|byte order mark"))),
        data_case("dat_crlf", "lines of Windows", lambda path: path.write_bytes(write_rows(path, plain_rows(8)).read_bytes().replace(b"\n", b"\r\n")), Ends()),
        data_case("dat_no_newline", "no line end at the end", lambda path: path.write_bytes(write_rows(path, plain_rows(8)).read_bytes().rstrip()), Ends()),
        data_case("dat_emoji", "emoji and other scripts", encoded("utf-8", "\U0001f600 \u4f60\u597d \u0645 "), Ends()),
        data_case("dat_nul", "NUL in a prompt", rows_with({"prompt": "a\x00b"}), Ends(), Refused((r"data\.jsonl", "NUL|control"))),
        data_case("dat_surrogate", "half of a surrogate pair", rows_with({"prompt": "a\ud800b"}), Ends(), Refused((r"data\.jsonl", r"\b3\b"))),
        data_case("dat_special", "tokens of the template in a prompt", rows_with({"prompt": "<eos><pad><assistant>"}), Ends()),
        data_case("dat_digits", "an answer of 300 digits", rows_with({"answer": int("7" * 300)}), Ends()),
        data_case("dat_numbers", "answers that are numbers", rows_with({"answer": 3.5}), Ends()),
        data_case("dat_more_columns", "columns that nobody reads", rows_with({"level": 3, "solution": {"a": [1]}}), Ends()),
    ]  # fmt: skip


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


def chats() -> list[Case]:
    """Prompts that are conversations, prompts that are long."""

    def said(*turns: tuple[str, Any]) -> Writer:
        messages = [{"role": role, "content": content} for role, content in turns]
        return rows_with({"prompt": messages})

    long = "1 + " * 500000
    row3 = (r"data\.jsonl", r"\b3\b")
    return [
        data_case("dat_chat", "a conversation", said(("user", "a"), ("assistant", "b"), ("user", "c")), Ends()),
        data_case("dat_role", "a role that does not exist", said(("robot", "a")), Refused((*row3, "role"))),
        data_case("dat_ends_assistant", "the assistant speaks last", said(("user", "a"), ("assistant", "b")), Refused(row3)),
        data_case("dat_content_null", "a message without content", said(("user", None)), Refused(row3)),
        data_case("dat_image", "a message with an image", said(("user", [{"type": "image_url", "image_url": "x.png"}])), Refused(row3)),
        data_case("dat_system", "a system prompt", said(("user", "a")), Ends(), more=["data.system_prompt=Think"]),
        data_case("dat_system_twice", "a system prompt twice", said(("system", "s"), ("user", "a")), Refused((*row3, r"data\.system_prompt")), more=["data.system_prompt=Think"]),
        data_case("dat_2mb", "a prompt of 2 MB", rows_with({"prompt": long}), Refused((*row3, r"max_prompt_tokens"))),
        data_case("dat_long_drop", "a prompt of 2 MB, dropped", rows_with({"prompt": long}), Ends((r"(?m)^.*\b1\b[^\n]*drop|drop[^\n]*\b1\b",)), more=["data.on_long_prompt=drop"]),
        data_case("dat_all_long", "all are too long, dropped", lambda path: write_rows(path, plain_rows(8)), Refused((r"max_prompt_tokens",)), more=["data.on_long_prompt=drop", "rollout.max_prompt_tokens=2"]),
        data_case("dat_no_template", "several messages without template", said(("user", "a"), ("assistant", "b"), ("user", "c")), Refused((*row3, "apply_chat_template")), more=["data.apply_chat_template=false"]),
    ]  # fmt: skip


def columns() -> list[Case]:
    """Which column is what."""
    gsm = [{"question": f"{n} and one?", "answer": f"we add.\n#### {n + 1}"} for n in range(8)]
    as_gsm = ["data.columns.prompt=question", "reward.verifier=number"]
    nested = [{"q": {"text": row["prompt"]}, "a": {"value": row["answer"]}} for row in plain_rows(8)]
    return [
        data_case("dat_good", "the four columns", lambda path: write_rows(path, plain_rows(8)), Ends()),
        data_case("dat_naive", "prompt and answer only", only("prompt", "answer"), Ends()),
        data_case("dat_naive2", "question and answer, the column named", only("prompt", "answer", rename={"prompt": "question"}), Ends(), more=["data.columns.prompt=question"]),
        data_case("dat_question", "question and answer, nothing named", only("prompt", "answer", rename={"prompt": "question"}), Refused((r"data\.columns\.prompt", "question"))),
        data_case("dat_wrong_column", "a column that does not exist", only("prompt", "answer"), Refused((r"data\.columns\.answer", "answr")), more=["data.columns.answer=answr"]),
        data_case("dat_extra_named", "extra named that does not exist", only("prompt", "answer"), Refused((r"data\.columns\.extra", "meta")), more=["data.columns.extra=meta"]),
        data_case("dat_nested", "columns inside columns", lambda path: write_rows(path, nested), Ends(), more=["data.columns.prompt=q.text", "data.columns.answer=a.value"]),
        data_case("dat_gsm", "GSM8K with its marker", lambda path: write_rows(path, gsm), Ends(), more=[*as_gsm, GSM]),
        data_case("dat_gsm_noafter", "GSM8K without its marker", lambda path: write_rows(path, gsm), Refused((r"data\.answer_after", "####")), more=as_gsm),
        data_case("dat_marker", "a row without the marker", lambda path: write_rows(path, [*gsm, {"question": "a", "answer": "3"}]), Refused((r"data\.answer_after", r"\b9\b")), more=[*as_gsm, GSM]),
        data_case("dat_source", "no verifier for the data source", lambda path: write_rows(path, plain_rows(8)), Refused((r"reward\.verifier", "sums")), more=["reward.verifier=auto"]),
        data_case("dat_not_number", "verifier number, answers of words", rows_with({"answer": "seven"}), Refused((r"reward\.verifier", "seven")), more=["reward.verifier=number"]),
    ]  # fmt: skip


def several(name: str, title: str, write: Callable[[Path], Sequence[str]], *expected: Refused | Ends) -> Case:
    """``write`` makes files in a folder and returns the overrides that name them."""

    def play(place: Place) -> Outcome:
        folder = place.folder / "files"
        folder.mkdir()
        overrides = write(folder)
        run_dir = place.folder / "run"
        common = small(place.material.model("llama"), place.material.rows(), run_dir)
        return looked_at(place.warm([*common, *overrides]), run_dir)

    return Case(name, "data", title, play, expected, "warm")


def two_files(folder: Path) -> tuple[Path, Path]:
    first = write_rows(folder / "a.jsonl", plain_rows(6))
    return first, write_rows(folder / "b.jsonl", plain_rows(6, first=50))


def listed(folder: Path) -> list[str]:
    first, second = two_files(folder)
    return [f"data.train=[{first},{second}]"]


def with_glob(folder: Path) -> list[str]:
    two_files(folder)
    return [f"data.train={folder}/*.jsonl"]


def weighted(weight: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        first, second = two_files(folder)
        return [f"data.train=[{first},{second}]", f"data.train_weights={weight}"]

    return write


def one_bad(folder: Path) -> list[str]:
    first, second = two_files(folder)
    second.write_text(second.read_text() + "{broken\n")
    return [f"data.train=[{first},{second}]"]


def one_missing(folder: Path) -> list[str]:
    first, _ = two_files(folder)
    return [f"data.train=[{first},{folder}/nowhere.jsonl]"]


def hub_copy(folder: Path) -> Path:
    """A data set of the datasets library, as a folder of parquet files."""
    import datasets

    copy = folder / "sums"
    (copy / "data").mkdir(parents=True)
    table = datasets.Dataset.from_list([{"prompt": r["prompt"], "answer": r["answer"]} for r in plain_rows(8)])
    table.to_parquet(copy / "data" / "train-00000-of-00001.parquet")
    return copy


def collections() -> list[Case]:
    """Several files, data sets, generated tasks."""
    task = "data.train='reasoning_gym:chain_sum?min_terms=2&max_terms=2&max_digits=1&size=8&seed=1'"
    twice = [plain_rows(1)[0]] * 8
    return [
        several("dat_list_of_files", "a list of two files", listed, Ends()),
        several("dat_glob", "a glob", with_glob, Ends()),
        several("dat_glob_none", "a glob that matches nothing", lambda folder: [f"data.train={folder}/*.jsonl"], Refused((r"data\.train", r"\*\.jsonl"))),
        several("dat_weights", "weights between files", weighted("[3,1]"), Ends()),
        several("dat_weight_negative", "a negative weight", weighted("[-1,1]"), Refused((r"data\.train_weights",))),
        several("dat_weights_count", "more weights than files", weighted("[1,1,1]"), Refused((r"data\.train_weights",))),
        several("dat_weights_zero", "weights of zero", weighted("[0,0]"), Refused((r"data\.train_weights",))),
        several("dat_list_empty", "an empty list", lambda folder: ["data.train=[]"], Refused((r"data\.train",))),
        several("dat_one_bad", "one of two files is broken", one_bad, Refused((r"b\.jsonl", r"\b7\b"))),
        several("dat_one_missing", "one of two files is missing", one_missing, Refused((r"nowhere\.jsonl",))),
        several("dat_hf", "a data set of the datasets library", lambda folder: [f"data.train='hf:{hub_copy(folder)}:train'"], Ends()),
        several("dat_hf_split", "a split that does not exist", lambda folder: [f"data.train='hf:{hub_copy(folder)}:trian'"], Refused((r"data\.train|hf:", "trian"))),
        several("dat_hf_missing", "a data set that is not there", lambda folder: ["data.train='hf:nobody/nothing:train'"], Refused((r"nobody/nothing",))),
        several("dat_gym", "a generated task", lambda folder: [task, "reward.verifier=reasoning_gym", f"data.eval={task.partition('=')[2]}"], Ends()),
        several("dat_gym_typo", "a task that does not exist", lambda folder: ["data.train='reasoning_gym:chain_sun?size=8&seed=1'"], Refused(("chain_sun", "chain_sum"))),
        several("dat_gym_key", "a key the task does not have", lambda folder: ["data.train='reasoning_gym:chain_sum?size=8&seed=1&max_term=2'"], Refused(("max_term",))),
        several("dat_gym_seed", "no seed", lambda folder: ["data.train='reasoning_gym:chain_sum?size=8'"], Refused(("seed",))),
        several("dat_overlap", "all of train is also in eval", lambda folder: ["data.drop_eval_overlap=true"], Refused((r"drop_eval_overlap",))),
        several("dat_few", "fewer prompts than a step takes", lambda folder: [f"data.train={write_rows(folder / 'a.jsonl', plain_rows(2))}"], Ends((r"\b2\b[^\n]*prompts_per_step|prompts_per_step[^\n]*\b2\b|\b2 prompts",)), Refused((r"prompts_per_step",))),
        several("dat_duplicates", "one prompt eight times", lambda folder: [f"data.train={write_rows(folder / 'a.jsonl', twice)}"], Ends(("duplicate|same prompt|twice|repeated",))),
    ]  # fmt: skip


def cases() -> list[Case]:
    return [*broken(), *kinds(), *chats(), *columns(), *collections()]
