"""Prompts that processes share: equal to those that were read, whole or made anew."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.data import prompt_file, shared
from megatron_rl.data.loader import PromptLoader, fingerprint
from megatron_rl.data.prompt_file import StoredPrompts, join
from megatron_rl.data.reading import Data, examined, read_sources
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


def settings(*overrides: str):
    return config(
        "model.path=m", "data.train=[a.jsonl,b.jsonl]", "data.eval=eval.jsonl", *overrides
    )


def read(*overrides: str) -> tuple[Data, list]:
    data = read_sources(settings(*overrides), TOKENIZER)
    return data, examined(data, settings(*overrides))


def test_what_was_written_is_what_was_read(folder):
    data, doubts = read()
    shared.save(folder / "x", data, doubts)
    loaded, loaded_doubts = shared.load(folder / "x")
    assert prompt_file.is_whole(folder / "x")
    assert list(loaded.train_prompts) == list(data.train_prompts)
    assert loaded.held_out_prompts == data.held_out_prompts
    assert loaded_doubts == doubts
    assert doubts, "the example has a prompt that comes twice"
    for ours, theirs in zip(
        loaded.train + loaded.held_out, data.train + data.held_out, strict=True
    ):
        assert list(ours.prompts) == list(theirs.prompts)
        assert ours.summary() == theirs.summary()
    first = loaded.train[0].prompts[0]
    assert isinstance(first.token_ids, tuple) and isinstance(first.token_ids[0], int)


def test_a_loader_takes_the_same_and_resumes_from_the_other(folder):
    data, doubts = read()
    shared.save(folder / "x", data, doubts)
    loaded, _ = shared.load(folder / "x")
    plain_loader = PromptLoader(data.train_prompts, seed=3, shuffle=True)
    mapped_loader = PromptLoader(loaded.train_prompts, seed=3, shuffle=True)
    assert isinstance(loaded.train_prompts, StoredPrompts)
    assert mapped_loader.take(30) == plain_loader.take(30)
    assert mapped_loader.state() == plain_loader.state()
    assert loaded.train_prompts.fingerprint == fingerprint(list(loaded.train_prompts))


def test_slices_and_joins_are_those_of_lists(folder):
    data, doubts = read()
    shared.save(folder / "x", data, doubts)
    loaded, _ = shared.load(folder / "x")
    rows = loaded.train_prompts
    plain_rows = list(data.train_prompts)
    assert rows[2:7:2] == plain_rows[2:7:2]
    assert rows[-1] == plain_rows[-1]
    with pytest.raises(IndexError):
        rows[len(rows)]
    parts = [loaded.train[1].prompts, loaded.train[0].prompts]
    assert join(parts) == [*data.train[1].prompts, *data.train[0].prompts]
    assert join([]) == ()


@pytest.mark.parametrize("place", [0, 40, 70, -1])
def test_a_damaged_file_is_known_and_made_anew(folder, place):
    made = []

    def reading():
        made.append(1)
        return read()

    path = shared._file(settings(), "launch", reading)
    assert shared._file(settings(), "another", reading) == path
    assert len(made) == 1, "the second start reads nothing"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert not prompt_file.is_whole(path)
    assert shared._file(settings(), "third", reading) == path
    assert len(made) == 2 and prompt_file.is_whole(path)
    path.write_bytes(content[: len(content) // 2])
    assert not prompt_file.is_whole(path)


def test_everything_that_prompts_depend_on_changes_the_key(folder):
    keys = [shared.data_key(settings(), "one")]
    assert shared.data_key(settings(), "two") == keys[0]
    keys.append(shared.data_key(settings("data.prompt_suffix=x"), "one"))
    keys.append(shared.data_key(settings("rollout.max_prompt_tokens=77"), "one"))
    keys.append(shared.data_key(settings("reward.verifier=exact"), "one"))
    keys.append(shared.data_key(settings("data.train=[]"), "one"))
    for name in ("a.jsonl", "eval.jsonl", "m/tokenizer.json"):
        about = (folder / name).stat()
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("}", " }", 1))
        os.utime(folder / name, ns=(about.st_atime_ns, about.st_mtime_ns))
        keys.append(shared.data_key(settings(), "one"))
    assert len(set(keys)) == len(keys)
    hub = settings("data.train=hf:x:train")
    assert shared.data_key(hub, "one") != shared.data_key(hub, "two")


def test_several_writers_at_once_leave_one_whole_file(folder):
    data, doubts = read()
    path = folder / "x"
    threads = [threading.Thread(target=shared.save, args=(path, data, doubts)) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not path.exists() or prompt_file.is_whole(path)
    assert prompt_file.is_whole(path)
    assert [file.name for file in folder.glob("x*")] == ["x"]


def test_prompts_that_a_file_cannot_give_back_are_not_written(folder):
    prompt = Prompt("a:1", (1, 2), "3", "s")
    for extra in ({"key": (1, 2)}, {1: "a"}, {"a": b"x"}):
        with pytest.raises((ValueError, TypeError)):
            prompt_file.write(folder / "x", [replace(prompt, extra=extra)], {})
    assert not (folder / "x").exists()


def test_old_files_go_and_those_used_last_stay(folder, monkeypatch):
    monkeypatch.setattr(shared, "KEPT", 2)
    paths = []
    for number in range(4):
        overrides = f"data.prompt_suffix=s{number}"
        paths.append(shared._file(settings(overrides), "launch", lambda o=overrides: read(o)))
        os.utime(paths[-1], (number, number))
    assert [path.exists() for path in paths] == [False, False, True, True]


def test_a_folder_that_others_can_write_is_refused(folder):
    private = shared.private_folder()
    assert private.stat().st_mode & 0o777 == 0o700
    private.chmod(0o777)
    with pytest.raises(OSError, match="open to other users"):
        shared.private_folder()
    assert shared._file(settings(), "launch", read) is None
