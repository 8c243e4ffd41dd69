"""What one rank pays to plan a weight sync: CPU seconds, memory, and what the plan asks of it.

    python tools/bench/sync_plan.py --model qwen3-235b-a22b --train tp=4,pp=8,dp=32,ep=32 \\
        --rollout tp=8,dp=128

No process group: what every rank would do after the exchange is done once, with the shards of all
ranks from the declared tables; ranks of one role share them, as they do after an exchange. Prints
one JSON object. ``grown_mib``: resident memory at its largest above what it was with all libraries
loaded, the shards of all roles included.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from machine import Watch, description

from megatron_rl.runtime.plain_data import decoded, encoded
from megatron_rl.weight_sync.exchange import Described, Names
from megatron_rl.weight_sync.planner.plan import Machines, PlanSettings, make_plan
from megatron_rl.weight_sync.planner.program import Program, compile_program
from megatron_rl.weight_sync.planner.roles import Side
from tools.plan_sync import architecture, even_out
from tools.planning.sync_forecast import rollout_side, training_side
from tools.planning.training_shards import parse_rollout, parse_training

Value = TypeVar("Value")
MIB = 2**20


def timed(action: Callable[[], Value]) -> tuple[Value, float]:
    """The value and the CPU seconds it took."""
    start = time.process_time()
    value = action()
    return value, time.process_time() - start


def peak_mib() -> float:
    """Resident memory of this process at its largest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def shards_of_all(arguments: argparse.Namespace) -> tuple[Side, Side, list[range]]:
    """What every rank has, what it wants, and the replicas."""
    arch = architecture(arguments.model)
    train = even_out(arch, parse_training("--train", arguments.train))
    rollout = parse_rollout("--rollout", arguments.rollout)
    if arguments.disaggregated:
        rollout = replace(rollout, first_rank=train.world_size)
    sources = training_side(arch, train)
    return sources, rollout_side(arch, rollout, train.dtype), rollout.replicas


def told(sources: Side, targets: Side) -> dict[str, int]:
    """Every role's shards as a message, written and read once: what a rank reads in an exchange,
    and a little of writing."""
    names = Names()
    roles = {id(groups): groups for side in (targets, sources) for groups in side.values()}
    sizes = []
    for groups in roles.values():
        message = encoded(names.describe(groups), Described)
        names.understand(decoded(message, Described, "the benchmark"))
        sizes.append(len(message))
    return {"roles": len(sizes), "kib": sum(sizes) // 1024, "largest_kib": max(sizes) // 1024}


def messages(program: Program) -> dict[str, int]:
    """What a rank sends and receives."""
    every_message = [
        message for step in program.rounds for message in (*step.sends, *step.receives)
    ]
    return {
        "peers": len({message.peer for message in every_message}),
        "p2p_operations": len(every_message),
        "chunks": sum(len(message.chunks) for message in every_message),
        "bytes": sum(message.size for message in every_message),
        "rounds": len(program.rounds),
    }


def main() -> None:
    """One line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--rollout", required=True)
    parser.add_argument("--disaggregated", action="store_true")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--ranks", default="0", help="whose programs are compiled")
    arguments = parser.parse_args()
    watch = Watch()
    before = peak_mib()
    (sources, targets, replicas), shard_seconds = timed(lambda: shards_of_all(arguments))
    exchange, exchange_seconds = timed(lambda: told(sources, targets))
    settings = PlanSettings(
        bucket_bytes=arguments.bucket_mib * MIB,
        machines=Machines(arguments.gpus_per_node),
        replicas=replicas,
    )
    plan, plan_seconds = timed(lambda: make_plan(sources, targets, settings))
    programs = {}
    compile_seconds = []
    for rank in map(int, arguments.ranks.split(",")):
        own = (sources.get(rank, []), targets.get(rank, []))
        program, seconds = timed(lambda own=own, rank=rank: compile_program(plan, rank, *own))
        compile_seconds.append(round(seconds, 2))
        programs[rank] = messages(program)
    across = plan.bytes_by_link["across_nodes"]
    row = {
        "ranks": len({*sources, *targets}),
        "shard_seconds": round(shard_seconds, 2),
        "exchange": exchange,
        "exchange_seconds": round(exchange_seconds, 2),
        "plan_seconds": round(plan_seconds, 2),
        "compile_seconds": compile_seconds,
        "base_mib": round(before),
        "grown_mib": round(peak_mib() - before),
        "classes": len(plan.classes),
        "ratio": round(plan.ratio, 4),
        "gb_sent": round(plan.bytes_sent / 1e9, 1),
        "gb_across": round(across / 1e9, 1),
        "rounds": plan.schedule.rounds,
        "programs": programs,
        "machine": f"{description()}; {watch.load(watch.own_since())}",
    }
    if hasattr(plan, "node_bound"):  # absent before plans knew nodes
        row["node_ratio"] = round(plan.node_ratio, 4)
        row["most_peers"] = int(plan.flows.num_peers().max())
    print(
        json.dumps(
            {"model": arguments.model, "layouts": [arguments.train, arguments.rollout]} | row
        )
    )


if __name__ == "__main__":
    main()
