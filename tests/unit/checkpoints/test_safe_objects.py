"""Objects among the shards of megatron's checkpoints, which it saves itself in a world of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron_rl.checkpoints.chunks import ArrayLocation, Box
from megatron_rl.checkpoints.part_reader import COMMON_STATE, PartReader, read_common
from megatron_rl.checkpoints.safe_load import COMMON, read_index
from megatron_rl.runtime.device import platform
from tests.numerics.megatron_checkpoint import InProcess
from tests.unit.checkpoints.test_safe_load import Program

pytestmark = pytest.mark.usefixtures("world")
WEIGHT = ArrayLocation("weight", (6,), torch.float32, (Box((0,), (6,)),))


def state(content) -> dict:
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", torch.arange(6.0)),
        "extra": ShardedObject("extra", content, (1,), (0,)),
    }


def saved(folder: Path, content, steps=3) -> Path:
    folder.mkdir()
    with platform():
        dist_checkpointing.save(
            {**state(content), "steps": steps}, str(folder), sharded_strategy=InProcess()
        )
    return folder


def read(path: Path) -> tuple[torch.Tensor, object]:
    reader = PartReader(path, read_index(path))
    weight = torch.zeros(6)
    reader.want(WEIGHT, 0, weight)
    reader.want_object("extra/shard_0_1")
    reader.read()
    return weight, reader.objects["extra/shard_0_1"][0]


def test_tensors_and_plain_objects_come_back(tmp_path):
    path = saved(tmp_path / "checkpoint", {"scale": torch.ones(2)})
    weight, extra = read(path)
    assert torch.equal(weight, torch.arange(6.0))
    assert torch.equal(extra["scale"], torch.ones(2))


def test_what_is_stored_once_is_read_in_both_forms(tmp_path):
    """An object among the shards, and the file of megatron-core before 0.19; a program in either is
    refused."""
    path = saved(tmp_path / "checkpoint", None)
    assert not (path / COMMON).exists()
    assert read_common(path, read_index(path)) == {"steps": 3}
    torch.save({"steps": 4}, path / COMMON)
    assert read_common(path, read_index(path)) == {"steps": 4}
    torch.save({"steps": Program(tmp_path / "ran")}, path / COMMON)
    with pytest.raises(ValueError, match=r"common\.pt holds more than"):
        read_common(path, read_index(path))
    other = saved(tmp_path / "other", None, Program(tmp_path / "ran"))
    with pytest.raises(ValueError, match=f"object {COMMON_STATE} of the checkpoint holds more"):
        read_common(other, read_index(other))
    assert not (tmp_path / "ran").exists()


def test_a_program_among_the_shards_is_refused_and_does_not_run(tmp_path):
    path = saved(tmp_path / "checkpoint", Program(tmp_path / "ran"))
    said = (
        r"^object extra/shard_0_1 of the checkpoint holds more than tensors and plain values .* it"
        r" could run any program"
    )
    with pytest.raises(ValueError, match=said):
        read(path)
    assert not (tmp_path / "ran").exists()
    with platform():
        dist_checkpointing.load(state(None), str(path))
    assert (tmp_path / "ran").exists(), "megatron alone runs it"
