"""What a training checkpoint costs every rank: ours against megatron-core's own.

    torchrun --standalone --nproc-per-node 2 tools/bench/checkpoint.py --folder DIR

A random model in data parallel with a distributed optimizer (its float32 weights and both moments
are in the checkpoint). Ways of writing, in turns; "waited" returns when all is on the disk:

shares               every rank writes its share, with digests; ours
megatron             its fully parallel save, in the kind that any layout reads: gathered first
megatron, same layout   the kind that no other tensor or pipeline layout reads: nothing gathered

"behind": the same, written while the caller continues, by threads (ours, from copies) or by forked
processes (megatron's, which share the pages of the trainer).

Bytes are those of all files. Memory: of a first write, not counted otherwise, in which the policy
is updated meanwhile, as a run does; resident memory of a rank above that before, at the most, and
the private pages of the processes it forked, which grow as the update changes what they share; by
the parameters of the rank. "blocks" is the time until the caller continues, "whole" until the
checkpoint can be loaded. Processor seconds say more where other programs take the cores: of the
rank and of all its children. Files go to the disk of --folder (fsync) in every way; they are read
from the system's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_model import (
    SHAPE_1B,
    add_options,
    build_policy,
    policy_gradient,
    random_batch,
    read_config,
    show,
    write_model,
)
from machine import Watch, description, in_turns, own_seconds, resident_bytes, restart_peak, spread
from megatron_checkpoint import FullyParallel

from megatron_rl.checkpoints.part_writer import Memory
from megatron_rl.passes import LocalBatch
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.runtime import launch
from megatron_rl.runtime.launch import World

SHAPE = SHAPE_1B | dict(layers=6, hidden=1024, ffn=2816, heads=16, kv_heads=4, vocab=8192)
MAX_TOKENS = 128


# Of a distributed optimizer's state.
SAME_LAYOUT = "dp_reshardable"


@dataclass(frozen=True)
class Cost:
    """Of one call, on every rank."""

    blocks_s: float
    whole_s: float
    cpu_s: list[float]
    peak_bytes: list[int]
    forked_bytes: list[int]
    file_bytes: int = 0


class Forked:
    """In its ``with``: the most private memory that descendants of this process had at a time."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Forked:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.most_bytes = max(self.most_bytes, sum(map(private_bytes, descendants("self"))))


def descendants(process: str) -> Iterator[str]:
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # one that has just ended
            for child in task.read_text(encoding="ascii").split():
                yield child
                yield from descendants(child)


def private_bytes(process: str) -> int:
    """0 for a process that has just ended."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
        lines = [line for line in text.splitlines() if line.startswith("Private_")]
        return sum(int(line.split()[1]) for line in lines) * 1024
    return 0


def measured(
    world: World,
    begin: Callable[[], Callable[[], object]],
    meanwhile: Callable[[], object] | None = None,
) -> Cost:
    """``begin`` returns when the caller may continue, and what it returns when all is done.
    ``meanwhile`` runs in between, and memory is watched."""
    gc.collect()
    world.barrier()
    restart_peak()
    before = resident_bytes("VmRSS")
    cpu = own_seconds()
    watched = Forked() if meanwhile is not None else None
    start = time.perf_counter()
    with watched or contextlib.nullcontext():
        end = begin()
        blocks = time.perf_counter() - start
        if meanwhile is not None:
            meanwhile()
        end()
    whole = time.perf_counter() - start
    forked = 0 if watched is None else watched.most_bytes
    peak = resident_bytes("VmHWM") - before
    rows = world.all_gather((blocks, whole, own_seconds() - cpu, peak, forked))
    return Cost(
        max(row[0] for row in rows),
        max(row[1] for row in rows),
        *([row[number] for row in rows] for number in (2, 3, 4)),
    )


class Ways:
    """The ways of writing one policy's checkpoint below ``folder``.

    Args:
        update: changes all of the policy's state.
    """

    def __init__(
        self, world: World, policy: MegatronPolicy, folder: Path, update: Callable[[], object]
    ) -> None:
        self._world = world
        self._policy = policy
        self._folder = folder
        self._update = update
        self._any = FullyParallel(policy)
        self._same = FullyParallel(policy, SAME_LAYOUT)

    def writing(self, *, fresh: bool = False) -> dict[str, Callable[[], Cost]]:
        """``fresh``: with no memory kept from an earlier write, and memory watched."""
        begins: dict[str, Callable[[Path], Callable[[], object]]] = {
            "shares, waited": lambda path: _done(self._policy.save(path, {"step": 1})),
            "shares, behind": self._behind,
            "megatron, waited": lambda path: _done(self._any.save(path)),
            "megatron, behind": self._any.start_save,
            "megatron, same layout, waited": lambda path: _done(self._same.save(path)),
            "megatron, same layout, behind": self._same.start_save,
        }
        return {name: partial(self._written, name, begin, fresh) for name, begin in begins.items()}

    def path(self, name: str) -> Path:
        return self._folder / name.replace(", ", "_").replace(" ", "_") / "step_000001"

    def _behind(self, path: Path) -> Callable[[], object]:
        saving = self._policy.start_save(path, {"step": 1})
        return lambda: saving.check(self._world.all_gather, wait=True)

    def _written(
        self, name: str, begin: Callable[[Path], Callable[[], object]], fresh: bool
    ) -> Cost:
        if fresh:
            self._policy.checkpoint_memory = Memory()
        path = self.path(name)

        def clear() -> None:
            shutil.rmtree(path.parent, ignore_errors=True)
            path.mkdir(parents=True)

        self._world.from_main(clear)
        # A save that is waited for ends before anything changes.
        is_behind = name.endswith("behind")
        update = self._update if is_behind else _nothing
        cost = measured(self._world, partial(begin, path), update if fresh else None)
        return replace(cost, file_bytes=sum(file.stat().st_size for file in path.iterdir()))

    def reading(self) -> dict[str, Callable[[], Cost]]:
        loads = {
            "shares, behind": self._policy.load,
            "megatron, behind": self._any.load,
            "megatron, same layout, behind": self._same.load,
        }
        return {
            name.removesuffix(", behind"): partial(self._read, load, self.path(name))
            for name, load in loads.items()
        }

    def _read(self, load: Callable[[Path], object], path: Path) -> Cost:
        return measured(self._world, lambda: _done(load(path)))


def _done(result: object) -> Callable[[], object]:
    return lambda: result


def _nothing() -> None:
    pass


def writing_row(name: str, first: Cost, costs: list[Cost], parameters: int) -> dict[str, Any]:
    return {
        "way": name,
        "MB": f"{costs[-1].file_bytes / 1e6:.0f}",
        "B/parameter of the rank": f"{max(first.peak_bytes) / parameters:.2f}",
        "of its forks": f"{max(first.forked_bytes) / parameters:.2f}",
        "blocks s": spread([cost.blocks_s for cost in costs]).text(),
        "whole s": spread([cost.whole_s for cost in costs]).text(),
        "processor s of a rank": spread([max(cost.cpu_s) for cost in costs]).text(),
    }


def reading_row(name: str, costs: list[Cost], parameters: int) -> dict[str, Any]:
    return {
        "way": name,
        "peak B/parameter": spread([max(cost.peak_bytes) / parameters for cost in costs]).text(),
        "s": spread([cost.whole_s for cost in costs]).text(),
        "processor s of a rank": spread([max(cost.cpu_s) for cost in costs]).text(),
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
    overrides += options.override
    policy = build_policy(read_config(model, *overrides), MAX_TOKENS)
    parameters = sum(item.numel() for module in policy.modules for item in module.parameters())
    rows = random_batch(2 * world.size, MAX_TOKENS // 2, options.vocab)
    own = list(range(2 * world.rank, 2 * world.rank + 2))
    update = partial(policy.update, LocalBatch(rows, [own]), policy_gradient)
    update()
    ways = Ways(world, policy, options.folder / "written", update)
    first = in_turns(ways.writing(fresh=True), 1)
    written = in_turns(ways.writing(), options.repeats)
    read = in_turns(ways.reading(), options.repeats)
    load = watch.load(sum(world.all_gather(watch.own_since())))
    if world.is_main:
        writing = [
            writing_row(name, first[name][0], costs, parameters) for name, costs in written.items()
        ]
        reading = [reading_row(name, costs, parameters) for name, costs in read.items()]
        print(description(), "; torch ", torch.__version__, "; ", load, sep="")
        print(
            f"{parameters / 1e6:.1f} million parameters in {options.params}, {world.size} ranks\n"
        )
        show([writing, reading], options)
    launch.exit_process(0)


if __name__ == "__main__":
    main()
