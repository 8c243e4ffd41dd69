"""Whole HF-named tensors out of the shards of all ranks, one layer at a time.

A unit (embedding, one layer, the experts of one layer, the end; a block of the tower) is on one
pipeline stage. There, the ranks that share it gather their flat shards; the stage sends the result
to the other stages; every rank cuts HF tensors out of it. What to cut is computed once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.models import Architecture
from megatron_rl.models.parameter_map import (
    Parameter,
    adapter_parameters,
    expert_parameters,
    layer_parameters,
    local_shape,
    outer_parameters,
    part_of,
    shards,
    tensor_slices,
    vision_parameters,
)
from megatron_rl.policy.parallel import Ranks
from megatron_rl.policy.state.weights import LocalParameter
from megatron_rl.runtime.launch import gather_objects
from megatron_rl.types import Shard


@dataclass(frozen=True)
class Unit:
    """Parameters gathered together.

    ``members[i]`` are those of rank i of ``group``, ``numel`` numbers each. Without a group the
    only member is the rank itself.
    """

    stage: int
    group: Any
    members: list[list[Parameter]]
    numel: int
    # Name of each HF tensor, and the shards that together fill it. Their offsets count in the flat
    # ``[members, numel]`` of all members.
    tensors: dict[str, list[Shard]]
    dtype: torch.dtype | None = None  # of the numbers; None: that of the model's other units


class Gather:
    """Gathers the units of a model, or those of its adapters.

    Building it is collective over pipeline stages, ``run`` over the world.
    """

    def __init__(
        self, held: Sequence[LocalParameter], arch: Architecture, ranks: Ranks, vocab_rows: int
    ) -> None:
        self.ranks = ranks
        self.own = {item.parameter: item.tensor for item in held}
        self.sample = held[0].tensor
        self.bytes_sent = 0  # to other ranks, in all runs
        self._arch = arch
        self._vocab_rows = vocab_rows
        stage_of = self._stage_of_layers(held)
        if held[0].parameter.is_adapter:
            self.units = [
                self._dense_unit(stage_of[layer], adapter_parameters(arch, layer))
                for layer in range(arch.num_layers)
            ]
            return
        before, after = outer_parameters(arch)
        # Every tensor rank has the tower whole: each takes its own.
        self.units = [self._unit(0, None, [each], 1) for each in _tower_parts(arch)]
        self.units.append(self._dense_unit(0, before))
        for layer in range(arch.num_layers):
            stage = stage_of[layer]
            parameters = layer_parameters(arch, layer)
            dense = [each for each in parameters if not each.is_buffer]
            self.units.append(self._dense_unit(stage, dense))
            # Of another number format, and whole on every rank.
            self.units += [
                replace(self._unit(stage, None, [[each]], 1), dtype=torch.float32)
                for each in parameters
                if each.is_buffer
            ]
            if arch.has_experts(layer):
                self.units.append(self._expert_unit(stage, layer))
        self.units.append(self._dense_unit(ranks.pipeline - 1, after))

    def _stage_of_layers(self, held: Sequence[LocalParameter]) -> dict[int, int]:
        """Collective over pipeline stages."""
        own = {item.parameter.layer for item in held if item.parameter.layer is not None}
        by_stage = gather_objects(sorted(own), self.ranks.pipeline_group)
        stage_of = {layer: stage for stage, layers in enumerate(by_stage) for layer in layers}
        assert sorted(stage_of) == list(range(self._arch.num_layers)), (
            f"layers on pipeline stages: {by_stage}"
        )
        return stage_of

    def _dense_unit(self, stage: int, parameters: list[Parameter]) -> Unit:
        tensor = self.ranks.tensor
        return self._unit(stage, self.ranks.tensor_group, [parameters] * tensor, tensor)

    def _expert_unit(self, stage: int, layer: int) -> Unit:
        """The group counts expert-tensor ranks fastest: those of the same experts are neighbors."""
        ranks = self.ranks
        experts_per_rank = self._arch.num_experts // ranks.expert
        members = []
        for rank in range(ranks.expert):
            parameters: list[Parameter] = []
            for expert in range(rank * experts_per_rank, (rank + 1) * experts_per_rank):
                parameters += expert_parameters(self._arch, layer, expert)
            members += [parameters] * ranks.expert_tensor
        return self._unit(stage, ranks.expert_group, members, ranks.expert_tensor)

    def _unit(self, stage: int, group: Any, members: list[list[Parameter]], size: int) -> Unit:
        """The unit of ``members``, whose parameters are cut over ``size`` tensor ranks.

        Rank i of the group is tensor rank ``i % size``.
        """
        numel = sum(
            math.prod(local_shape(parameter, self._arch, self._vocab_rows, size))
            for parameter in members[0]
        )
        # In the order of the model, whichever rank gives the first part of a tensor.
        names = [name for parameters in members for each in parameters for name in each.names]
        tensors: dict[str, list[Shard]] = {name: [] for name in names}
        for member, parameters in enumerate(members):
            rank = member % size
            first = member * numel  # of the parameter, in the flat numbers of all members
            for parameter in parameters:
                # A parameter that is not cut is equal on all ranks: the first one gives it.
                if parameter.slot.kind != "whole" or rank == 0:
                    for shard in shards(parameter, self._arch, self._vocab_rows, rank, size):
                        tensors[shard.name].append(replace(shard, offset=first + shard.offset))
                first += math.prod(local_shape(parameter, self._arch, self._vocab_rows, size))
        return Unit(stage, group, members, numel, tensors)

    def run(
        self, value: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Collective: (HF name, whole tensor) on every rank in a fixed order.

        ``value`` gives what to gather of a parameter (the parameter itself by default). The tensors
        are new; memory: one unit, twice.
        """
        sample = value(self.sample)
        for unit in self.units:
            flat = self._collect(unit, value, sample)
            for name, inside in unit.tensors.items():
                whole = flat.new_empty(inside[0].full)
                for shard in inside:
                    whole[tensor_slices(shard)] = part_of(flat, shard)
                yield name, whole

    def _collect(self, unit: Unit, value: Callable[[Tensor], Tensor], sample: Tensor) -> Tensor:
        """``[members, numel]``: the flat shards of all members of the unit's group."""
        dtype = unit.dtype or sample.dtype
        flat = sample.new_empty(len(unit.members), unit.numel, dtype=dtype)
        is_here = self.ranks.pipeline_rank == unit.stage
        if is_here:
            member = 0 if unit.group is None else dist.get_rank(unit.group)
            parameters = unit.members[member]
            values = (value(self.own[each]) for each in parameters)
            local = torch.cat([each.detach().to(dtype).reshape(-1) for each in values])
            if len(unit.members) == 1:
                flat[0] = local
            else:
                dist.all_gather_into_tensor(flat.view(-1), local, group=unit.group)
                self.bytes_sent += (len(unit.members) - 1) * local.nbytes
        if self.ranks.pipeline > 1:
            root = dist.get_global_rank(self.ranks.pipeline_group, unit.stage)
            dist.broadcast(flat, src=root, group=self.ranks.pipeline_group)
            if is_here:
                self.bytes_sent += (self.ranks.pipeline - 1) * flat.nbytes
        return flat


def _tower_parts(arch: Architecture) -> list[list[Parameter]]:
    """The parameters of the tower, a block at a time."""
    by_block: dict[str, list[Parameter]] = {}
    for parameter in vision_parameters(arch):
        block = ".".join(parameter.slot.megatron.split(".")[:3])  # visual.blocks.<number>
        by_block.setdefault(block, []).append(parameter)
    return list(by_block.values())
