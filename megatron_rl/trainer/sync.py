"""Which weight sync a run uses, built from its policy and engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.schema import Config
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.protocols import WeightSync
from megatron_rl.rollout.engine import VllmEngine
from megatron_rl.rollout.recorder import UndiscoveredError
from megatron_rl.runtime.cpu import device
from megatron_rl.runtime.launch import World
from megatron_rl.trainer.canary import Canary, canary_sequences
from megatron_rl.types import Prompt
from megatron_rl.weight_sync.boxes import expand
from megatron_rl.weight_sync.gather import GatherSync
from megatron_rl.weight_sync.layout import ModelShape, RolloutLayout, rollout_boxes
from megatron_rl.weight_sync.reshard import ReshardSync

log = logging.getLogger(__name__)


def build_sync(config: Config, policy: MegatronPolicy, engine: VllmEngine, world: World) -> WeightSync:
    """Collective. ``weight_sync.path``: gather; or plan, which is made here, and its cost is logged.

    Raises ValueError when policy and engine do not fit each other, or when no plan is possible for the architecture.
    """
    settings = config.weight_sync
    if settings.path == "gather":
        return GatherSync(policy, engine, verify=settings.verify)
    layout = RolloutLayout(config.rollout.tensor, engine.num_replicas)
    origin = find_boxes(engine, config.model.path, config.rollout.dtype, layout, world.rank)
    sync = ReshardSync(
        policy, engine, gpus_per_node=world.local_size, bucket_mib=settings.bucket_mib, in_flight=settings.in_flight,
        verify=settings.verify, device=device(),
    )  # fmt: skip
    if world.is_main:
        sizes = (sync.plan.bytes_sent, sync.plan.lower_bound, sync.plan.gather_bytes, sync.plan.bytes_local)
        log.info(
            "weight sync: what the engine wants is %s; each sync sends %.1f MiB between processes (least possible: %.1f; gathering: %.1f) "
            "and copies %.1f MiB inside them",
            origin, *(size / 2**20 for size in sizes),
        )  # fmt: skip
    return sync


def build_canary(
    config: Config, policy: MegatronPolicy, engine: VllmEngine, world: World, prompts: Sequence[Prompt]
) -> Canary | None:
    """None where ``weight_sync.canary_every`` is 0. Raises ValueError when no prompt serves."""
    settings = config.weight_sync
    if settings.canary_every == 0:
        return None
    sequences = canary_sequences(prompts)
    return Canary(policy, engine, world, sequences, every=settings.canary_every, tolerance=settings.canary_tolerance)


def find_boxes(engine: VllmEngine, model_path: str, dtype: str, layout: RolloutLayout, rank: int) -> str:
    """Lets the engine find out what it wants, or tells it by the declared table; returns which of the two, in words."""
    try:
        engine.weight_boxes()
    except UndiscoveredError as error:
        try:
            shape = ModelShape.from_hf(json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8")), dtype)
        except ValueError as unknown:
            raise ValueError(f"weight_sync.path = plan: {error}, and {unknown}; set weight_sync.path=gather") from error
        engine.declare_boxes(expand(rollout_boxes(shape, layout, rank)))
        return f"declared ({error})"
    return "recorded from its loaders"
