"""A teacher's vocabulary and its data sources are looked at before anything is built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_rl.config.method import load_method
from megatron_rl.signals import signals_of
from megatron_rl.types import Prompt
from tests import zoo
from tests.e2e.toy import write_tokenizer


def check(folder: Path, teacher: str, *sources: str) -> None:
    config = zoo.configured(folder, "method=opd", f"model.teacher={teacher}")
    prompts = [Prompt(source, (1,), "", source) for source in sources]
    signals_of(load_method("opd")).check(prompts, config)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """Of as many tokens, two of which have changed places."""
    for name in ("own", "other"):
        write_tokenizer(tmp_path / name)
    check(tmp_path / "own", str(tmp_path / "other"), "a")
    file = tmp_path / "other" / "tokenizer.json"
    values = json.loads(file.read_text())
    vocab = values["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"2 tokens have other numbers .* \(a, b\); give a model"):
        check(tmp_path / "own", str(tmp_path / "other"), "a")


def test_every_data_source_has_a_teacher(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "own")
    shutil.copytree(tmp_path / "own", tmp_path / "one")
    teachers = f"{{sums: {tmp_path / 'one'}}}"
    check(tmp_path / "own", teachers, "sums", "sums")
    with pytest.raises(ValueError, match=r"none for the prompts of words; name a folder"):
        check(tmp_path / "own", teachers, "sums", "words")
