"""Policy and engine on one GPU: seconds of a weight sync, its rate, and the memory of every phase
over many hand-overs.

    python tools/bench/gpu_refit.py --folder DIR [--layers 32] [--steps 50] \\
        [--offload optimizer,weights] [--override key=value]
    torchrun --standalone --nproc-per-node 8 tools/bench/gpu_refit.py --folder DIR \\
        --override parallel=tp4 --override rollout.tensor=2

A step hands over, generates a little and takes the memory back; there is no update, so that the
optimizer holds no moments. The first table: median seconds of the sync, GB/s of the weights, and
the share of the rate at which this machine copies device memory. The second: memory of every phase
in the first ten and the last ten steps, least value of each. ``--override
weight_sync.method=reshard`` measures the other path. It has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch
from gpu_model import (
    EOS,
    SHAPE_8B,
    add_options,
    build_policy,
    read_config,
    seconds,
    show,
    write_model,
)

from megatron_rl.rollouts.backends.colocated import Colocation
from megatron_rl.runtime import launch
from megatron_rl.runtime.device import device
from megatron_rl.runtime.memory import Ledger, memory_in_use
from megatron_rl.trainer.build import build_engine
from megatron_rl.types import Prompt, Sampling


def copy_gb_per_s() -> float:
    """Rate of a copy from device memory to device memory, bytes written."""
    source = torch.empty(
        2**30 if torch.cuda.is_available() else 2**24, dtype=torch.uint8, device=device()
    )
    target = torch.empty_like(source)
    return source.numel() / seconds(lambda: target.copy_(source), 10, 2) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Hand-overs between policy and engine on this machine."
    )
    add_options(parser, SHAPE_8B)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--offload", default="optimizer,gradients,weights")
    options = parser.parse_args()
    world = launch.start()
    model = world.from_main(lambda: write_model(options))
    overrides = [
        f"memory.offload=[{options.offload}]",
        "weight_sync.verify=false",
        *options.override,
    ]
    config = read_config(model, *overrides)
    policy = build_policy(config, 1024)
    engine, weight_sync = build_engine(config, world, policy)
    ledger = Ledger(lambda: memory_in_use(engine.memory_bytes))
    source = Colocation(policy, engine, weight_sync, config.memory.offload, ledger)
    prompts = [
        Prompt(f"p{i}", tuple(range(3, 19)), "", "random") for i in range(8 * engine.num_replicas)
    ]
    mine = prompts[8 * engine.replica : 8 * engine.replica + 8]
    taken, history = [], defaultdict(list)
    for step in range(options.steps):
        report = source.publish(step)
        with source.generation():
            engine.generate(mine, Sampling(1, 16, seed=step, stop_token_ids=(EOS,)))
        source.to_policy()
        taken.append(report.seconds)
        memory_use = {k: v for k, v in report.measured.items() if k.startswith("memory/")}
        for key, value in memory_use.items():
            history[key.removeprefix("memory/").removesuffix("_gib")].append(value)
    if world.is_main:
        median, copied = sorted(taken)[len(taken) // 2], copy_gb_per_s()
        rate = report.bytes_total / median / 1e9
        row = {
            "sync": config.weight_sync.method,
            "weights_GB": report.bytes_total / 1e9,
            "sync_s": median,
            "GB/s": rate,
        }
        memory = [
            {"memory of": key, "first 10, GiB": min(values[:10]), "last 10, GiB": min(values[-10:])}
            for key, values in history.items()
        ]
        show([[row | {"share of a copy": rate / copied}], memory], options)
    launch.exit_process(0)


if __name__ == "__main__":
    main()
