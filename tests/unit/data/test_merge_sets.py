"""Sets of several columns in one file, in the order in which a model finds them difficult."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import DataConfig
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.reporting.answer_file import SCHEMA, AnswerFile
from tests.unit.data.pictures import png
from tools.merge_sets import main

PICTURE = {"bytes": png(56, 56), "path": "a.png"}


def written(path: Path, *rows: dict) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def merged(folder: Path) -> Path:
    talk = [{"value": "<image>\nHow many?"}, {"value": "The answer is 5"}]
    common = {"image_path": PICTURE, "key": "1"}
    we_math = written(
        folder / "we.parquet",
        # The text of the second option, whose letter is the text of the first.
        {"question": "First?", "option": "A. B; B. A", "answer": "A"} | common,
        {"question": "Second?", "option": "A. 8; B. 16", "answer": "B"} | common,
    )
    clevr = written(folder / "clevr.parquet", {"conversations": talk, "image": PICTURE})
    out = folder / "merged.parquet"
    main(["--out", str(out), f"we_math={we_math}", f"mathv360k={clevr}"])
    return out


def evaluated(folder: Path, *rows: tuple[str, str, bool, int]) -> Path:
    """(uid, expected answer, is right, tokens) of each response."""
    file = AnswerFile(folder, 0, "weights")
    empty = dict.fromkeys(SCHEMA.names)
    keys = ("uid", "answer", "correct", "tokens")
    file.add([[empty | dict(zip(keys, row, strict=True)) for row in rows]])
    file.finish()
    return file.path


@pytest.fixture
def read(seeing_folder, vision):
    def read(file: Path) -> list:
        words = ["data=view_r1", f"data.train={file}", f"data.eval={file}"]
        config = validate(DataConfig, compose("config", words)["data"], "data")
        return load_prompts(str(file), config, load_tokenizer(seeing_folder), 4000, vision)

    return read


def test_a_merged_file_is_read_as_its_sets_are(tmp_path, read):
    prompts = read(merged(tmp_path))
    assert [prompt.answer for prompt in prompts] == ["B", "B", "5"]
    assert [prompt.data_source for prompt in prompts] == ["we", "we", "clevr"]
    assert prompts[1].extra["choices"] == ["8", "16"] and "choices" not in prompts[2].extra
    assert "Second?\n(A) 8\n(B) 16<|im_end|>" in prompts[1].text
    assert [len(prompt.images) for prompt in prompts] == [1, 1, 1]


def test_what_is_answered_most_comes_first_and_short_before_long(tmp_path, read):
    file = merged(tmp_path)
    # Right: none, half and half of them, with 5 and 4.5 tokens.
    answers = evaluated(
        tmp_path,
        *(("merged:1", "B", False, 3), ("merged:1", "B", False, 3)),
        *(("merged:2", "B", True, 9), ("merged:2", "B", False, 1)),
        *(("merged:3", "5", True, 4), ("merged:3", "5", False, 5)),
    )
    out = tmp_path / "ordered.parquet"
    main(["--out", str(out), "--easy-first", str(answers), f"view_r1={file}"])
    assert [prompt.answer for prompt in read(out)] == ["5", "B", "B"]
    assert "Second?" in read(out)[1].text


def test_answers_to_another_file_are_refused(tmp_path, capsys):
    file = merged(tmp_path)
    answers = evaluated(tmp_path, ("merged:3", "A", True, 1))
    assert main(["--out", "o.parquet", "--easy-first", str(answers), f"view_r1={file}"]) == 1
    said = capsys.readouterr().err
    assert "merged:3 expects 'A', which is no answer of that row; give the file that was" in said
