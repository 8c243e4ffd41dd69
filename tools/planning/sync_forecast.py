"""What a weight sync will cost on machines one does not have, by the way that the run will take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.schema import Config
from megatron_rl.models import Architecture
from megatron_rl.types import Shard
from megatron_rl.weight_sync.planner.plan import Plan, PlanSettings, make_plan
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
    if config.source.is_servers:
        engines = _engines(config, ranks.servers, ranks.trainer)
        targets = rollout_side(arch, engines, config.rollout.dtype)
        plan, seconds = publication(sources, targets, engines.replicas, settings, links)
        return _forecast("servers", plan, seconds, links)
    if config.sync_method == "gather":
        plan = make_plan(sources, dict.fromkeys(sources, whole_tensors(sources)), settings)
    else:
        engines = _engines(config, ranks.trainer, first_rank=0)
        targets = rollout_side(arch, engines, config.rollout.dtype)
        plan = make_plan(sources, targets, replace(settings, replicas=engines.replicas))
    return _forecast(config.sync_method, plan, simulated_seconds(plan, links), links)


def publication(
    sources: Side, targets: Side, servers: Sequence[range], settings: PlanSettings, links: Links
) -> tuple[Plan, float]:
    """New weights for all ``servers`` (the ranks of each): the plan, and its seconds.

    One plan for all of them, so that they pass weights on to each other. One server after the
    other would be the plan of the first alone, and its seconds times their number.
    """
    plan = make_plan(sources, targets, replace(settings, replicas=servers))
    return plan, simulated_seconds(plan, links)


def _forecast(way: str, plan: Plan, seconds: float, links: Links) -> SyncForecast:
    return SyncForecast(
        way,
        plan.bytes_by_link["across_nodes"] / 1e9,
        int(num_peers(plan.flows).max(initial=0)),
        seconds,
        least_seconds(plan, links),
    )


def _engines(config: Config, num_ranks: int, first_rank: int) -> RolloutLayout:
    layout = RolloutLayout.of(config.rollout, num_ranks // config.rollout.ranks)
    return replace(layout, first_rank=first_rank)


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
