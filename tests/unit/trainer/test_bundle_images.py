"""The images of a bundled minibatch, out of files and memory, and back."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.trainer.bundle import IMAGES, _write_images
from megatron_rl.types import Image
from tools.replay.read_bundle import _read_images


def test_images_of_a_bundle_come_back(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"cat")
    cat = Image("c" * 64, 30, 20, source=tmp_path / "cat.png")
    dog = Image("d" * 64, 40, 10, source=b"dog")
    rows = ((cat,), (dog, cat), ())
    _write_images(tmp_path / IMAGES, rows)
    assert sorted(file.name for file in (tmp_path / IMAGES).iterdir()) == ["c" * 64, "d" * 64]
    facts = [[(each.digest, each.width, each.height) for each in row] for row in rows]
    found = _read_images(tmp_path / IMAGES, json.loads(json.dumps(facts)))
    assert found == rows
    assert [each.source.read_bytes() for each in found[1]] == [b"dog", b"cat"]


def test_a_bundle_without_images_has_none(tmp_path: Path) -> None:
    _write_images(tmp_path / IMAGES, [(), ()])
    assert list(tmp_path.iterdir()) == []
    assert _read_images(tmp_path, [[], []]) is None
