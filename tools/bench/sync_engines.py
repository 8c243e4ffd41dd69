"""Whole weight syncs from a Megatron policy into vLLM engines in the same processes: plan beside gather, each with and without digests.

    torchrun --standalone --nproc-per-node 2 tools/bench/sync_engines.py --folder DIR --override parallel=tp2

Everything that a step of training waits for is timed: the movement, vLLM's own work on the weights that came, the digests. The ways take
turns, in another order each time. The least they must agree on, the greedy answers of the engine, is compared. Memory: most of a
process during a sync above what it held before, the process that needed most. Digests: share of the time spent in them and in comparing
them, on rank 0. ``--mbridge`` adds mbridge's export, loaded as gather's weights are, and checks that it gives the same bits.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from gpu_model import EOS, add_options, build_policy, read_config, show, write_model
from machine import Watch, description, spread
from mbridge_export import MbridgeExport

from megatron_rl.config.schema import Config
from megatron_rl.rollout.engine import VllmEngine
from megatron_rl.runtime import launch
from megatron_rl.trainer.sync import build_sync
from megatron_rl.types import Prompt, Sampling
from megatron_rl.weight_sync import gather, transport

SHAPE = dict(layers=8, hidden=1024, ffn=4096, heads=16, kv_heads=4, vocab=32000)
WAYS = {"gather": ("gather", False), "gather, digests": ("gather", True), "plan": ("plan", False), "plan, digests": ("plan", True)}


def with_way(config: Config, path: str, verify: bool) -> Config:
    return config.model_copy(update={"weight_sync": config.weight_sync.model_copy(update={"path": path, "verify": verify})})


def peak_bytes(reset: bool = False) -> int:
    """Most memory in use since the last reset: of the device, or resident in the process."""
    if torch.cuda.is_available():
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    (line,) = (line for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if line.startswith("VmHWM"))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, SHAPE)
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--override", action="append", default=[], help="key=value of the configuration, may be given several times")
    parser.add_argument("--mbridge", action="store_true", help="also with the weights that mbridge exports (where it is installed)")
    options = parser.parse_args()
    if options.mbridge and importlib.util.find_spec("mbridge") is None:
        parser.error("--mbridge: no such package here; pip install --no-deps mbridge==0.15.1")
    watch = Watch()
    world = launch.start()
    model = world.from_main(lambda: write_model(options))
    config = read_config(model, *options.override)
    policy = build_policy(config, 1024)
    engine = VllmEngine(str(model), config.rollout, seed=0, launch_id=world.launch_id)
    syncs = {name: build_sync(with_way(config, *way), policy, engine, world) for name, way in WAYS.items()}
    export = MbridgeExport(model, policy) if options.mbridge else None
    if export is not None:
        syncs["mbridge"] = gather.GatherSync(export, engine, verify=False)
    prompts, greedy = [Prompt("p", tuple(range(3, 19)), "", "random")], Sampling(1, 8, temperature=0.0, stop_token_ids=(EOS,))
    taken, reports, memory = defaultdict(list), {}, defaultdict(list)
    spent = counted({transport: ("checksum", "compare"), gather: ("quick_digest", "verify_tensors")})
    answers, version, digests = [], 0, defaultdict(list)
    for repetition in range(options.repetitions + 1):  # the first warms up
        for name in (*syncs,) if repetition % 2 else reversed(syncs):
            version += 1
            before = peak_bytes(reset=True)
            world.barrier()
            start, spent[0] = time.perf_counter(), 0.0
            reports[name] = syncs[name].sync(version)
            world.barrier()
            taken[name].append(time.perf_counter() - start)
            digests[name].append(spent[0] / taken[name][-1])
            memory[name].append(max(world.all_gather(peak_bytes() - before)))
            answers.append([one.token_ids for one in engine.generate(prompts, greedy)[0]])
    assert all(answer == answers[0] for answer in answers), "the ways leave different weights"
    if export is not None:
        export.check()
    rows = []
    for name, seconds in taken.items():
        found = spread(seconds[1:])
        plain, share = name.removesuffix(", digests"), spread(digests[name][1:]).median
        sent = sum(world.all_gather(reports[name].bytes_sent))
        rows.append({"sync": name, "median s": found.median, "quartiles": f"{found.low:.3f}-{found.high:.3f}", "sent, MB": sent / 1e6})
        rows[-1] |= {"peak, MB": spread(memory[name][1:]).median / 1e6} | ({"digests": f"{share:.1%}"} if name != plain else {})
    own = sum(world.all_gather(watch.own_since()))
    if world.is_main:
        print(f"{description()}; {watch.load(own)}.")
        print(f"{len(taken['plan']) - 1} syncs each of {reports['gather'].bytes_total / 1e6:.0f} MB of weights")
        show([rows], options)
    launch.leave(0)


if __name__ == "__main__":
    main()
