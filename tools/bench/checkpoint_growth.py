"""How the work around a checkpoint grows with ranks: cutting, receipts, sealing, index, reading.

    python tools/bench/checkpoint_growth.py --model qwen2.5-7b --train tp=4,dp=2 tp=4,dp=256

One process does for every rank of a layout what that rank does beside moving bytes, with the code
of a run: it cuts its tensors, copies them (tensors without memory) into blocks, and leaves a
receipt. Then the parts are sealed, files of the right length and no content among them, and some
ranks plan what they read. Weights in bfloat16, masters and moments in float32, distributed
optimizer without overlap, writers as beside a GPU. Seconds are CPU seconds: of cutting and copying
the median of all ranks, of planning to read the most of three; memory is resident, above what the
process had before.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from checkpoint_layouts import Layout, stored_by
from gpu_model import table
from machine import Watch, description, resident_bytes, restart_peak

from megatron_rl.checkpoints import directory, sealing
from megatron_rl.checkpoints.part_reader import PartReader
from megatron_rl.checkpoints.part_writer import (
    BLOCK_BYTES,
    Memory,
    PartWriter,
    Settings,
    saved_bytes,
)
from megatron_rl.checkpoints.receipt import Receipt, StoredItem, receipt_path
from megatron_rl.checkpoints.safe_load import INDEX, read_index
from megatron_rl.planning.training_shards import parse_training
from megatron_rl.policy.state import checkpoint
from megatron_rl.policy.state.stored_state import STATE, StoredParameter
from tools.plan_sync import architecture, even_out

DIGEST = "0" * 32
MIB = 2**20


class MetaMemory(Memory):
    """Blocks that take no memory."""

    def take(self, num_bytes: int, *, pinned: bool) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def give(self, block: Tensor) -> None:
        pass


class IndexWriter(PartWriter):
    """Writes files of the right length without content."""

    overhead = len(saved_bytes(torch.empty(0)))  # bytes of a tensor in a file beside its elements

    def _work(self, number: int) -> None:
        name = f"__{self._rank}_{number}.distcp"
        stored: list[StoredItem] = []
        position = 0
        while (block := self._queues[number].get()) is not None:
            for chunk, _, _ in block.chunks:
                length = math.prod(chunk.sizes) * chunk.dtype.itemsize + self.overhead
                stored.append(StoredItem(chunk.key, chunk, name, position, length))
                position += length
            self._room.release()
        with (self._folder / name).open("wb") as file:
            file.truncate(position)
        self._receipts[number] = Receipt({name: DIGEST}, stored)

    @property
    def num_chunks(self) -> int:
        return sum(len(receipt.stored) for receipt in self._receipts)


def write_part(folder: Path, rank: int, stored: Sequence[StoredParameter]) -> int:
    """Leaves the receipt of a rank; how many chunks it names."""
    num_bytes = checkpoint._about_bytes(stored)
    blocks = max(checkpoint.WAITING_BLOCKS, math.ceil(num_bytes / BLOCK_BYTES))
    settings = Settings(checkpoint.WRITER_THREADS["cuda"], False, blocks)
    writer = IndexWriter(folder, rank, num_bytes, settings, MetaMemory())
    checkpoint._copy(writer, stored, None)
    writer.close()
    writer.join()
    if writer.error is not None:
        raise writer.error
    return writer.num_chunks


def pieces_read(path: Path, index: Metadata, layout: Layout, rank: int) -> int:
    """How many pieces of files a rank would read."""
    reader = PartReader(path, index)
    for item in stored_by(layout, rank):
        place, _ = layout.data_parallel(rank, is_expert=item.is_expert)
        first, end = item.reads.get(place, (0, 0))
        reader.want(item.place(torch.bfloat16), first, item.values[first:end])
        assert item.states is not None
        for name, values in item.states.get().items():
            reader.want(item.place(values.dtype, f"{STATE}{name}."), item.states.span[0], values)
    return len(reader.items())


class Measured:
    """CPU seconds of the process, and what its resident memory grew to meanwhile."""

    def __enter__(self) -> Measured:
        gc.collect()
        restart_peak()
        self._memory = resident_bytes("VmRSS")
        self._start = time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.process_time() - self._start
        self.mib = (resident_bytes("VmHWM") - self._memory) / MIB


Row = dict[str, Any]


def written(layout: Layout, path: Path) -> Row:
    """Writes a checkpoint of all ranks; what that cost."""
    ranks = layout.layout.world_size
    cut_s: list[float] = []
    write_s: list[float] = []
    chunks: list[int] = []
    partial = directory.begin(path)
    for rank in range(ranks):
        start = time.process_time()
        stored = stored_by(layout, rank)
        cut = time.process_time()
        chunks.append(write_part(partial, rank, stored))
        cut_s.append(cut - start)
        write_s.append(time.process_time() - cut)
    receipts = [receipt_path(partial, rank).stat().st_size for rank in range(ranks)]
    del stored
    with Measured() as seal:
        sealing.seal(path, ranks, {}, threading.Event())
    sizes = {name: (path / name).stat().st_size for name in (INDEX, directory.MANIFEST)}
    return {
        "ranks": ranks,
        "cut s": f"{statistics.median(cut_s):.3f}",
        "chunks of a rank": max(chunks),
        "copy, receipt s": f"{statistics.median(write_s):.3f}",
        "chunks": f"{sum(chunks):,}",
        "receipts MB": f"{sum(receipts) / 1e6:.1f}",
        "seal s": f"{seal.seconds:.1f}",
        "seal MiB": f"{seal.mib:.0f}",
        "index MB": f"{sizes[INDEX] / 1e6:.1f}",
        "manifest MB": f"{sizes[directory.MANIFEST] / 1e6:.2f}",
    }


def read(layout: Layout, path: Path) -> Row:
    """What reading it costs a rank, beside reading the tensors."""
    ranks = layout.layout.world_size
    with Measured() as reading:
        index = read_index(path)
    plan_s: list[float] = []
    pieces: list[int] = []
    for rank in sorted({0, ranks // 2 + 1, ranks - 1}):
        start = time.process_time()
        pieces.append(pieces_read(path, index, layout, rank))
        plan_s.append(time.process_time() - start)
    return {
        "read index s": f"{reading.seconds:.1f}",
        "read index MiB": f"{reading.mib:.0f}",
        "pieces read": max(pieces),
        "plan reading s": f"{max(plan_s):.2f}",
    }


def alone(action: Callable[[Layout, Path], Row], layout: Layout, path: Path) -> Row:
    """In a process of its own, which finds no memory that another one has used before."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(action, (layout, path))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True, nargs="+", help="layouts, as of plan_sync.py")
    options = parser.parse_args()
    # Tensors without memory have no bits: masters count as the weights they are in a run.
    checkpoint.same_bits = lambda masters, weights: True
    torch.set_num_threads(1)
    watch = Watch()
    arch = architecture(options.model)
    rows = []
    for text in options.train:
        layout = Layout(arch, even_out(arch, parse_training("--train", text)))
        name = f"{options.model} {text.replace(',', ' ').replace('=', '')}"
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "step_000001"
            made = alone(written, layout, path)
            rows.append({"layout": name} | made | alone(read, layout, path))
    print(f"{description()}; torch {torch.__version__}; {watch.load()}.\n\n{table(rows)}")


if __name__ == "__main__":
    main()
