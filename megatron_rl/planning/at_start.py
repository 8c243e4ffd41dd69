"""The memory plan at the start of a run: logged, and enforced, before anything is built."""

import logging
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch

from megatron_rl.config.model_config import ITEM_BYTES
from megatron_rl.config.rules.layout_rules import layout_problems
from megatron_rl.config.rules.teacher_rules import teachers
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError
from megatron_rl.loss import Method
from megatron_rl.models import read_architecture
from megatron_rl.models.adapters import with_adapters
from megatron_rl.models.problems import adapter_problems, family_problems
from megatron_rl.planning import memory
from megatron_rl.planning.engine_memory import GIB, EngineMemory
from megatron_rl.planning.memory import workload
from megatron_rl.planning.parameter_counts import stage_counts
from megatron_rl.planning.phases import MemoryBudget, describe, problems
from megatron_rl.policy.batches.work_model import WorkModel
from megatron_rl.policy.hardware import this_machine
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.memory import available_gib
from megatron_rl.signals import signals_of
from megatron_rl.weight_sync.fleet.weight_history import NUM_VERSIONS

logger = logging.getLogger(__name__)


def check_memory(config: Config, world: World) -> None:
    """Collective: logs what a rank will hold, and refuses what does not fit.

    The smallest device of the launch decides; rank 0 logs.

    Raises:
        ConfigError: the layout is impossible, or (with ``memory.enforce``) a phase needs more than
            there is; the same on every rank.
    """
    budget = smallest_budget(world)
    stages = plan(config, world.size, budget, fused=this_machine().transformer_engine is not None)
    logger.info("%s", describe(stages, config, budget))
    too_large = problems(stages, config, budget)
    if too_large and config.memory.enforce:
        raise ConfigError(too_large, "the memory plan (memory.enforce=false starts anyway)")
    for problem in too_large:
        logger.warning("memory.enforce = False, though %s", problem)


def plan(
    config: Config, world_size: int, budget: MemoryBudget, *, fused: bool
) -> list[memory.StageMemory]:
    """Memory of a rank of each pipeline stage; ``fused``: layers of Transformer Engine.

    Raises:
        ConfigError: the model cannot be laid out so over ``world_size`` processes.
    """
    base, _ = read_architecture(Path(config.model.path))
    arch = with_adapters(base, config.model.lora)
    if impossible := layout_problems(arch, config.parallel, world_size):
        raise ConfigError(impossible, "the layout")
    sections = (config.model, config.parallel, config.precision)
    if refused := [*family_problems(base, *sections), *adapter_problems(base, *sections)]:
        raise ConfigError(refused, "the model")
    method = Method(config.method, response_limit=config.rollout.max_response_tokens)
    load = workload(
        config,
        world_size,
        work=WorkModel.of(arch),
        fused=fused,
        # With adapters the reference is the model without them.
        keep_reference=signals_of(method, config.seed).needs("ref") and not arch.adapter_slots,
    )
    stages = memory.plan(
        arch, config.parallel, config.precision, config.rollout, load, budget.device_gib
    )
    stages = list(map(partial(_with_teachers, config), stages))
    if config.source.is_servers:
        return [_with_servers(stage, config) for stage in stages]
    return stages


def _with_teachers(config: Config, stage: memory.StageMemory) -> memory.StageMemory:
    each = []
    for folder in teachers(config.model):
        arch, _ = read_architecture(Path(folder))
        counts = stage_counts(arch, config.parallel, config.model.make_vocab_divisible_by)
        each.append(counts[stage.stage].total * ITEM_BYTES[config.precision.params])
    return replace(stage, teacher=max(each, default=0), teacher_copies=sum(each))


def _with_servers(stage: memory.StageMemory, config: Config) -> memory.StageMemory:
    """No engine; in its place, in lockstep what ``WeightHistory`` holds."""
    held = config.source.staleness > 0 and config.source.schedule == "lockstep"
    no_engine = {each.name: 0 for each in fields(EngineMemory)}
    weights = NUM_VERSIONS * stage.weights if held else 0
    return replace(stage, **no_engine | {"engine_weights": weights})


def smallest_budget(world: World) -> MemoryBudget:
    """Collective: the memory of the smallest device and the smallest share of a host.

    The ranks of a host share its memory equally.
    """
    host = available_gib() / world.local_size
    device = host
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties("cuda").total_memory / GIB
    devices, hosts = zip(*world.all_gather((device, host)), strict=True)
    if torch.cuda.is_available():
        return MemoryBudget("cuda", min(devices), min(hosts))
    return MemoryBudget("cpu", min(devices))
