"""Whole HF-named tensors out of the shards of all ranks: one layer at a time, planned once.

A unit (embedding, one layer, the experts of one layer, the end) lives on one pipeline stage. There, the ranks that share it
gather their flat shards; then the stage sends the result to the other stages; then every rank cuts HF tensors out of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.policy.families import Architecture
from megatron_rl.policy.layout import Parameter, boxes, expert_parameters, layer_parameters, local_shape, outer_parameters
from megatron_rl.policy.parallel import Ranks
from megatron_rl.policy.weights import Held, box_slices


@dataclass(frozen=True)
class Copy:
    """``whole[target] = shard(member)[offset : offset + numel].view(shape)[source]``."""

    member: int
    offset: int
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]


@dataclass(frozen=True)
class Unit:
    """Parameters gathered together. ``members[i]`` are those of rank i of ``group``, ``tensors`` says how to cut."""

    stage: int
    group: Any
    members: list[list[Parameter]]
    numel: int
    tensors: list[tuple[str, tuple[int, ...], list[Copy]]]  # HF name, whole shape, parts


class Gather:
    """Plan and execution. Building it is collective (over pipeline stages); so is ``run``."""

    def __init__(self, held: Sequence[Held], arch: Architecture, ranks: Ranks, vocab_rows: int) -> None:
        self.ranks = ranks
        self.mine = {item.parameter: item.tensor for item in held}
        self.sample = held[0].tensor
        self.bytes_sent = 0  # to other ranks, in all runs
        stages: list[Any] = [None] * ranks.pipeline
        layers = sorted({item.parameter.layer for item in held if item.parameter.layer is not None})
        dist.all_gather_object(stages, layers, ranks.pipeline_group)
        owner = {layer: stage for stage, owned in enumerate(stages) for layer in owned}
        assert sorted(owner) == list(range(arch.num_layers)), f"layers on pipeline stages: {stages}"
        before, after = outer_parameters(arch)

        def dense(stage: int, parameters: list[Parameter]) -> Unit:
            return _unit(stage, ranks.tensor_group, [parameters] * ranks.tensor, ranks.tensor, arch, vocab_rows)

        self.units = [dense(0, before)]
        for layer in range(arch.num_layers):
            self.units.append(dense(owner[layer], layer_parameters(arch, layer)))
            if arch.num_experts:
                each = arch.num_experts // ranks.expert
                members = [
                    [p for e in range(rank * each, (rank + 1) * each) for p in expert_parameters(arch, layer, e)]
                    for rank in range(ranks.expert)
                    for _ in range(ranks.expert_tensor)
                ]
                self.units.append(_unit(owner[layer], ranks.expert_group, members, ranks.expert_tensor, arch, vocab_rows))
        self.units.append(dense(ranks.pipeline - 1, after))

    def run(self, value: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Iterator[tuple[str, Tensor]]:
        """Collective: (HF name, whole tensor) on every rank in a fixed order. ``value`` picks what to gather of a parameter
        (the parameter itself by default). The tensors are new; memory: one unit, twice."""
        sample = value(self.sample)
        for unit in self.units:
            shards = self._collect(unit, value, sample)
            for name, shape, copies in unit.tensors:
                whole = torch.empty(shape, dtype=sample.dtype, device=sample.device)
                for copy in copies:
                    shard = shards[copy.member, copy.offset : copy.offset + math.prod(copy.shape)].view(copy.shape)
                    whole[copy.target] = shard[copy.source]
                yield name, whole

    def _collect(self, unit: Unit, value: Callable[[Tensor], Tensor], sample: Tensor) -> Tensor:
        shards = sample.new_empty(len(unit.members), unit.numel)
        if self.ranks.pipeline_rank == unit.stage:
            parameters = unit.members[dist.get_rank(unit.group)]
            local = torch.cat([value(self.mine[parameter]).detach().reshape(-1) for parameter in parameters])
            if len(unit.members) == 1:
                shards[0] = local
            else:
                dist.all_gather_into_tensor(shards.view(-1), local, group=unit.group)
                self.bytes_sent += (len(unit.members) - 1) * local.nbytes
        if self.ranks.pipeline > 1:
            dist.broadcast(shards, src=self.ranks.stage_root(unit.stage), group=self.ranks.pipeline_group)
            if self.ranks.pipeline_rank == unit.stage:
                self.bytes_sent += (self.ranks.pipeline - 1) * shards.nbytes
        return shards


def _unit(stage: int, group: Any, members: list[list[Parameter]], size: int, arch: Architecture, vocab_rows: int) -> Unit:
    """``size``: tensor-parallel ranks of these parameters; rank i of the group is tensor rank ``i % size``."""
    numel = 0
    found: dict[str, list[Copy]] = {}
    for member, parameters in enumerate(members):
        offset = 0
        for parameter in parameters:
            shape = local_shape(parameter, arch, vocab_rows, size)
            # A parameter that is not cut is equal on all ranks: the first one gives it.
            if parameter.slot.kind != "whole" or member % size == 0:
                for box in boxes(parameter, arch, vocab_rows, member % size, size):
                    source, target = box_slices(box.local, box.shape), box_slices(box.start, box.shape)
                    found.setdefault(box.name, []).append(Copy(member, offset, shape, source, target))
            offset += math.prod(shape)
        numel = offset
    tensors = []
    for name, copies in found.items():
        whole = tuple(max(copy.target[axis].stop for copy in copies) for axis in range(len(copies[0].target)))
        tensors.append((name, whole, copies))
    order = {name: i for i, name in enumerate(dict.fromkeys(n for ps in members for p in ps for n in p.names))}
    return Unit(stage, group, members, numel, sorted(tensors, key=lambda item: order[item[0]]))
