"""A checkpoint whose pickle would run a program: refused by name, and nothing has run."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from megatron_rl.checkpoints import safe_load
from megatron_rl.checkpoints.megatron_format import CheckpointReader
from megatron_rl.runtime import random_state


class Program:
    """Unpickled with any name allowed, it makes a file."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self):
        return os.system, (f"touch {self.evidence}",)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "checkpoint"
    torch_checkpoint.save({"weight": torch.arange(6.0)}, checkpoint_id=folder, no_dist=True)
    torch.save({"optimizer_steps": 3}, folder / "common.pt")
    return folder


def test_a_checkpoint_of_torch_passes(checkpoint):
    safe_load.check_files(checkpoint)
    assert list(CheckpointReader(checkpoint).metadata.state_dict_metadata) == ["weight"]


def test_a_path_is_read_as_every_python_writes_it(checkpoint):
    index = checkpoint / ".metadata"
    with index.open("rb") as file:
        stored = pickle.dumps(pickle.load(file), protocol=2)
    here = re.search(rb"cpathlib(\._local)?\nPosixPath\n", stored)
    assert here, "the index names a path"
    for module in (b"pathlib", b"pathlib._local"):
        index.write_bytes(stored.replace(here[0], b"c" + module + b"\nPosixPath\n"))
        assert list(CheckpointReader(checkpoint).metadata.state_dict_metadata) == ["weight"]


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
@pytest.mark.parametrize("read", [safe_load.check_files, CheckpointReader])
def test_a_program_in_a_checkpoint_is_refused_and_does_not_run(checkpoint, tmp_path, name, read):
    evidence = tmp_path / "it_ran"
    if name == ".metadata":
        (checkpoint / name).write_bytes(pickle.dumps(Program(evidence)))
    else:
        torch.save({"optimizer_steps": Program(evidence)}, checkpoint / name)
    if read is CheckpointReader and name == "common.pt":
        read(checkpoint)  # weights alone are read
    else:
        with pytest.raises(
            ValueError,
            match=(
                rf"checkpoint/{name}.*(posix|os)\.system.*it could run any program and was not read"
            ),
        ):
            read(checkpoint)
    assert not evidence.exists()


def test_a_pickle_is_read_where_the_user_allows_it(checkpoint, tmp_path):
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Program(tmp_path / "ran")))
    with pytest.raises(AttributeError):  # what the program returns is no index
        CheckpointReader(checkpoint, allow_pickle=True)
    assert (tmp_path / "ran").exists()


def test_an_object_of_any_other_class_is_refused(tmp_path):
    stored = io.BytesIO()
    torch.save([Program(tmp_path / "ran")], stored)
    stored.seek(0)
    with pytest.raises(
        ValueError, match=r"object x holds more than tensors and plain values .*system"
    ):
        safe_load.load_plain(stored, "object x")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", pickle.dumps([1, 2])])
def test_a_damaged_index_is_named(checkpoint, content):
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint/\.metadata.*(is damaged|holds a list)"):
        safe_load.read_index(checkpoint)


def test_a_damaged_file_of_objects_is_named(checkpoint):
    file = checkpoint / "common.pt"
    for content in (file.read_bytes()[:-50], b"", b"nothing of the kind"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"common\.pt is damaged"):
            safe_load.check_files(checkpoint)


def test_what_a_run_saves_beside_its_weights_is_plain(tmp_path):
    """Random states come back exactly, and no class had to be unpickled; what older versions wrote
    comes back, too."""
    state = random_state.capture()
    torch.save(
        {"step": 3, "rollouts": {"epoch": 1}, "random_states": [state]}, tmp_path / "extra.pt"
    )
    extra = safe_load.load_plain(tmp_path / "extra.pt", "extra.pt")
    want = (np.random.rand(3).tolist(), torch.rand(3).tolist())
    for restored in (
        extra["random_states"][0],
        {**state, "numpy": ("MT19937", np.asarray(state["numpy"][1]), *state["numpy"][2:])},
    ):
        random_state.restore(restored)
        assert (np.random.rand(3).tolist(), torch.rand(3).tolist()) == want
    assert json.dumps(extra["random_states"][0]["numpy"])


class _TakesOut:
    """Pickles as ``getattr(owner, name)``, as members of enums do."""

    def __init__(self, owner, name):
        self.owner = owner
        self.name = name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_getattr_in_an_index_is_for_members_of_enums_alone(tmp_path):
    (tmp_path / safe_load.INDEX).write_bytes(
        pickle.dumps(_TakesOut(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT"))
    )
    with pytest.raises(ValueError, match="holds a _MEM_FORMAT_ENCODING, not the index"):
        safe_load.read_index(tmp_path)
    for owner, name in ((_MEM_FORMAT_ENCODING, "__init__"), (Metadata, "__init__")):
        (tmp_path / safe_load.INDEX).write_bytes(pickle.dumps(_TakesOut(owner, name)))
        with pytest.raises(ValueError, match="it takes '__init__' out of"):
            safe_load.read_index(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02.",  # takes a value from an empty stack
        b"\x80\x02h\x07.",  # names a value that was not noted
        b"\x80\x02X\x01",  # ends within a length
        b"PK\x03\x04 and no more",
        b"",
    ],
)
def test_a_file_that_is_no_longer_a_pickle_is_damaged(content):
    with pytest.raises(ValueError, match=r"common.pt is damaged \(.*take another checkpoint"):
        safe_load.load_plain(io.BytesIO(content), "common.pt")
