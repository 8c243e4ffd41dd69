"""Simulated seconds of a weight sync, of the relay planner and of the plain one of the tests.

    python tools/bench/plain_sync.py

The same shards, links and buckets for both: 400 GB/s of a GPU to its node, 50 GB/s to other nodes.
The plain plan has no rounds: its messages, bucket after bucket of every stream, each take both of
their links as soon as these are free. "least": of the busiest link, whatever the order.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_model import table
from machine import Watch, description

from megatron_rl.planning.sync_forecast import rollout_side, training_side
from megatron_rl.planning.sync_time import Links, least_seconds, simulated_seconds
from megatron_rl.planning.training_shards import parse_rollout, parse_training
from megatron_rl.weight_sync.plan import Machines, PlanSettings, make_plan
from tests.unit.weight_sync.plain_planner import PlainPlan, plain_plan
from tools.plan_sync import architecture, even_out

LINKS = Links(nvlink_gb_s=400, network_gb_s=50)
GPUS = 8
BUCKET = 64 << 20
# Model, training, rollouts, whether these are processes of their own.
CASES = [
    ("qwen2.5-7b", "tp=2,dp=4", "tp=1,dp=8", False),
    ("qwen2.5-7b", "tp=2,dp=8", "tp=1,dp=16", False),
    ("qwen2.5-7b", "tp=2,dp=8", "tp=1,dp=32", True),
    ("72b", "tp=8,pp=4,dp=2", "tp=8,dp=8", False),
    ("72b", "tp=8,pp=4,dp=2", "tp=4,dp=16", False),
    ("72b", "tp=8,pp=4,dp=2", "tp=8,dp=56", True),
    ("72b", "tp=8,pp=4,dp=2", "tp=2,dp=224", True),
    ("qwen3-235b-a22b", "tp=4,pp=8,dp=8,ep=8", "tp=8,dp=32", False),
    ("qwen3-235b-a22b", "tp=4,pp=8,dp=4,ep=8", "tp=8,dp=32", True),
]


def plain_seconds(plan: PlainPlan) -> tuple[float, float]:
    """(in order, least)."""
    free: dict[tuple[int, str, bool], float] = defaultdict(float)
    load: dict[tuple[int, str, bool], float] = defaultdict(float)
    messages = []
    for number, (stream, size) in enumerate(plan.streams.items()):
        for bucket in range(-(-size // BUCKET)):
            messages.append((bucket, number, stream, min(BUCKET, size - bucket * BUCKET)))
    for _, _, stream, size in sorted(messages, key=lambda message: message[:2]):
        near = stream.source // GPUS == stream.target // GPUS
        speed = LINKS.nvlink_gb_s if near else LINKS.network_gb_s
        ends = ((stream.source, "out", near), (stream.target, "in", near))
        arrival = max(free[end] for end in ends) + size / (speed * 1e9)
        for end in ends:
            free[end] = arrival
            load[end] += size / (speed * 1e9)
    return max(free.values(), default=0.0), max(load.values(), default=0.0)


def row(model: str, training: str, rollouts: str, disaggregated: bool) -> dict[str, object]:
    arch = architecture(model)
    train = even_out(arch, parse_training("--train", training))
    rollout = parse_rollout("--rollout", rollouts)
    if disaggregated:
        rollout = replace(rollout, first_rank=train.world_size)
    sources = training_side(arch, train)
    targets = rollout_side(arch, rollout, train.dtype)
    settings = PlanSettings(BUCKET, machines=Machines(GPUS), replicas=rollout.replicas)
    cpu = time.process_time()
    relay = make_plan(sources, targets, settings)
    relay_cpu = time.process_time() - cpu
    cpu = time.process_time()
    plain = plain_plan(sources, targets, gpus_per_node=GPUS, replicas=rollout.replicas)
    plain_cpu = time.process_time() - cpu
    seconds, least = plain_seconds(plain)
    relay_seconds = simulated_seconds(relay, LINKS)
    return {
        "model": model,
        "training": training,
        "engines": rollouts + (" apart" if disaggregated else ""),
        "ranks": len({*sources, *targets}),
        "relay s": f"{relay_seconds:.3f}",
        "plain s": f"{seconds:.3f}",
        "relay least s": f"{least_seconds(relay, LINKS):.3f}",
        "plain least s": f"{least:.3f}",
        "plain / relay": f"{seconds / relay_seconds:.2f}",
        "relay GB across": f"{relay.bytes_by_link['across_nodes'] / 1e9:.1f}",
        "plain GB across": f"{plain.bytes_by_link['across_nodes'] / 1e9:.1f}",
        "relay planning s": f"{relay_cpu:.2f}",
        "plain planning s": f"{plain_cpu:.2f}",
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    watch = Watch()
    rows = []
    for case in CASES:
        rows.append(row(*case))
        print(table(rows[-1:]), flush=True)
    print(f"{description()}; {watch.load()}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
