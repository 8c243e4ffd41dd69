"""Parts of a checkpoint, written by threads and sealed; read back by torch itself and by us."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

from megatron_rl.checkpoints import directory, part_writer, sealing
from megatron_rl.checkpoints.chunks import ArrayLocation, Box
from megatron_rl.checkpoints.part_reader import PartReader
from megatron_rl.checkpoints.part_writer import Memory, PartWriter, Settings
from megatron_rl.checkpoints.safe_load import read_index
from megatron_rl.checkpoints.saving import CheckpointSave
from tests.ranks import on_ranks

ARRAY = torch.arange(6 * 5, dtype=torch.float32).view(6, 5) / 7
WHOLE = ArrayLocation("whole", (6, 5), torch.float32, (Box((0, 0), (6, 5)),))
ONE_THREAD = Settings(threads=1, pinned=False, blocks=100)


def alone(value):
    return [value]


def saving(
    path: Path, *, settings: Settings = ONE_THREAD, after=None
) -> tuple[PartWriter, CheckpointSave]:
    """A checkpoint of one rank, to be filled and closed."""
    partial = directory.begin(path)
    writer = PartWriter(partial, 0, 10_000, settings, Memory())
    return writer, CheckpointSave(path, writer, 10_000, 1, {"step": 1}, after)


def written(path: Path, **kwargs) -> Path:
    """The array in two parts, cut in the middle of a row, and beside it what it is rounded to."""
    writer, handle = saving(path, **kwargs)
    rounded = ArrayLocation("rounded", (6, 5), torch.bfloat16, WHOLE.boxes)
    writer.copy(ARRAY.view(-1)[:13], 0, [WHOLE, rounded])
    writer.copy(ARRAY.view(-1)[13:], 13, [WHOLE, rounded])
    writer.add_object("object", part_writer.saved_bytes([{"scale": torch.ones(2)}]))
    writer.add_file("common.pt", part_writer.saved_bytes({"steps": 3}))
    writer.close()
    assert handle.check(alone, wait=True)
    return path


def read_by_torch(path: Path) -> dict[str, torch.Tensor]:
    index = read_index(path).state_dict_metadata
    arrays = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in index.items()
        if hasattr(entry, "size")
    }
    torch_checkpoint.load(arrays, checkpoint_id=path, no_dist=True)
    return arrays


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("blocks", [1, 100])
def test_torch_reads_what_was_written(tmp_path, threads, blocks, monkeypatch):
    monkeypatch.setattr(part_writer, "BLOCK_BYTES", 48)  # 12 numbers: chunks end within rows
    path = written(tmp_path / "step_000001", settings=Settings(threads, False, blocks))
    arrays = read_by_torch(path)
    assert torch.equal(arrays["whole"], ARRAY)
    assert torch.equal(arrays["rounded"], ARRAY.to(torch.bfloat16))
    assert len(list(path.glob("__0_*.distcp"))) == threads
    names = directory.file_names(path)
    assert directory.problem(path) is None and directory.damaged(path, names) is None
    assert sorted(names) == sorted(
        file.name for file in path.iterdir() if file.name != directory.MANIFEST
    ), "no receipt is left"


def test_memory_is_bounded_and_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr(part_writer, "BLOCK_BYTES", 4096)
    memory = Memory()
    taken: list[int] = []
    take = memory.take

    def counted(num_bytes, *, pinned):
        taken.append(num_bytes)
        return take(num_bytes, pinned=pinned)

    monkeypatch.setattr(memory, "take", counted)
    values = torch.arange(100_000, dtype=torch.float32)
    place = ArrayLocation("array", (100_000,), torch.float32, (Box((0,), (100_000,)),))
    for step in (1, 2):
        partial = directory.begin(tmp_path / f"step_00000{step}")
        writer = PartWriter(partial, 0, values.nbytes, Settings(2, False, 3), memory)
        handle = CheckpointSave(tmp_path / f"step_00000{step}", writer, 0, 1, {}, None)
        writer.copy(values, 0, [place])
        writer.close()
        assert handle.check(alone, wait=True)
        assert torch.equal(read_by_torch(tmp_path / f"step_00000{step}")["array"], values)
        assert len(memory._free) <= 3
    assert len(taken) == 2 * 98 and set(taken) == {4096}


def test_any_range_is_read_into_memory_that_is_there(tmp_path):
    path = written(tmp_path / "step_000001")
    for start, end in [(0, 30), (3, 4), (7, 22), (13, 13)]:
        reader = PartReader(path, read_index(path))
        values = torch.full((30,), -1.0)
        reader.want(WHOLE, start, values[start:end])
        reader.want_object("object")
        reader.read()
        want = torch.full((30,), -1.0)
        want[start:end] = ARRAY.view(-1)[start:end]
        assert torch.equal(values, want)
        assert torch.equal(reader.objects["object"][0]["scale"], torch.ones(2))


def test_a_padded_array_of_another_size_gives_zeros_where_it_ends(tmp_path):
    path = written(tmp_path / "step_000001")
    longer = ArrayLocation("whole", (8, 5), torch.float32, (Box((0, 0), (8, 5)),), may_differ=True)
    values = torch.full((40,), -1.0)
    reader = PartReader(path, read_index(path))
    reader.want(longer, 0, values)
    reader.read()
    assert torch.equal(values.view(8, 5)[:6], ARRAY) and values[30:].count_nonzero() == 0


def test_what_is_not_there_is_named(tmp_path):
    path = written(tmp_path / "step_000001")
    cases = {
        "has no other": ArrayLocation("other", (6, 5), torch.float32, WHOLE.boxes),
        r"whole is \(6, 5\) there and \(8, 5\) here": ArrayLocation(
            "whole", (8, 5), torch.float32, (Box((0, 0), (8, 5)),)
        ),
    }
    for said, place in cases.items():
        reader = PartReader(path, read_index(path))
        reader.want(place, 0, torch.empty(5))
        with pytest.raises(ValueError, match=said):
            reader.read()


def test_values_may_change_as_soon_as_they_are_copied(tmp_path):
    writer, handle = saving(tmp_path / "step_000001")
    values = ARRAY.flatten().clone()
    writer.copy(values, 0, [WHOLE])
    values.zero_()
    writer.close()
    assert handle.check(alone, wait=True)
    assert torch.equal(read_by_torch(tmp_path / "step_000001")["whole"], ARRAY)


def test_nothing_is_sealed_before_every_part_is_there(tmp_path):
    path = tmp_path / "step_000001"
    partial = directory.begin(path)
    top = ArrayLocation("whole", (6, 5), torch.float32, (Box((0, 0), (3, 5)),))
    bottom = ArrayLocation("whole", (6, 5), torch.float32, (Box((3, 0), (3, 5)),))
    first, second = (PartWriter(partial, rank, 100, ONE_THREAD, Memory()) for rank in range(2))
    handle = CheckpointSave(path, first, 100, 2, {}, None)
    first.copy(ARRAY.view(-1)[:15], 0, [top])
    first.close()
    first.join()
    assert not handle.check(alone) and not path.exists()
    second.copy(ARRAY.view(-1)[15:], 0, [bottom])
    second.close()
    assert handle.check(alone, wait=True)
    assert torch.equal(read_by_torch(path)["whole"], ARRAY)


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ([(0, 15), (20, 30)], "25 of the 30 elements of whole were written"),
        ([(0, 15), (0, 15)], "whole was written twice at"),
    ],
)
def test_parts_that_are_no_whole_are_not_sealed(tmp_path, ranges, said):
    writer, handle = saving(tmp_path / "step_000001")
    for start, end in ranges:
        writer.copy(ARRAY.view(-1)[start:end], start, [WHOLE])
    writer.close()
    with pytest.raises(RuntimeError, match=f"checkpoint step_000001: rank 0 .*{said}"):
        handle.check(alone, wait=True)
    assert not (tmp_path / "step_000001").exists()


def test_a_sealing_that_is_given_up_ends(tmp_path):
    directory.begin(tmp_path / "step_000001")
    cancelled = threading.Event()
    cancelled.set()
    assert not sealing.seal(tmp_path / "step_000001", 1, {}, cancelled)


def full_disk(folder: Path, name: str) -> None:
    """Every write to the file fails with ENOSPC."""
    (folder / name).symlink_to("/dev/full")


def test_a_full_disk_is_said_and_the_older_checkpoint_stays(tmp_path):
    path = written(tmp_path / "step_000001")
    partial = directory.begin(path)
    full_disk(partial, "__0_0.distcp")
    writer = PartWriter(partial, 0, 10_000, Settings(1, False, 1), Memory())
    handle = CheckpointSave(path, writer, 10_000, 1, {}, None)
    for _ in range(3):  # more than there is room for: what comes after the error is dropped
        writer.copy(torch.zeros(10_000), 0, [WHOLE])
    writer.close()
    with pytest.raises(ValueError, match=r"no space left on the disk of .*step_000001"):
        handle.check(alone, wait=True)
    assert directory.problem(path) is None


def test_an_error_that_comes_when_the_file_is_closed_ends_the_writing(tmp_path):
    """What lies in the buffer of a file, or of its disk, may be refused after the last block."""
    path = tmp_path / "step_000001"
    full_disk(directory.begin(path), "__0_0.distcp")
    partial = path.with_name(path.name + directory.PARTIAL)
    writer = PartWriter(partial, 0, 100, ONE_THREAD, Memory())
    writer.add_object("object", b"far less than the buffer of the file")
    writer.close()
    writer.join(20.0)
    assert not writer._last.is_alive() and isinstance(writer.error, OSError)


def test_a_run_of_lower_priority_than_its_threads_would_have_writes_too(tmp_path, monkeypatch):
    """Only root may take a lower niceness than it has, and a run may be started by nice -n 15."""
    set_priority = os.setpriority

    def as_for_anybody(which: int, who: int, niceness: int) -> None:
        if niceness < os.getpriority(which, who):
            raise PermissionError("only root may do that")
        set_priority(which, who, niceness)

    monkeypatch.setattr(os, "setpriority", as_for_anybody)
    errors: list[BaseException] = []

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        try:
            written(tmp_path / "step_000001")
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors and directory.problem(tmp_path / "step_000001") is None


@on_ranks(2)
def test_every_rank_learns_that_one_could_not_write(tmp_path):
    import torch.distributed as dist

    rank = dist.get_rank()
    path = tmp_path / "step_000001"

    def gather(value):
        values = [None, None]
        dist.all_gather_object(values, value)
        return values

    if rank == 0:
        full_disk(directory.begin(path), "__1_0.distcp")
    dist.barrier()
    partial = path.with_name(path.name + directory.PARTIAL)
    writer = PartWriter(partial, rank, 100, ONE_THREAD, Memory())
    handle = CheckpointSave(path, writer, 100, 2, {} if rank == 0 else None, None)
    boxes = (Box((3 * rank, 0), (3, 5)),)
    own = ArrayLocation("whole", (6, 5), torch.float32, boxes)
    writer.copy(ARRAY.view(-1)[15 * rank : 15 * rank + 15], 0, [own])
    writer.close()
    with pytest.raises(ValueError, match="no space left on the disk"):
        handle.check(gather, wait=True)
    assert not path.exists()


def write_until_killed(path: Path, begun) -> None:
    """Copies a checkpoint, tells that its files are being written, and never gets done."""
    writer, _ = saving(path, settings=Settings(1, False, 1))
    begun.set()
    for number in range(10**6):
        place = ArrayLocation(f"array {number}", (2**22,), torch.float32, (Box((0,), (2**22,)),))
        writer.copy(torch.full((2**22,), float(number)), 0, [place])


def test_a_writer_that_is_killed_leaves_the_last_whole_checkpoint(tmp_path):
    root = tmp_path / "checkpoints"
    old = written(root / "step_000001")
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    child = context.Process(target=write_until_killed, args=(root / "step_000002", begun))
    child.start()
    try:
        assert begun.wait(60)
        half_written = root / "step_000002.tmp-partial" / "__0_0.distcp"
        deadline = time.monotonic() + 60
        while not half_written.exists() or half_written.stat().st_size < 2**24:
            assert time.monotonic() < deadline and child.is_alive()
            time.sleep(0.01)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert child.exitcode == -signal.SIGKILL and half_written.stat().st_size >= 2**24
    assert directory.newest_valid(root) == old
    assert directory.damaged(old, directory.file_names(old)) is None
    directory.clean(root)
    assert sorted(path.name for path in root.iterdir()) == ["step_000001"]


def test_threads_wait_for_copies_on_the_device_of_the_run(tmp_path, monkeypatch):
    """A new thread is on device 0, where waiting would open a context for every other rank."""
    devices: dict[int, int] = {}
    waited: list[int | None] = []

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None:
            waited.append(devices.get(threading.get_ident()))

    class OrdinaryMemory(Memory):
        def take(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
            return super().take(num_bytes, pinned=False)

    def set_device(index: int) -> None:
        devices[threading.get_ident()] = index

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    path = tmp_path / "step_000001"
    writer = PartWriter(directory.begin(path), 0, 120, Settings(2, True, 4), OrdinaryMemory())
    writer.copy(ARRAY.view(-1), 0, [WHOLE])
    writer.close()
    writer.join()
    assert writer.error is None and waited and set(waited) == {3}
