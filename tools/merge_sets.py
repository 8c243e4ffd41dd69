"""Merge data sets, each in the columns it is published in, into one file, and order it.

    python tools/merge_sets.py --out merged.parquet \\
        mathvision=FILE we_math=FILE polymath=FILE scienceqa=FILE mathv360k=FILE
    python tools/merge_sets.py --out ordered.parquet \\
        --easy-first runs/evaluation/responses/step_000000.parquet view_r1=merged.parquet

NAME=FILE: the columns are those of data=NAME (conf/data). A row of the merged file has prompt,
answer, images, choices and data_source (the name of its file), as data=view_r1 reads them. What
--easy-first names is the file of an evaluation of these rows (tools/docs/pages/papers.md): they
then come in the order of the share of their responses that is right, most first, and among equal
ones of the mean length of their responses, short ones first. A row that the evaluation left out
for its length is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import DataConfig
from megatron_rl.data.columns import LETTERS, letter_of
from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.prompts import read_drafts
from megatron_rl.data.rows import Problems
from megatron_rl.types import Image

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SCHEMA = pa.schema(
    [
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("images", pa.list_(IMAGE)),
        ("choices", pa.list_(pa.string())),
        ("data_source", pa.string()),
    ]
)


class AnySize(VisionProcessor):
    """In the place of a model's: a file that is merged is of no model yet."""

    def __init__(self) -> None:
        pass

    def grid(self, image: Image) -> tuple[int, int, int]:
        return (1, 1, 1)


def rows_of(name: str, file: str) -> list[dict[str, Any]]:
    """The rows of a file in the columns of ``data=NAME``.

    Raises:
        ValueError: as ``load_sources``, and of a prompt that is a list of messages.
    """
    values = compose("config", [f"data={name}", "data.train=[]", "data.eval=[]"])["data"]
    config = validate(DataConfig, values, f"data={name}")
    problems = Problems(file)
    drafts = read_drafts(file, config, problems, AnySize())
    for draft in drafts:
        if not isinstance(draft.prompt, str):
            problems.add(draft.row, "the prompt is no text", draft.prompt, "merge texts alone")
    problems.raise_if_any()
    rows = []
    for draft in drafts:
        choices = draft.extra.get("choices")
        # The text: of the choices C and A the letter A would be read as the text of the second one.
        answer = choices[LETTERS.index(draft.answer)] if choices else draft.answer
        row = {
            "prompt": f"{config.prompt_prefix}{draft.prompt}{config.prompt_suffix}",
            "answer": answer,
            "images": [{"bytes": image.read(), "path": None} for image in draft.images or ()],
            "choices": choices,
            "data_source": draft.data_source,
        }
        rows.append(row)
    return rows


def easy_first(rows: Sequence[dict[str, Any]], answers: Path) -> list[dict[str, Any]]:
    """The rows that were answered, in the order of their difficulty.

    Raises:
        ValueError: no such file, or the answers are those of another file.
    """
    if not answers.is_file():
        raise ValueError(
            f"{answers}: no such file; give responses/step_000000.parquet of an evaluation"
        )
    table = pq.read_table(answers, columns=["uid", "answer", "correct", "tokens"])
    expected = [
        letter_of(row["answer"], row["choices"]) if row["choices"] else row["answer"]
        for row in rows
    ]
    found = defaultdict(list)
    for answer in table.to_pylist():
        row = int(answer["uid"].rpartition(":")[2]) - 1  # uids count from 1
        if row >= len(rows) or expected[row] != answer["answer"]:
            raise ValueError(
                f"{answers}: {answer['uid']} expects {answer['answer']!r}, which is no answer of"
                " that row; give the file that was evaluated"
            )
        found[row].append(answer)

    def difficulty(row: int) -> tuple[float, float]:
        right = fmean(answer["correct"] for answer in found[row])
        return -right, fmean(answer["tokens"] for answer in found[row])

    return [rows[row] for row in sorted(found, key=difficulty)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("sets", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.parquet")
    parser.add_argument("--easy-first", type=Path, metavar="ANSWERS")
    options = parser.parse_args(argv)
    for text in options.sets:
        if "=" not in text:
            parser.error(f"{text}: give NAME=FILE, such as we_math=testmini.parquet")
    try:
        merge(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def merge(options: argparse.Namespace) -> None:
    """Does what the command line asks. Raises ValueError: as ``rows_of`` and ``easy_first``."""
    rows = []
    for text in options.sets:
        name, _, file = text.partition("=")
        of_set = rows_of(name, file)
        print(f"{len(of_set)} rows of {file}")
        rows += of_set
    if options.easy_first is not None:
        rows = easy_first(rows, options.easy_first)
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), options.out)
    print(f"{options.out}: {len(rows)} rows")


if __name__ == "__main__":
    sys.exit(main())
