"""Before anything is built: will it fit?"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from megatron_rl.config.load import ConfigError
from megatron_rl.config.schema import Config
from megatron_rl.loss import Method
from megatron_rl.policy import memory
from megatron_rl.policy.families import read_architecture
from megatron_rl.policy.machine import this_machine
from megatron_rl.policy.parallel import layout_problems
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.memory import available_gib

log = logging.getLogger(__name__)


def check_memory(config: Config, world: World) -> None:
    """Collective: says on rank 0 what a rank will hold, and refuses what does not fit into the smallest device of the launch.

    Raises:
        ConfigError: the layout is impossible, or (with ``memory.refuse``) a phase needs more than there is; the same on every rank.
    """
    room = smallest_room(world)
    stages = plan(config, world.size, room, fused=this_machine().transformer_engine is not None)
    log.info("%s", memory.describe(stages, config, room))
    problems = memory.problems(stages, config, room)
    if problems and config.memory.refuse:
        raise ConfigError(problems, "the memory plan (memory.refuse=false starts all the same)")
    for problem in problems:
        log.warning("memory.refuse = False, though %s", problem)


def plan(config: Config, world_size: int, room: memory.Room, *, fused: bool) -> list[memory.StageMemory]:
    """Memory of a rank of each pipeline stage; ``fused``: layers of Transformer Engine.

    Raises:
        ConfigError: the model cannot be laid out so over ``world_size`` processes.
    """
    arch, _ = read_architecture(Path(config.model.path))
    if wrong := layout_problems(arch, config.parallel, world_size):
        raise ConfigError(wrong, "the layout")
    method = Method(config.method, response_limit=config.rollout.max_response_tokens)
    sizes = memory.sizes(config, world_size, fused=fused, keep_reference=method.needs.ref_logprobs)
    return memory.plan(arch, config.parallel, config.precision, config.rollout, sizes, room.device_gib)


def smallest_room(world: World) -> memory.Room:
    """Collective: the memory of the smallest device and the smallest share of a host. The ranks of a host share its memory alike."""
    host = available_gib() / world.local_size
    device = torch.cuda.get_device_properties("cuda").total_memory / memory.GIB if torch.cuda.is_available() else host
    devices, hosts = zip(*world.all_gather((device, host)), strict=True)
    if torch.cuda.is_available():
        return memory.Room("cuda", min(devices), min(hosts))
    return memory.Room("cpu", min(devices))
