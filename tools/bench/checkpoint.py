"""What writing and reading a checkpoint costs every rank: gathered, as it was, against shares.

    torchrun --standalone --nproc-per-node 2 tools/bench/checkpoint.py --folder DIR

A random model in data parallel with a distributed optimizer (its float32 weights and both moments
are in the checkpoint). Ways of writing, in turns:

gathered          megatron gathers the optimizer, the first rank writes; see gathered_checkpoint.py
shares, waited    every rank writes its share, two blocks of host memory at a time
shares, behind    the same, copied first and written by threads; nothing else runs meanwhile

Bytes are those of the files a rank wrote. Memory is the highest resident set above that before the
call, by the parameters of the rank, of a first write, which is not counted otherwise: the blocks of
host memory are kept for the next one. "blocks" is the time until the caller goes on, "whole" until
the checkpoint is sealed; their ratio is the share of the write that a step waits for. Processor
seconds say more where other programs take the cores: those of the thread that calls, until it goes
on, and of all threads of the rank. Files go to the disk of --folder (fsync) in every way. Reading:
seconds and bytes that the process asked the system for, from files that are in its cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gathered_checkpoint
import torch
from gpu_model import (
    SHAPE_1B,
    add_options,
    build_policy,
    policy_gradient,
    random_batch,
    read_config,
    table,
    write_model,
)
from machine import Watch, description, in_turns, resident_bytes, restart_peak, spread

from megatron_rl.checkpoints.part_writer import Memory
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.runtime import launch
from megatron_rl.runtime.launch import World

SHAPE = SHAPE_1B | dict(layers=6, hidden=1024, ffn=2816, heads=16, kv_heads=4, vocab=8192)
MAX_TOKENS = 128


@dataclass(frozen=True)
class Cost:
    """Of one call, on every rank."""

    blocks_s: float
    whole_s: float
    caller_cpu_s: list[float]  # of the thread that calls, until it goes on
    cpu_s: list[float]
    peak_bytes: list[int]
    file_bytes: list[int] = field(default_factory=list)


def read_bytes() -> int:
    """What this process has asked the system to read, from the disk or its cache."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    return int(text.partition("rchar:")[2].split()[0])


def measured(world: World, begin: Callable[[], Callable[[], object]]) -> Cost:
    """``begin`` returns when the caller may go on, and what it returns when all is done."""
    gc.collect()
    world.barrier()
    restart_peak()
    before = resident_bytes("VmRSS")
    cpu = time.process_time()
    caller = time.thread_time()
    start = time.perf_counter()
    end = begin()
    caller = time.thread_time() - caller
    blocks = time.perf_counter() - start
    end()
    whole = time.perf_counter() - start
    rows = world.all_gather(
        (blocks, whole, caller, time.process_time() - cpu, resident_bytes("VmHWM") - before)
    )
    return Cost(
        max(row[0] for row in rows),
        max(row[1] for row in rows),
        [row[2] for row in rows],
        [row[3] for row in rows],
        [row[4] for row in rows],
    )


class Ways:
    """The ways of writing one policy's checkpoint below ``folder``."""

    def __init__(self, world: World, policy: MegatronPolicy, folder: Path) -> None:
        self._world = world
        self._policy = policy
        self._folder = folder

    def writing(self, *, fresh: bool = False) -> dict[str, Callable[[], Cost]]:
        """``fresh``: with no memory kept from an earlier write."""
        begins: dict[str, Callable[[Path], Callable[[], object]]] = {
            "gathered": self._gathered,
            "shares, waited": self._waited,
            "shares, behind": self._behind,
        }
        return {name: partial(self._written, name, begin, fresh) for name, begin in begins.items()}

    def path(self, name: str) -> Path:
        return self._folder / name.replace(", ", "_") / "step_000001"

    def _gathered(self, path: Path) -> Callable[[], object]:
        gathered_checkpoint.save(self._policy, path, {"step": 1})
        return lambda: None

    def _waited(self, path: Path) -> Callable[[], object]:
        self._policy.save(path, {"step": 1})
        return lambda: None

    def _behind(self, path: Path) -> Callable[[], object]:
        saving = self._policy.start_save(path, {"step": 1})
        return lambda: saving.check(self._world.all_gather, wait=True)

    def _written(
        self, name: str, begin: Callable[[Path], Callable[[], object]], fresh: bool
    ) -> Cost:
        if fresh:
            self._policy.checkpoint_memory = Memory()
        path = self.path(name)
        self._world.from_main(lambda: shutil.rmtree(path.parent, ignore_errors=True))
        cost = measured(self._world, partial(begin, path))
        sizes = [
            sum(file.stat().st_size for file in path.glob(f"__{rank}_*"))
            for rank in range(self._world.size)
        ]
        return replace(cost, file_bytes=sizes)

    def reading(self) -> dict[str, Callable[[], tuple[Cost, list[int]]]]:
        gathered, shares = self.path("gathered"), self.path("shares, behind")
        return {
            "gathered": partial(
                self._read, partial(gathered_checkpoint.load, self._policy, gathered)
            ),
            "shares": partial(self._read, partial(self._policy.load, shares)),
            "shares, of what was gathered": partial(
                self._read, partial(self._policy.load, gathered)
            ),
        }

    def _read(self, load: Callable[[], object]) -> tuple[Cost, list[int]]:
        before = read_bytes()

        def begin() -> Callable[[], object]:
            load()
            return lambda: None

        cost = measured(self._world, begin)
        return cost, self._world.all_gather(read_bytes() - before)


def writing_row(name: str, first: Cost, costs: list[Cost], parameters: int) -> dict[str, Any]:
    last = costs[-1]
    total = sum(last.file_bytes)
    return {
        "way": name,
        "MB by rank": " / ".join(f"{size / 1e6:.0f}" for size in last.file_bytes),
        "% by rank": " / ".join(f"{100 * size / total:.1f}" for size in last.file_bytes),
        "peak B/parameter": f"{max(first.peak_bytes) / parameters:.2f}",
        "blocks s": spread([cost.blocks_s for cost in costs]).text(),
        "whole s": spread([cost.whole_s for cost in costs]).text(),
        "blocks / whole %": spread([100 * cost.blocks_s / cost.whole_s for cost in costs]).text(0),
        "processor s of the caller": spread([max(cost.caller_cpu_s) for cost in costs]).text(),
        "of a rank": spread([max(cost.cpu_s) for cost in costs]).text(),
    }


def reading_row(name: str, costs: list[tuple[Cost, list[int]]], parameters: int) -> dict[str, Any]:
    peaks = [max(cost.peak_bytes) / parameters for cost, _ in costs]
    return {
        "way": name,
        "MB read by rank": " / ".join(f"{size / 1e6:.0f}" for size in costs[-1][1]),
        "peak B/parameter": spread(peaks).text(),
        "s": spread([cost.whole_s for cost, _ in costs]).text(),
        "processor s a rank": spread([max(cost.cpu_s) for cost, _ in costs]).text(),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, SHAPE)
    parser.add_argument("--precision", default="fp32" if not torch.cuda.is_available() else "bf16")
    parser.add_argument("--params", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    world = launch.start()
    watch = Watch()
    model = world.from_main(lambda: write_model(options))
    overrides = ["parallel=single", "parallel.distributed_optimizer=true"]
    overrides += [f"precision={options.precision}", f"precision.params={options.params}"]
    policy = build_policy(read_config(model, *overrides), MAX_TOKENS)
    parameters = sum(item.numel() for module in policy.modules for item in module.parameters())
    rows = random_batch(2 * world.size, MAX_TOKENS // 2, options.vocab)
    own = list(range(2 * world.rank, 2 * world.rank + 2))
    policy.update_microbatches(rows, [own], policy_gradient)
    ways = Ways(world, policy, options.folder / "written")
    first = in_turns(ways.writing(fresh=True), 1)
    written = in_turns(ways.writing(), options.repeats)
    read = in_turns(ways.reading(), options.repeats)
    load = watch.load(sum(world.all_gather(watch.own_since())))
    if world.is_main:
        writing = [
            writing_row(name, first[name][0], costs, parameters) for name, costs in written.items()
        ]
        reading = [reading_row(name, costs, parameters) for name, costs in read.items()]
        print(description(), "; torch", torch.__version__, "; ", load, sep="")
        print(f"{parameters / 1e6:.1f} million parameters in {options.params}, {world.size} ranks")
        print(f"\n{table(writing)}\n\n{table(reading)}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([*writing, *reading], indent=1), encoding="utf-8")
    launch.exit_process(0)


if __name__ == "__main__":
    main()
