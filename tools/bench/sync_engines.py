"""Whole weight syncs from a Megatron policy into vLLM engines in the same processes: reshard beside
gather, each with and without digests.

    torchrun --standalone --nproc-per-node 2 tools/bench/sync_engines.py --folder DIR \\
        --override parallel=tp2

Everything that a step of training waits for is timed: the movement, vLLM's own work on the weights
that came, the digests. The ways take turns, in another order each time. The least they must agree
on, the greedy answers of the engine, is compared. Memory: most of a process during a sync above
what it held before, the process that needed most. Digests: share of the time spent in them and in
comparing them, on rank 0.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from gpu_model import EOS, add_options, build_policy, read_config, show, write_model
from machine import Watch, description, spread

from megatron_rl.config.schema import Config
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.protocols import WeightSync
from megatron_rl.runtime import launch
from megatron_rl.runtime.launch import World
from megatron_rl.trainer.build import build_sync
from megatron_rl.types import Prompt, Sampling, SyncReport
from megatron_rl.weight_sync import buckets, gather, transport

SHAPE = dict(layers=8, hidden=1024, ffn=4096, heads=16, kv_heads=4, vocab=32000)
WAYS = {
    "gather": ("gather", False),
    "gather, digests": ("gather", True),
    "reshard": ("reshard", False),
    "reshard, digests": ("reshard", True),
}
GREEDY = Sampling(1, 8, temperature=0.0, stop_token_ids=(EOS,))
PROMPTS = [Prompt("p", tuple(range(3, 19)), "", "random")]


def with_way(config: Config, method: str, verify: bool) -> Config:
    changed = config.weight_sync.model_copy(update={"method": method, "verify": verify})
    return config.model_copy(update={"weight_sync": changed})


def peak_bytes(reset: bool = False) -> int:
    """Most memory in use since the last reset: of the device, or resident in the process."""
    if torch.cuda.is_available():
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def counted(places: dict[ModuleType, tuple[str, ...]]) -> list[float]:
    """Seconds spent in these functions, in the one element of the list, from now on."""
    spent = [0.0]

    def clocked(function: Callable) -> Callable:
        def call(*arguments, **options):
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent[0] += time.perf_counter() - start

        return call

    for module, names in places.items():
        for name in names:
            setattr(module, name, clocked(getattr(module, name)))
    return spent


@dataclass
class Way:
    """One way to sync, and what was measured of it; the first repetition warms up."""

    name: str
    sync: WeightSync
    seconds: list[float] = field(default_factory=list)
    digest_shares: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    report: SyncReport | None = None


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, SHAPE)
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        help="key=value of the configuration, may be given several times",
    )
    return parser.parse_args()


def measure(ways: Sequence[Way], engine: VllmEngine, world: World, repetitions: int) -> None:
    """The ways take turns, in another order each time."""
    spent = counted(
        {
            buckets: ("checksum",),
            transport: ("compare",),
            gather: ("quick_digest", "verify_tensors"),
        }
    )
    answers = []
    version = 0
    for repetition in range(repetitions + 1):
        for way in ways if repetition % 2 else reversed(ways):
            version += 1
            before = peak_bytes(reset=True)
            world.barrier()
            spent[0] = 0.0
            start = time.perf_counter()
            way.report = way.sync.sync(version)
            world.barrier()
            way.seconds.append(time.perf_counter() - start)
            way.digest_shares.append(spent[0] / way.seconds[-1])
            way.peaks.append(max(world.all_gather(peak_bytes() - before)))
            answers.append([reply.token_ids for reply in engine.generate(PROMPTS, GREEDY)[0]])
    assert all(answer == answers[0] for answer in answers), "the ways leave different weights"


def row(way: Way, world: World) -> dict[str, object]:
    """Collective: the line of one way."""
    seconds = spread(way.seconds[1:])
    line: dict[str, object] = {
        "sync": way.name,
        "median s": seconds.median,
        "quartiles": f"{seconds.low:.3f}-{seconds.high:.3f}",
        "sent, MB": sum(world.all_gather(way.report.bytes_sent)) / 1e6,
        "peak, MB": spread(way.peaks[1:]).median / 1e6,
    }
    if way.name.endswith("digests"):
        line["digests"] = f"{spread(way.digest_shares[1:]).median:.1%}"
    return line


def main() -> None:
    """Builds policy, engine and all ways, runs them in turn, prints."""
    options = arguments()
    watch = Watch()
    world = launch.start()
    model = world.from_main(lambda: write_model(options))
    config = read_config(model, *options.override)
    policy = build_policy(config, 1024)
    engine = VllmEngine(str(model), config.rollout, seed=0, launch_id=world.launch_id)
    ways = [
        Way(name, build_sync(with_way(config, *way), policy, engine, world))
        for name, way in WAYS.items()
    ]
    measure(ways, engine, world, options.repetitions)
    rows = [row(way, world) for way in ways]
    own = sum(world.all_gather(watch.own_since()))
    if world.is_main:
        size = ways[0].report.bytes_total / 1e6
        print(f"{description()}; {watch.load(own)}.")
        print(f"{options.repetitions} syncs each of {size:.0f} MB of weights")
        show([rows], options)
    launch.exit_process(0)


if __name__ == "__main__":
    main()
