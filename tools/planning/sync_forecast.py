"""What a weight sync will cost on machines one does not have, by the way that the run will take."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from megatron_rl.config.schema import Config
from megatron_rl.models import Architecture
from megatron_rl.types import Shard
from megatron_rl.weight_sync.planner.plan import PlanSettings, make_plan
from megatron_rl.weight_sync.planner.roles import Side
from megatron_rl.weight_sync.planner.shards import ShardGroup
from tools.planning.engine_tables import ModelShape, RolloutLayout, rollout_shards
from tools.planning.plan_figures import num_peers
from tools.planning.sync_time import Links, least_seconds, simulated_seconds
from tools.planning.training_shards import Place, TrainingLayout, place_of, training_shards


@dataclass(frozen=True)
class Ranks:
    """``trainer`` ranks and behind them ``servers``, those of all vLLM servers together, on nodes
    of their own; ``gpus_per_node``: a divisor of both."""

    trainer: int
    gpus_per_node: int
    servers: int = 0


@dataclass(frozen=True)
class SyncForecast:
    """One weight sync. ``way``: reshard, gather or servers; ``across_gb``: across nodes, the
    least possible; ``peers``: most of a rank."""

    way: str
    across_gb: float
    peers: int
    seconds: float
    least_seconds: float


def forecast(config: Config, arch: Architecture, ranks: Ranks, links: Links) -> SyncForecast:
    """Of one sync of a run, simulated on ``links``.

    Raises:
        ValueError: the sizes do not fit, or nothing declares what the engines want of this model.
    """
    settings = PlanSettings(
        bucket_bytes=config.weight_sync.bucket_mib << 20,
        rounds_in_flight=config.weight_sync.rounds_in_flight,
        gpus_per_node=ranks.gpus_per_node,
        cast=True,
    )
    train = TrainingLayout(
        config.parallel,
        ranks.trainer,
        config.model.make_vocab_divisible_by,
        config.precision.params,
    )
    sources = training_side(arch, train)
    way = "servers" if config.source.is_servers else config.sync_method
    if way == "gather":
        plan = make_plan(sources, dict.fromkeys(sources, whole_tensors(sources)), settings)
    else:
        first_rank, num_ranks = 0, ranks.trainer
        if way == "servers":  # behind the trainer
            first_rank, num_ranks = ranks.trainer, ranks.servers
        layout = RolloutLayout.of(config.rollout, num_ranks // config.rollout.ranks)
        engines = replace(layout, first_rank=first_rank)
        targets = rollout_side(arch, engines, config.rollout.dtype)
        # One plan for all replicas, so that they pass weights on to each other.
        plan = make_plan(sources, targets, replace(settings, replicas=engines.replicas))
    return SyncForecast(
        way,
        plan.bytes_by_link["across_nodes"] / 1e9,
        int(num_peers(plan.flows).max(initial=0)),
        simulated_seconds(plan, links),
        least_seconds(plan, links),
    )


def training_side(arch: Architecture, train: TrainingLayout) -> Side:
    """What every training rank has; ranks of one place share their shards."""
    held: dict[Place, list[ShardGroup]] = {}
    sources = {}
    for rank in range(train.world_size):
        place = place_of(train, rank)
        if place not in held:
            held[place] = training_shards(arch, train, rank)
        sources[rank] = held[place]
    return sources


def rollout_side(arch: Architecture, rollout: RolloutLayout, dtype: str) -> Side:
    """What every engine rank wants, in ``dtype``; ranks of equal place in their replica share their
    shards."""
    shape = ModelShape.of(arch, dtype)
    size = len(rollout.replicas[0])
    wanted = [rollout_shards(shape, rollout, rank) for rank in rollout.ranks[:size]]
    return {rank: wanted[i % size] for i, rank in enumerate(rollout.ranks)}


def whole_tensors(sources: Side) -> list[ShardGroup]:
    """Every tensor, whole: what each process receives in a gather and broadcast."""
    shard_of: dict[str, Shard] = {}
    for groups in sources.values():
        for group in groups:
            for name in group.names:
                shard_of.setdefault(name, group.shard)
    names: dict[tuple[tuple[int, ...], str], list[str]] = defaultdict(list)
    for name, shard in shard_of.items():
        names[shard.full, shard.dtype].append(name)
    return [
        ShardGroup(tuple(same), (), Shard("", full, (0,) * len(full), full, 0, (), dtype=dtype))
        for (full, dtype), same in names.items()
    ]
