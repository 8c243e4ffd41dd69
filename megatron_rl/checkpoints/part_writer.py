"""What one rank writes of a checkpoint: copied by its caller, written by threads.

The caller's values are copied into blocks of host memory; from then on they may change. Threads
write the blocks into files, force these to the disk, and leave a receipt that names every file and
chunk, with digests. A block is used again as soon as it is written.
"""

import io
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from megatron_rl.checkpoints.chunks import ArrayLocation, Chunk, Range
from megatron_rl.checkpoints.directory import to_disk
from megatron_rl.checkpoints.sealing import Receipt, StoredItem, receipt_path

# Large enough for a disk; a power of 2, in which torch takes page-locked memory.
BLOCK_BYTES = 2**25
_NICENESS = 10  # of the threads; higher yields more, up to 19
_ALIGNMENT = 16
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    """How a rank writes.

    Args:
        threads: each has a file of its own.
        pinned: the values are on a CUDA device, and are copied to page-locked memory.
        blocks: of host memory at the most; who copies more waits until one is written.
    """

    threads: int
    pinned: bool
    blocks: int


class Memory:
    """Blocks of host memory that are free, kept for the next checkpoint: new memory takes several
    times as long to fill, and page-locked memory longer still."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int, *, pinned: bool) -> Tensor:
        """A block; free blocks of another size are released."""
        with self._lock:
            self._free = [block for block in self._free if block.numel() == num_bytes]
            if self._free:
                return self._free.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)

    def give(self, block: Tensor) -> None:
        with self._lock:
            self._free.append(block)


@dataclass
class _Block:
    """A piece of host memory, and what of it is to be written: (chunk, its bytes, their dtype)."""

    memory: Tensor
    used: int = 0
    chunks: list[tuple[Chunk, Range, torch.dtype]] = field(default_factory=list)
    objects: list[tuple[str, bytes]] = field(default_factory=list)
    copied: Any = None  # CUDA event


class PartWriter:
    """Writes rank ``rank``'s part of the checkpoint in ``folder``: ``num_bytes``, more or less.

    One thread calls ``copy``, ``add_object`` and ``add_file``, then ``close``; the part is written
    when ``join`` returns and ``error`` is None. An error in a thread ends the writing; what is
    added after it is dropped.
    """

    def __init__(
        self, folder: Path, rank: int, num_bytes: int, settings: Settings, memory: Memory
    ) -> None:
        self.error: BaseException | None = None
        self._memory = memory
        self._folder = folder
        self._rank = rank
        self._settings = settings
        # A small part is spread over all threads: blocks are no larger than the share of each. Nor
        # are they ever empty, else no element would fit into one.
        even = -(-num_bytes // settings.threads) + _ALIGNMENT
        self._block_bytes = min(BLOCK_BYTES, -(-even // _ALIGNMENT) * _ALIGNMENT)
        self._room = threading.Semaphore(settings.blocks)
        self._block: _Block | None = None
        self._blocks = 0
        self._small_files: list[tuple[str, bytes]] = []
        self._receipt = Receipt()
        self._device = torch.cuda.current_device() if settings.pinned else None
        self._queues: list[queue.SimpleQueue[_Block | None]] = []
        self._threads: list[threading.Thread] = []
        for number in range(settings.threads):
            blocks: queue.SimpleQueue[_Block | None] = queue.SimpleQueue()
            arguments = (blocks, f"__{rank}_{number}.distcp")
            self._queues.append(blocks)
            self._threads.append(threading.Thread(target=self._work, args=arguments, daemon=True))
            self._threads[-1].start()
        self._last = threading.Thread(target=self._finish, daemon=True)

    def copy(self, values: Tensor, start: int, places: Sequence[ArrayLocation]) -> None:
        """Takes the elements from ``start`` on of a tensor, one row of ``values``.

        Args:
            places: where they belong; a place of another dtype gets them converted.
        """
        position = 0
        while position < values.numel() and self.error is None:
            block = self._current()
            # Whole elements that fit: at least one, for full blocks are handed over below.
            count = (block.memory.numel() - block.used) // values.element_size()
            if count < values.numel() - position:
                count = places[0].whole_rows(start + position, count)
            piece = values[position : position + count]
            end = block.used + piece.nbytes
            target = block.memory[block.used : end].view(values.dtype)
            target.copy_(piece, non_blocking=self._settings.pinned)
            for place in places:
                first = start + position
                for chunk, (low, high) in place.chunks(first, first + piece.numel()):
                    begin = block.used + (low - first) * values.element_size()
                    size = (high - low) * values.element_size()
                    block.chunks.append((chunk, (begin, begin + size), values.dtype))
            # The next tensor may have larger elements, and a view of them needs an aligned begin.
            block.used = -(-end // _ALIGNMENT) * _ALIGNMENT
            position += piece.numel()
            if position < values.numel() or block.used + _ALIGNMENT > block.memory.numel():
                self._hand_over()

    def add_object(self, key: str, data: bytes) -> None:
        """Takes an object among the arrays, as torch.save wrote it."""
        self._current().objects.append((key, data))

    def add_file(self, name: str, data: bytes) -> None:
        """Takes a whole small file."""
        self._small_files.append((name, data))

    def close(self) -> None:
        """Ends the part; what was copied is complete when this returns."""
        self._hand_over()
        if self._settings.pinned:
            torch.cuda.synchronize()
        for blocks in self._queues:
            blocks.put(None)
            blocks.put(None)  # for a thread whose file is refused when it is closed: see ``_work``
        self._last.start()

    def join(self, within_s: float | None = None) -> None:
        """Waits until the part is written, or has failed."""
        self._last.join(within_s)

    def _current(self) -> _Block:
        if self._block is None:
            self._room.acquire()
            self._block = _Block(self._memory.take(self._block_bytes, pinned=self._settings.pinned))
        return self._block

    def _hand_over(self) -> None:
        block = self._block
        if block is None:
            return
        if self._settings.pinned:
            block.copied = torch.cuda.Event()
            block.copied.record()
        # Threads take turns, so that their files grow alike.
        self._queues[self._blocks % len(self._queues)].put(block)
        self._blocks += 1
        self._block = None

    def _work(self, blocks: queue.SimpleQueue[_Block | None], name: str) -> None:
        _yield_to_the_run()
        if self._device is not None:
            # A new thread is on device 0: waiting for an event there would open a context, half a
            # GiB for each rank that has another device.
            torch.cuda.set_device(self._device)
        digest = xxhash.xxh3_128()  # ``runtime.digest.file_digest``, without reading the file again
        try:
            with (self._folder / name).open("wb", buffering=_BUFFER_BYTES) as file:
                for block in iter(blocks.get, None):
                    try:
                        for key, chunk, data in _items(block):
                            item = StoredItem(key, chunk, name, file.tell(), len(data))
                            self._receipt.stored.append(item)
                            file.write(data)
                            digest.update(data)
                    finally:
                        self._give_back(block)
                file.flush()
                os.fsync(file.fileno())
            self._receipt.digests[name] = digest.hexdigest()
        except Exception as error:  # noqa: BLE001 (kept in ``error``, raised by the caller)
            self.error = self.error or error
            # What still comes is dropped, so that no caller waits for a free block.
            for block in iter(blocks.get, None):
                self._give_back(block)

    def _give_back(self, block: _Block) -> None:
        self._memory.give(block.memory)
        self._room.release()

    def _finish(self) -> None:
        for thread in self._threads:
            thread.join()
        if self.error is not None:
            return
        try:
            for name, data in self._small_files:
                _write_file(self._folder / name, data)
                self._receipt.digests[name] = xxhash.xxh3_128(data).hexdigest()
            # Complete when it has its name: then it may be read.
            path = receipt_path(self._folder, self._rank)
            partial = path.with_name(f"{path.name}.tmp")
            _write_file(partial, self._receipt.to_json())
            partial.rename(path)
            to_disk(self._folder)
        except Exception as error:  # noqa: BLE001 (as in ``_work``)
            self.error = error


def _yield_to_the_run() -> None:
    """Lowers the priority of this thread: where cores are few, the run comes first.

    On Linux a thread has a niceness of its own, named by its number as a process is. Threads begin
    with that of the run, which may be higher already (``nice -n 15 torchrun ...``), and only root
    may take a lower one.
    """
    thread = threading.get_native_id()
    niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
    os.setpriority(os.PRIO_PROCESS, thread, niceness)


def saved_bytes(value: Any) -> bytes:
    """``value`` as torch.save writes it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _items(block: _Block) -> Iterator[tuple[str, Chunk | None, bytes]]:
    """Key, chunk and bytes of all that is to be written of it."""
    if block.copied is not None:
        # Copies into page-locked memory are only queued; the event is after those of this block.
        block.copied.synchronize()
    for key, data in block.objects:
        yield key, None, data
    for chunk, (begin, end), dtype in block.chunks:
        # torch.save writes the whole storage of a tensor: this one has the chunk alone in it,
        # without a copy where no conversion is due.
        alone = torch.from_numpy(block.memory.numpy()[begin:end])
        values = alone.view(dtype).view(tuple(chunk.sizes)).to(getattr(torch, chunk.dtype))
        yield chunk.key, chunk, saved_bytes(values)


def _write_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    to_disk(path)
