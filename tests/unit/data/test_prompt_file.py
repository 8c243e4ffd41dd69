"""Prompts that processes share: equal to those that were read."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_rl.data import prompt_file, shared
from megatron_rl.data.loader import PromptLoader, fingerprint
from megatron_rl.data.prompt_file import StoredPrompts
from megatron_rl.data.reading import Data, read_sources
from megatron_rl.types import Prompt
from tests.unit.data.test_reading import config, lines, plain
from tests.unit.data.toy import character_tokenizer, write

TOKENIZER = character_tokenizer()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m/tokenizer.json").write_text("{}")
    extra = {"level": 2, "tags": ["\u00e4", None], "deep": {"x": 1.5}}
    row = {"prompt": "na\u00efve \U0001f600?", "answer": "3", "data_source": "s", "extra": extra}
    write(tmp_path / "a.jsonl", lines(row, *[{**row, "prompt": f"{n}+1"} for n in range(9)]))
    write(tmp_path / "b.jsonl", plain("4+4", "5+5", "4+4"))
    write(tmp_path / "eval.jsonl", plain("9+1", "8", "b+b"))
    return tmp_path


def read() -> Data:
    settings = config("model.path=m", "data.train=[a.jsonl,b.jsonl]", "data.eval=eval.jsonl")
    return read_sources(settings, TOKENIZER)


def test_what_was_written_is_what_was_read(folder):
    data = read()
    _, loaded = shared.save(data)
    loaded = pickle.loads(pickle.dumps(loaded))  # as another rank has it
    assert list(loaded.train_prompts) == list(data.train_prompts)
    assert loaded.held_out_prompts == data.held_out_prompts
    for ours, theirs in zip(
        loaded.train + loaded.held_out, data.train + data.held_out, strict=True
    ):
        assert list(ours.prompts) == list(theirs.prompts)
        assert ours.summary() == theirs.summary()
    first = loaded.train[0].prompts[0]
    assert isinstance(first.token_ids, tuple) and isinstance(first.token_ids[0], int)


def test_a_loader_takes_the_same_and_resumes_from_the_other(folder):
    data = read()
    _, loaded = shared.save(data)
    plain_loader = PromptLoader(data.train_prompts, seed=3, shuffle=True)
    mapped_loader = PromptLoader(loaded.train_prompts, seed=3, shuffle=True)
    assert isinstance(loaded.train_prompts, StoredPrompts)
    assert mapped_loader.take(30) == plain_loader.take(30)
    assert mapped_loader.state() == plain_loader.state()
    assert loaded.train_prompts.fingerprint == fingerprint(list(loaded.train_prompts))


def test_slices_are_those_of_lists(folder):
    data = read()
    _, loaded = shared.save(data)
    rows = loaded.train_prompts
    plain_rows = list(data.train_prompts)
    assert rows[2:7:2] == plain_rows[2:7:2]
    assert rows[-1] == plain_rows[-1]
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_any_extra_comes_back_as_it_was(folder):
    extras = [{"key": (1, 2)}, {"1": {1: "a"}}, {"a": b"x", "b": "\ud800"}, {}]
    prompts = [replace(Prompt("a:1", (1, 2), "3", "s"), extra=extra) for extra in extras]
    prompt_file.write(folder / "x", prompts)
    assert list(StoredPrompts(folder / "x", 0, 4, "")) == prompts


def test_the_file_is_for_this_user_alone(folder):
    path, _ = shared.save(read())
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_leaves_nothing(folder, monkeypatch):
    data = read()
    monkeypatch.setattr(prompt_file, "write", Mock(side_effect=OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        shared.save(data)
    assert not [*folder.glob("megatron_rl_prompts_*")]
