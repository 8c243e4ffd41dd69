"""A full disk says so, whatever the library that met it says. On a real file system of 8 MB where
one may be mounted."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.runtime import disk

DISK_SIZE = "8m"


def torch_archive(folder, tensor):
    torch.save({"x": tensor}, folder / "x.pt")


def safetensors_file(folder, tensor):
    save_file({"x": tensor}, folder / "x.safetensors")


def plain_file(folder, tensor):
    (folder / "x.bin").write_bytes(tensor.numpy().tobytes())


@pytest.mark.parametrize("write", [torch_archive, safetensors_file, plain_file])
def test_every_writer_that_fills_a_disk_is_said_with_folder_needed_and_free(small_disk, write):
    tensor = torch.ones(4_000_000)
    said = r"no space left on the disk of .*disk: the thing takes 16.000 MB, .* are free"
    with (
        pytest.raises(ValueError, match=said) as caught,
        disk.room_for(small_disk, 16_000_000, "the thing"),
    ):
        write(small_disk, tensor)
    assert "make room" in str(caught.value) and caught.value.__cause__ is not None


def test_an_error_in_a_chain_or_gathered_from_other_ranks_counts():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    inner = RuntimeError("unexpected pos 704 vs 598")
    inner.__context__ = full
    assert disk.says_full(full) and disk.says_full(inner)
    assert disk.says_full(CheckpointException("write", {1: (full, None)}))  # ty: ignore
    assert not disk.says_full(RuntimeError("unexpected pos 704 vs 598"))


def test_a_chain_of_errors_may_be_a_ring():
    first = RuntimeError("one")
    second = RuntimeError("two")
    first.__cause__ = second
    second.__cause__ = first
    assert not disk.says_full(first)


def test_a_file_that_another_process_takes_away_meanwhile_hides_no_error(tmp_path, monkeypatch):
    """Other ranks rename and remove their receipts while one of them looks for room."""
    (tmp_path / "receipt").write_bytes(b"12345")
    (tmp_path / "part").write_bytes(b"123")
    is_file = Path.is_file

    def seen_and_gone(path):
        answer = is_file(path)
        if path.name == "receipt":
            path.unlink(missing_ok=True)
        return answer

    monkeypatch.setattr(Path, "is_file", seen_and_gone)
    assert disk.used_bytes(tmp_path) == 3


def test_other_errors_pass_as_they_are(tmp_path):
    with (
        pytest.raises(RuntimeError, match="something else"),
        disk.room_for(tmp_path, 10, "the thing"),
    ):
        raise RuntimeError("something else")


def test_free_room_is_that_of_the_place_where_a_folder_would_be(tmp_path):
    assert disk.free_bytes(tmp_path / "not" / "there") == pytest.approx(
        disk.free_bytes(tmp_path), rel=0.01
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"12345")
    assert disk.used_bytes(tmp_path) == 5 and disk.used_bytes(tmp_path / "none") == 0
    texts = [disk.as_text(size) for size in (1_230_000_000, 5_000, 820)]
    assert texts == ["1.23 GB", "0.005 MB", "820 bytes"]
