"""Averages of models, with values by hand."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools import merge


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"of": folder.name}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["merge", *map(str, words)])
    return merge.main()


def test_weighted_mean_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(3 x 1 + 5) / 4 = 2, and in bfloat16 rounded once: (3 + 1.0078125) / 4 = 1.00195 is 1."""
    half = torch.bfloat16
    one = write(tmp_path / "one", a=torch.tensor([1.0, -2.0]), b=torch.ones(1, dtype=half))
    two = write(
        tmp_path / "two", a=torch.tensor([5.0, 2.0]), b=torch.full((1,), 1.0078125).to(half)
    )
    assert run(monkeypatch, "--out", tmp_path / "out", "--weights", "3,1", one, two) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["a"].tolist() == [2.0, -1.0] and found["a"].dtype == torch.float32
    assert found["b"].tolist() == [1.0] and found["b"].dtype == half
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"of": "one"}
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert run(monkeypatch, "--out", tmp_path / "all", one, two, two) == 0
    found = load_file(tmp_path / "all" / "model.safetensors")
    torch.testing.assert_close(found["a"], torch.tensor([11 / 3, 2 / 3]))


def test_slerp_by_hand() -> None:
    """A third of the way from (2, 0) to (0, 2) is 30 degrees; a quarter of the weight and vectors
    of two lengths: sin(67.5) x + sin(22.5) y; parallel ones and zeros have the mean."""
    x, y = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0])
    found = merge.slerp([x, y], [2 / 3, 1 / 3])
    torch.testing.assert_close(found, torch.tensor([math.sqrt(3), 1.0], dtype=torch.float64))
    found = merge.slerp([x, 2 * y], [0.75, 0.25])
    wanted = [2 * math.sin(math.radians(67.5)), 4 * math.sin(math.radians(22.5))]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))
    assert merge.slerp([x, 3 * x], [0.5, 0.5]).tolist() == [4.0, 0.0]
    assert merge.slerp([x, 0 * x], [0.5, 0.5]).tolist() == [1.0, 0.0]
    assert merge.slerp([x, -x], [0.75, 0.25]).tolist() == [1.0, 0.0]


def test_other_models_are_refused_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "one", a=torch.ones(2), b=torch.ones(1), c=torch.ones(1))
    two = write(tmp_path / "two", a=torch.ones(3), b=torch.ones(1).bfloat16(), d=torch.ones(1))
    assert run(monkeypatch, "--out", tmp_path / "out", one, two) == 1
    said = capsys.readouterr().err
    assert "two differs in 4 tensors: a ((3,) torch.float32, not (2,) torch.float32)" in said
    assert "b ((1,) torch.bfloat16, not (1,) torch.float32), c (None, not" in said
    assert not (tmp_path / "out").exists()
    for words, problem in (
        (["--method", "slerp", one, one, one], "3 models; give two"),
        ([one], "1 models; give two"),
        (["--weights", "1", one, one], "give 2 numbers"),
        (["--weights", "1,-1", one, one], "none below 0"),
        (["--weights", "1,nan", one, one], "give 2 numbers"),
        ([one, tmp_path / "none"], "holds neither model.safetensors"),
    ):
        assert run(monkeypatch, "--out", tmp_path / "out", *words) == 1
        assert problem in capsys.readouterr().err
