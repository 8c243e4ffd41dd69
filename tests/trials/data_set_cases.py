"""Conversations, columns, several files and data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.trials.data_cases import Writer, only, rows_with
from tests.trials.makers import data_case, looked_at
from tests.trials.material import plain_rows, small, write_rows
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Outcome, Refused

GSM = "data.answer_after='####'"


def said(*turns: tuple[str, Any]) -> Writer:
    """Rows of which one is the conversation ``turns``: (role, content) each."""
    messages = [{"role": role, "content": content} for role, content in turns]
    return rows_with({"prompt": messages})


def conversations() -> list[Case]:
    """Prompts that are conversations."""
    row3 = (r"data\.jsonl", r"\b3\b")
    return [
        data_case(
            "dat_chat",
            "a conversation",
            said(("user", "a"), ("assistant", "b"), ("user", "c")),
            Ends(),
        ),
        data_case(
            "dat_role", "a role that does not exist", said(("robot", "a")), Refused((*row3, "role"))
        ),
        data_case(
            "dat_ends_assistant",
            "the assistant speaks last",
            said(("user", "a"), ("assistant", "b")),
            Refused(row3),
        ),
        data_case(
            "dat_content_null", "a message without content", said(("user", None)), Refused(row3)
        ),
        data_case(
            "dat_image",
            "a message with an image",
            said(("user", [{"type": "image_url", "image_url": "x.png"}])),
            Refused(row3),
        ),
        data_case(
            "dat_system",
            "a system prompt",
            said(("user", "a")),
            Ends(),
            more=["data.system_prompt=Think"],
        ),
        data_case(
            "dat_system_twice",
            "a system prompt twice",
            said(("system", "s"), ("user", "a")),
            Refused((*row3, r"data\.system_prompt")),
            more=["data.system_prompt=Think"],
        ),
    ]


def long_prompts() -> list[Case]:
    """Prompts that are long, or need a template."""
    long = "1 + " * 500000
    row3 = (r"data\.jsonl", r"\b3\b")
    return [
        data_case(
            "dat_2mb",
            "a prompt of 2 MB",
            rows_with({"prompt": long}),
            Refused((*row3, r"max_prompt_tokens")),
        ),
        data_case(
            "dat_long_drop",
            "a prompt of 2 MB, dropped",
            rows_with({"prompt": long}),
            Ends((r"(?m)^.*\b1\b[^\n]*drop|drop[^\n]*\b1\b",)),
            more=["data.on_long_prompt=drop"],
        ),
        data_case(
            "dat_all_long",
            "all are too long, dropped",
            lambda path: write_rows(path, plain_rows(8)),
            Refused((r"max_prompt_tokens",)),
            more=["data.on_long_prompt=drop", "rollout.max_prompt_tokens=2"],
        ),
        data_case(
            "dat_no_template",
            "several messages without template",
            said(("user", "a"), ("assistant", "b"), ("user", "c")),
            Refused((*row3, "apply_chat_template")),
            more=["data.apply_chat_template=false"],
        ),
    ]


def columns() -> list[Case]:
    """Which column is what."""
    rows = plain_rows(8)
    nested = [{"q": {"text": row["prompt"]}, "a": {"value": row["answer"]}} for row in rows]
    return [
        data_case(
            "dat_good", "the four columns", lambda path: write_rows(path, plain_rows(8)), Ends()
        ),
        data_case("dat_naive", "prompt and answer only", only("prompt", "answer"), Ends()),
        data_case(
            "dat_naive2",
            "question and answer, the column named",
            only("prompt", "answer", rename={"prompt": "question"}),
            Ends(),
            more=["data.columns.prompt=question"],
        ),
        data_case(
            "dat_question",
            "question and answer, nothing named",
            only("prompt", "answer", rename={"prompt": "question"}),
            Refused((r"data\.columns\.prompt", "question")),
        ),
        data_case(
            "dat_wrong_column",
            "a column that does not exist",
            only("prompt", "answer"),
            Refused((r"data\.columns\.answer", "answr")),
            more=["data.columns.answer=answr"],
        ),
        data_case(
            "dat_extra_named",
            "extra named that does not exist",
            only("prompt", "answer"),
            Refused((r"data\.columns\.extra", "meta")),
            more=["data.columns.extra=meta"],
        ),
        data_case(
            "dat_nested",
            "columns inside columns",
            lambda path: write_rows(path, nested),
            Ends(),
            more=["data.columns.prompt=q.text", "data.columns.answer=a.value"],
        ),
    ]


def marked() -> list[Case]:
    """Answers behind a marker, and answers that no verifier takes."""
    gsm = [{"question": f"{n} and one?", "answer": f"we add.\n#### {n + 1}"} for n in range(8)]
    as_gsm = ["data.columns.prompt=question", "reward.verifier=number"]
    return [
        data_case(
            "dat_gsm",
            "GSM8K with its marker",
            lambda path: write_rows(path, gsm),
            Ends(),
            more=[*as_gsm, GSM],
        ),
        data_case(
            "dat_gsm_noafter",
            "GSM8K without its marker",
            lambda path: write_rows(path, gsm),
            Refused((r"data\.answer_after", "####")),
            more=as_gsm,
        ),
        data_case(
            "dat_marker",
            "a row without the marker",
            lambda path: write_rows(path, [*gsm, {"question": "a", "answer": "3"}]),
            Refused((r"data\.answer_after", r"\b9\b")),
            more=[*as_gsm, GSM],
        ),
        data_case(
            "dat_source",
            "no verifier for the data source",
            lambda path: write_rows(path, plain_rows(8)),
            Refused((r"reward\.verifier", "sums")),
            more=["reward.verifier=auto"],
        ),
        data_case(
            "dat_not_number",
            "verifier number, answers of words",
            rows_with({"answer": "seven"}),
            Refused((r"reward\.verifier", "seven")),
            more=["reward.verifier=number"],
        ),
    ]


def several(
    name: str, title: str, write: Callable[[Path], Sequence[str]], *expected: Refused | Ends
) -> Case:
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
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in plain_rows(8)]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(copy / "data" / "train-00000-of-00001.parquet")
    return copy


def several_files() -> list[Case]:
    """Lists, globs and weights of files."""
    return [
        several("dat_list_of_files", "a list of two files", listed, Ends()),
        several("dat_glob", "a glob", with_glob, Ends()),
        several(
            "dat_glob_none",
            "a glob that matches nothing",
            lambda folder: [f"data.train={folder}/*.jsonl"],
            Refused((r"data\.train", r"\*\.jsonl")),
        ),
        several("dat_weights", "weights between files", weighted("[3,1]"), Ends()),
        several(
            "dat_weight_negative",
            "a negative weight",
            weighted("[-1,1]"),
            Refused((r"data\.train_weights",)),
        ),
        several(
            "dat_weights_count",
            "more weights than files",
            weighted("[1,1,1]"),
            Refused((r"data\.train_weights",)),
        ),
        several(
            "dat_weights_zero",
            "weights of zero",
            weighted("[0,0]"),
            Refused((r"data\.train_weights",)),
        ),
        several(
            "dat_list_empty",
            "an empty list",
            lambda folder: ["data.train=[]"],
            Refused((r"data\.train",)),
        ),
        several(
            "dat_one_bad", "one of two files is broken", one_bad, Refused((r"b\.jsonl", r"\b7\b"))
        ),
        several(
            "dat_one_missing",
            "one of two files is missing",
            one_missing,
            Refused((r"nowhere\.jsonl",)),
        ),
    ]


def data_sets() -> list[Case]:
    """Data sets of the datasets library."""
    return [
        several(
            "dat_hf",
            "a data set of the datasets library",
            lambda folder: [f"data.train='hf:{hub_copy(folder)}:train'"],
            Ends(),
        ),
        several(
            "dat_hf_split",
            "a split that does not exist",
            lambda folder: [f"data.train='hf:{hub_copy(folder)}:trian'"],
            Refused((r"data\.train|hf:", "trian")),
        ),
        several(
            "dat_hf_missing",
            "a data set that is not there",
            lambda folder: ["data.train='hf:nobody/nothing:train'"],
            Refused((r"nobody/nothing",)),
        ),
    ]


def generated() -> list[Case]:
    """Generated tasks, and how many prompts there are."""
    task = "data.train='reasoning_gym:chain_sum?min_terms=2&max_terms=2&max_digits=1&size=8&seed=1'"
    held_out = f"data.eval={task.partition('=')[2]}"
    twice = [plain_rows(1)[0]] * 8
    return [
        several(
            "dat_gym",
            "a generated task",
            lambda folder: [task, held_out, "reward.verifier=reasoning_gym"],
            Ends(),
        ),
        several(
            "dat_gym_typo",
            "a task that does not exist",
            lambda folder: ["data.train='reasoning_gym:chain_sun?size=8&seed=1'"],
            Refused(("chain_sun", "chain_sum")),
        ),
        several(
            "dat_gym_key",
            "a key the task does not have",
            lambda folder: ["data.train='reasoning_gym:chain_sum?size=8&seed=1&max_term=2'"],
            Refused(("max_term",)),
        ),
        several(
            "dat_gym_seed",
            "no seed",
            lambda folder: ["data.train='reasoning_gym:chain_sum?size=8'"],
            Refused(("seed",)),
        ),
        several(
            "dat_overlap",
            "all of train is also in eval",
            lambda folder: ["data.drop_eval_overlap=true"],
            Refused((r"drop_eval_overlap",)),
        ),
        several(
            "dat_few",
            "fewer prompts than a step takes",
            lambda folder: [f"data.train={write_rows(folder / 'a.jsonl', plain_rows(2))}"],
            Ends((r"\b2\b[^\n]*prompts_per_step|prompts_per_step[^\n]*\b2\b|\b2 prompts",)),
            Refused((r"prompts_per_step",)),
        ),
        several(
            "dat_duplicates",
            "one prompt eight times",
            lambda folder: [f"data.train={write_rows(folder / 'a.jsonl', twice)}"],
            Ends(("duplicate|same prompt|twice|repeated",)),
        ),
    ]


def cases() -> list[Case]:
    return [
        *conversations(),
        *long_prompts(),
        *columns(),
        *marked(),
        *several_files(),
        *data_sets(),
        *generated(),
    ]
