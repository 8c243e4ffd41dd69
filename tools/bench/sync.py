"""Time of a planned weight sync against gather and broadcast, same run, same shards, median and
quartiles of the repetitions.

    torchrun --standalone --nproc-per-node 4 tools/bench/sync.py --train tp=2,pp=2 \\
--rollout tp=1,dp=4 --hidden 1024 --layers 8

Shards of a Qwen2-shaped model (random, not trained) stand in for both engines; what is timed is the
movement alone. The two ways take turns within each repetition, and both must leave the same bytes
behind. Gather: every tensor whole on every process, from its first holders, then cut. Prints one
JSON object on rank 0; its `machine` says what else ran.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from machine import Watch, description, spread
from torch import Tensor
from transformers import AutoConfig

from megatron_rl.models import Architecture, architecture_from
from megatron_rl.planning.training_shards import parse_rollout, parse_training, training_shards
from megatron_rl.weight_sync.buckets import strided
from megatron_rl.weight_sync.exchange import exchange
from megatron_rl.weight_sync.planner.engine_tables import ModelShape, rollout_shards
from megatron_rl.weight_sync.planner.plan import Machines, Plan, PlanSettings, Side, make_plan
from megatron_rl.weight_sync.planner.program import compile_program
from megatron_rl.weight_sync.planner.shards import ShardGroup, extent, subview
from megatron_rl.weight_sync.planner.slices import Slice
from megatron_rl.weight_sync.transport import Transport, TransportReport, tensors

HEAD_DIM = 128


def qwen2(layers: int, hidden: int) -> Architecture:
    """The architecture of a Qwen2-shaped model."""
    heads = hidden // HEAD_DIM
    config = AutoConfig.for_model(
        "qwen2",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        intermediate_size=4 * hidden,
        vocab_size=32000,
        tie_word_embeddings=False,
    )
    return architecture_from(config, "Qwen2ForCausalLM")


def allocate(groups: Sequence[ShardGroup], fill: float | None) -> dict[str, Tensor]:
    """A flat tensor for each parameter that the shards name: random, or all ``fill``."""
    sizes: dict[str, int] = {}
    for group in groups:
        for key in group.keys:
            sizes[key] = max(extent(group.shard), sizes.get(key, 0))
    dtype = getattr(torch, groups[0].shard.dtype) if groups else torch.bfloat16
    if fill is None:
        return {key: torch.randn(size).to(dtype) for key, size in sizes.items()}
    return {key: torch.full((size,), fill, dtype=dtype) for key, size in sizes.items()}


def place(parameters: Mapping[str, Tensor], group: ShardGroup, index: int) -> Tensor:
    """Shard ``index`` of the group, as a view of its parameter."""
    return strided(parameters[group.keys[index]], subview(group, index, group.region))


def make_copies_equal(groups: Sequence[ShardGroup], parameters: Mapping[str, Tensor]) -> None:
    """Several processes have one slice: in a run their copies are equal, here they are made so."""
    for group in groups:
        for index, name in enumerate(group.names):
            seed = xxhash.xxh32_intdigest(f"{name}{group.region}".encode())
            draw = torch.Generator().manual_seed(seed)
            place(parameters, group, index).copy_(torch.randn(group.shard.shape, generator=draw))


class Gather:
    """Every tensor whole on every process, one after the other, from its first holders."""

    def __init__(
        self, sources: Side, own_sources: Sequence[ShardGroup], own_targets: Sequence[ShardGroup]
    ) -> None:
        self.owners: dict[str, dict[Slice, int]] = {}
        self.whole: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for rank in sorted(sources):
            for group in sources[rank]:
                for name in group.names:
                    self.owners.setdefault(name, {}).setdefault(group.region, rank)
                    self.whole[name] = (group.shard.full, getattr(torch, group.shard.dtype))
        self.own: dict[tuple[str, Slice], tuple[ShardGroup, int]] = {}
        for group in own_sources:
            for index, name in enumerate(group.names):
                self.own[name, group.region] = (group, index)
        self.targets: dict[str, list[tuple[ShardGroup, int]]] = {}
        for group in own_targets:
            for index, name in enumerate(group.names):
                self.targets.setdefault(name, []).append((group, index))

    def run(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        for name, regions in self.owners.items():
            full, dtype = self.whole[name]
            whole = torch.empty(full, dtype=dtype)
            for region, owner in regions.items():
                part = torch.empty(region.shape, dtype=dtype)
                if owner == dist.get_rank():
                    part.copy_(place(source, *self.own[name, region]))
                dist.broadcast(part, owner)
                whole[window(region)] = part
            for group, index in self.targets.get(name, []):
                place(target, group, index).copy_(whole[window(group.region)])


def window(region: Slice) -> tuple[slice, ...]:
    """The slice as an index."""
    return tuple(slice(first, first + size) for first, size in zip(region.start, region.shape))


def timed(action: Callable[[], object]) -> float:
    """Seconds from a common start until the last process is done."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


@dataclass
class Measured:
    """Seconds of every repetition, the first of which warms up."""

    planned: list[float]
    verified: list[float]
    gathered: list[float]


def measure(
    plan: Plan,
    sources: Side,
    own_sources: Sequence[ShardGroup],
    own_targets: Sequence[ShardGroup],
    repetitions: int,
) -> tuple[Measured, TransportReport]:
    """Runs the ways in turn, and compares what they leave behind."""
    torch.manual_seed(0)
    source = allocate(own_sources, None)
    make_copies_equal(own_sources, source)
    planned = allocate(own_targets, 0.0)
    gathered = allocate(own_targets, 0.0)
    program = compile_program(plan, dist.get_rank(), own_sources, own_targets)
    transport = Transport(program)
    gather = Gather(sources, own_sources, own_targets)
    reports = []

    def run() -> None:
        reports.append(transport.run(tensors(source), tensors(planned)))

    def run_verified() -> None:
        transport.compare(transport.run(tensors(source), tensors(planned), checked=True))

    times = Measured([], [], [])
    for _ in range(repetitions + 1):
        times.planned.append(timed(run))
        times.verified.append(timed(run_verified))
        times.gathered.append(timed(lambda: gather.run(source, gathered)))
        assert all(torch.equal(planned[key], gathered[key]) for key in planned), (
            "the two ways left different bytes"
        )
    return times, reports[-1]


def figures(times: Measured, plan: Plan, report: TransportReport) -> dict[str, object]:
    """What is printed."""
    ways = {"plan": times.planned, "plan_verified": times.verified, "gather": times.gathered}
    rows: dict[str, object] = {}
    for way, seconds in ways.items():
        times_of_way = spread(seconds[1:])
        rows[f"{way}_seconds"] = round(times_of_way.median, 4)
        rows[f"{way}_quartiles"] = [round(times_of_way.low, 4), round(times_of_way.high, 4)]
    pairs = list(zip(times.verified[1:], times.planned[1:]))
    share = spread([(checked - plain) / checked for checked, plain in pairs])
    rows["digest_share"] = round(share.median, 4)
    rows["bytes_sent"] = plan.bytes_sent
    rows["lower_bound"] = plan.lower_bound
    rows["gather_bytes"] = plan.gather_bytes
    rows["bytes_local"] = plan.bytes_local
    rows["peak_staging_bytes"] = report.peak_staging_bytes
    return rows


def options() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", default="tp=2")
    parser.add_argument("--rollout", default="tp=1,dp=2")
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=10)
    return parser


def main() -> None:
    """Builds both ways, runs them in turn, prints."""
    parser = options()
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start it with torchrun: torchrun --standalone --nproc-per-node 4"
            " tools/bench/sync.py ..."
        )
    try:
        train = parse_training("--train", arguments.train)
        rollout = parse_rollout("--rollout", arguments.rollout)
    except ValueError as error:
        parser.error(str(error))
    watch = Watch()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    arch = qwen2(arguments.layers, arguments.hidden)
    own_sources = training_shards(arch, train, rank) if rank < train.world_size else []
    own_targets = []
    if rank in rollout.ranks:
        own_targets = rollout_shards(ModelShape.of(arch), rollout, rank)
    sources, targets = exchange(own_sources, own_targets)
    settings = PlanSettings(
        bucket_bytes=arguments.bucket_mib << 20,
        machines=Machines(dist.get_world_size()),
        replicas=rollout.replicas,
    )
    plan = make_plan(sources, targets, settings)
    times, report = measure(plan, sources, own_sources, own_targets, arguments.repetitions)
    own = torch.tensor(watch.own_since(), dtype=torch.float64)
    dist.all_reduce(own)
    if rank == 0:
        machine = f"{description()}; {watch.load(own.item())}"
        print(json.dumps(figures(times, plan, report) | {"machine": machine}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
