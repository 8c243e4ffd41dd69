"""What every rank of a training layout stores in a checkpoint, for layouts that no machine at hand
holds: tensors without memory, cut as a run cuts them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.checkpoints.chunks import Box, Range
from megatron_rl.models import Architecture
from megatron_rl.models.parameter_map import (
    FUSED_NORMS,
    Parameter,
    axis_sizes,
    expert_parameters,
    layer_parameters,
    local_shape,
    outer_parameters,
    padded_vocab,
)
from megatron_rl.policy.state.stored_state import Cut, States, StoredParameter
from tools.planning.training_shards import (
    TrainingLayout,
    check_layout,
    place_of,
    stage_chunks,
)

# Of a distributed optimizer: float32 weights and both moments.
STATES = ("param", "exp_avg", "exp_avg_sq")
# Of megatron's buffers, in elements: where a parameter begins, and where the last one ends.
PARAMETER_ALIGNMENT = 64
END_ALIGNMENT = 128
# megatron stores a norm under the name that it has where it is fused.
STORED_NAMES = {own: fused for fused, own in FUSED_NORMS.items()}


@dataclass(frozen=True)
class Array:
    """A parameter of a rank, as a checkpoint has it."""

    key: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    is_expert: bool
    is_main: bool

    @property
    def numel(self) -> int:
        return sum(math.prod(box.sizes) for box in self.boxes)


class Layout:
    """What every rank of a training layout holds."""

    def __init__(self, arch: Architecture, layout: TrainingLayout) -> None:
        check_layout(arch, layout)
        self.arch = arch
        self.layout = layout
        self.vocab_rows = padded_vocab(
            arch.vocab_size, layout.vocab_multiple, layout.parallel.tensor
        )

    def data_parallel(self, rank: int, *, is_expert: bool) -> tuple[int, int]:
        """Place in the group of the ranks that hold the same parameters, and its size."""
        parallel = self.layout.parallel
        width = parallel.expert * parallel.expert_tensor if is_expert else parallel.tensor
        inner = rank % self.layout.stage_ranks
        return inner // width, self.layout.stage_ranks // width

    def arrays(self, rank: int) -> list[Array]:
        """In the order of the model."""
        place = place_of(self.layout, rank)
        parallel = self.layout.parallel
        before, after = outer_parameters(self.arch)
        found: list[Array] = []
        if place.stage == 0:
            found += [self._array(parameter, rank) for parameter in before]
        count = self.arch.num_experts // parallel.expert
        for layer in itertools.chain(*stage_chunks(self.arch, parallel, place.stage)):
            found += [self._array(each, rank) for each in layer_parameters(self.arch, layer)]
            for expert in range(place.expert * count, (place.expert + 1) * count):
                for parameter in expert_parameters(self.arch, layer, expert):
                    found.append(self._array(parameter, rank))
        if place.stage == parallel.pipeline - 1:
            found += [self._array(parameter, rank) for parameter in after]
        return found

    def _array(self, parameter: Parameter, rank: int) -> Array:
        place = place_of(self.layout, rank)
        at, size = place.tensor, self.layout.parallel.tensor
        name = parameter.slot.megatron
        outer: list[tuple[int, int]] = []  # (number, of how many) in front of the parameter's axes
        if parameter.layer is not None:
            outer.append((parameter.layer, self.arch.num_layers))
            name = f"decoder.layers.{STORED_NAMES.get(name, name)}"
        if parameter.expert is not None:
            at, size = place.expert_tensor, self.layout.parallel.expert_tensor
            outer.append((parameter.expert, self.arch.num_experts))
            name = f"decoder.layers.mlp.experts.experts.{parameter.slot.megatron}"
        whole = local_shape(parameter, self.arch, self.vocab_rows, 1)
        shape = local_shape(parameter, self.arch, self.vocab_rows, size)
        axis = axis_sizes(parameter, self.arch, self.vocab_rows)[2]
        boxes = []
        first = 0
        for offsets, sizes in _parts(parameter, whole, shape, axis, at):
            corner = (*(number for number, _ in outer), *offsets)
            boxes.append(Box(corner, (*(1 for _ in outer), *sizes), first))
            first += math.prod(sizes)
        is_main = axis != -1 or at == 0
        array_shape = (*(many for _, many in outer), *whole)
        return Array(name, array_shape, tuple(boxes), parameter.expert is not None, is_main)


def _parts(
    parameter: Parameter, whole: Sequence[int], shape: Sequence[int], axis: int, at: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of what tensor rank ``at`` has: gate and up lie apart in the array."""
    count = 2 if parameter.slot.kind == "gate_up" else 1
    sizes = list(shape)
    if axis != -1:
        sizes[axis] //= count
    for part in range(count):
        offsets = [0] * len(sizes)
        if axis != -1:
            offsets[axis] = part * whole[axis] // count + at * sizes[axis]
        yield tuple(offsets), tuple(sizes)


def spans(arrays: Sequence[Array], rank: int, size: int) -> list[Range]:
    """Which elements of each array a distributed optimizer gives to data-parallel rank ``rank``:
    megatron lays them one after another from the last to the first, and cuts the row evenly."""
    starts: list[int] = [0] * len(arrays)
    end = 0
    for number in reversed(range(len(arrays))):
        starts[number] = -(-end // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        end = starts[number] + arrays[number].numel
    multiple = math.lcm(size, END_ALIGNMENT)
    part = -(-end // multiple) * multiple // size
    found = []
    for array, start in zip(arrays, starts, strict=True):
        low = min(max(rank * part - start, 0), array.numel)
        high = min(max((rank + 1) * part - start, 0), array.numel)
        found.append((low, high))
    return found


class SimulatedCut(Cut):
    """``Cut`` on a rank that is not there."""

    def __init__(
        self, held: Sequence[tuple[Tensor, States | None]], layout: Layout, rank: int
    ) -> None:
        self._groups = {
            is_expert: layout.data_parallel(rank, is_expert=is_expert)
            for is_expert in (False, True)
        }
        super().__init__(held)

    def rank(self, number: int) -> int:
        return self._groups[self.is_expert(number)][0]

    def size(self, number: int) -> int:
        return self._groups[self.is_expert(number)][1]


def held_by(layout: Layout, arrays: Sequence[Array], rank: int) -> list[tuple[Tensor, States]]:
    """Parameters without memory, and their states."""
    span_of: dict[int, Range] = {}
    for is_expert in (False, True):
        numbers = [i for i, array in enumerate(arrays) if array.is_expert == is_expert]
        alike = [arrays[number] for number in numbers]
        place = layout.data_parallel(rank, is_expert=is_expert)
        span_of.update(zip(numbers, spans(alike, *place), strict=True))
    held = []
    for number, array in enumerate(arrays):
        values = torch.empty(array.numel, dtype=torch.bfloat16, device="meta")
        values.allreduce = not array.is_expert  # type: ignore[attr-defined]
        low, high = span_of[number]

        def states(count: int = high - low) -> dict[str, Tensor]:
            return {name: torch.empty(count, device="meta") for name in STATES}

        held.append((values, States((low, high), states, is_distributed=True)))
    return held


def stored_by(layout: Layout, rank: int) -> list[StoredParameter]:
    """As ``stored_parameters`` of that rank."""
    arrays = layout.arrays(rank)
    held = held_by(layout, arrays, rank)
    cut = SimulatedCut(held, layout, rank)
    found = []
    for number, (array, (values, states)) in enumerate(zip(arrays, held, strict=True)):
        found.append(
            StoredParameter(
                chunk=0,
                name=str(number),
                values=values,
                key=array.key,
                array_shape=array.shape,
                boxes=array.boxes,
                may_differ=False,
                is_main=array.is_main,
                states=states,
                writes=cut.writes[number],
                reads=cut.reads[number],
                is_expert=array.is_expert,
            )
        )
    return found
