"""What of this rank's state a checkpoint holds, where it belongs there, and which part is this
rank's to write and to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_rl.checkpoints.chunks import ArrayLocation, Box, Range, even_ranges
from megatron_rl.policy.optimizer import parts

Shard = ShardedTensor | ShardedTensorFactory
STATE = "optimizer.state."
REFERENCE = "reference."
# Names of float32 master weights: of a distributed optimizer, and of one that every rank has whole.
MASTERS = ("param", "fp32_param")


@dataclass(frozen=True)
class States:
    """Adam's state of one parameter on this rank: the elements ``span`` of the flattened parameter.

    Attributes:
        get: by name, flat.
        put: takes what is to replace them; None: ``get`` gives the memory of the optimizer, to be
            written into.
    """

    span: Range
    get: Callable[[], Mapping[str, Tensor]]
    put: Callable[[Mapping[str, Tensor]], None] | None = None
    is_distributed: bool = False


@dataclass(frozen=True)
class StoredParameter:
    """A parameter (or buffer) of this rank as a checkpoint has it.

    Args:
        values: of the module; may be kept in FP8.
        is_main: among tensor and pipeline ranks that have the same elements, this one writes them.
        states: None: it is not trained.
        writes: which elements this rank writes, of the weight and of all that belongs to it.
        reads: which elements of what all data-parallel ranks hold each of them reads, by rank;
            those that read nothing are left out.
        is_expert: whether its data-parallel ranks are those of the experts.
    """

    chunk: int
    name: str
    values: Tensor
    key: str
    array_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    may_differ: bool
    is_main: bool
    states: States | None
    writes: Range
    reads: Mapping[int, Range]
    is_expert: bool

    def place(self, dtype: torch.dtype, prefix: str = "") -> ArrayLocation:
        """Location of what belongs to the parameter, under ``prefix`` and the parameter's key."""
        key = prefix + self.key
        return ArrayLocation(key, self.array_shape, dtype, self.boxes, self.may_differ)


def data_parallel_group(*, is_expert: bool, device: torch.device) -> Any:
    """The ranks that hold the same parameters; for tensors on the host, their gloo group."""
    state = parallel_state
    if device.type == "cpu":
        if is_expert:
            return state.get_expert_data_parallel_group_gloo()
        return state.get_data_parallel_group_gloo(with_context_parallel=True)
    if is_expert:
        return state.get_expert_data_parallel_group()
    return state.get_data_parallel_group(with_context_parallel=True)


def stored_parameters(chunks: Sequence[Mapping[str, Any]], optimizer: Any) -> list[StoredParameter]:
    """The tensors of all model chunks, in an order that is the same on all data-parallel ranks.

    Args:
        chunks: what ``sharded_state_dict`` of each model chunk returns.
    """
    states = optimizer_states(optimizer)
    items = []
    for chunk, shards in enumerate(chunks):
        for name, shard in shards.items():
            if isinstance(shard, Shard):
                items.append((chunk, name, shard))
    cut = Cut([(shard.data, states.get(shard.data)) for _, _, shard in items])
    found = []
    for number, (chunk, name, shard) in enumerate(items):
        pieces = _pieces(shard)
        group_rank = cut.rank(number)
        replica = shard.replica_id
        assert isinstance(replica, tuple) and replica[-1] == group_rank, (
            f"{name} is replica {replica} on data-parallel rank {group_rank}"
        )
        found.append(
            StoredParameter(
                chunk=chunk,
                name=name,
                values=shard.data,
                key=pieces[0].key,
                array_shape=tuple(pieces[0].global_shape),
                boxes=_boxes(name, pieces, shard.data.numel()),
                may_differ=any(piece.allow_shape_mismatch for piece in pieces),
                # The last number is the data-parallel rank, whose share is cut separately.
                is_main=not any(replica[:-1]),
                states=states.get(shard.data),
                writes=cut.writes[number],
                reads=cut.reads[number],
                is_expert=cut.is_expert(number),
            )
        )
    return found


class Cut:
    """Which rank writes and reads which elements of (parameter, its states) number i.

    What a distributed optimizer cuts is written as it cuts it: then a weight and its float32 master
    are on one rank. Everything else, and all reading of what every rank has, is cut evenly.
    """

    def __init__(self, held: Sequence[tuple[Tensor, States | None]]) -> None:
        self._held = held
        self.reads: list[Mapping[int, Range]] = [{} for _ in held]
        self.writes: list[Range] = [(0, 0) for _ in held]
        for is_expert in (False, True):
            mine = [number for number in range(len(held)) if self.is_expert(number) == is_expert]
            for number, ranges in self._even(mine):
                self.reads[number] = ranges
            # Bytes a parameter: a trained one has moments.
            for trained in (False, True):
                alike = [number for number in mine if (held[number][1] is not None) == trained]
                for number, ranges in self._even(alike):
                    self.writes[number] = ranges.get(self.rank(number), (0, 0))
        for number, (_, states) in enumerate(held):
            if states is not None and states.is_distributed:
                self.writes[number] = states.span

    def is_expert(self, number: int) -> bool:
        """megatron marks the parameters of experts so."""
        return not getattr(self._held[number][0], "allreduce", True)

    def rank(self, number: int) -> int:
        """Among the ranks that hold the same."""
        return dist.get_rank(self._group(number))

    def size(self, number: int) -> int:
        """How many ranks hold the same."""
        return dist.get_world_size(self._group(number))

    def _group(self, number: int) -> Any:
        host = torch.device("cpu")  # either group has the same ranks
        return data_parallel_group(is_expert=self.is_expert(number), device=host)

    def _even(self, numbers: Sequence[int]) -> Iterator[tuple[int, Mapping[int, Range]]]:
        """Numbers of one group, each with its range on every rank that has one."""
        if not numbers:
            return
        lengths = [self._held[number][0].numel() for number in numbers]
        shares = even_ranges(lengths, self.size(numbers[0]))
        yield from zip(numbers, shares, strict=True)


def _pieces(shard: Shard) -> list[ShardedTensor]:
    """The shards of one array in a tensor of the model, as views of a tensor without memory."""
    if isinstance(shard, ShardedTensor):
        return [shard]
    empty = torch.empty(shard.data.shape, dtype=shard.data.dtype, device="meta")
    built = shard.build_fn(shard.key, empty, shard.replica_id, shard.flattened_range)
    pieces = list(built.values()) if isinstance(built, dict) else list(built)
    assert all(isinstance(piece, ShardedTensor) for piece in pieces), f"{shard.key}: {built}"
    return pieces


def _boxes(name: str, pieces: Sequence[ShardedTensor], num_elements: int) -> tuple[Box, ...]:
    boxes = []
    for piece in sorted(pieces, key=lambda piece: _first(piece, len(pieces))):
        # megatron leaves the axes in front (layers, experts) out of the local shape.
        ones = (1,) * piece.prepend_axis_num
        first = _first(piece, len(pieces))
        boxes.append(Box(tuple(piece.global_offset), (*ones, *piece.local_shape), first))
    ends = [0]
    for box in boxes:
        ends.append(ends[-1] + torch.Size(box.sizes).numel())
    one_array = len({(piece.key, tuple(piece.global_shape)) for piece in pieces}) == 1
    in_order = [box.first for box in boxes] == ends[:-1] and ends[-1] == num_elements
    contiguous = len(pieces) == 1 or all(piece.data.is_contiguous() for piece in pieces)
    assert one_array and in_order and contiguous, (
        f"megatron cuts {name} into {pieces}, which are no rows of it one after the other"
    )
    return tuple(boxes)


def _first(piece: ShardedTensor, count: int) -> int:
    """First element of a piece in the rank's tensor, flattened."""
    return 0 if count == 1 else int(piece.data.storage_offset())


def optimizer_states(optimizer: Any) -> dict[Tensor, States]:
    """Adam's state by parameter of the module; of those that are trained."""
    found: dict[Tensor, States] = {}
    for part in parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            found |= _distributed_states(part)
        else:
            found |= dict(_whole_states(part))
    return found


def _distributed_states(part: Any) -> dict[Tensor, States]:
    found: dict[Tensor, States] = {}
    converts = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8

    def states_of(parameter: Tensor, span: Range) -> States:
        def get() -> Mapping[str, Tensor]:
            return _without_step(part._get_main_param_and_optimizer_states(parameter))

        def put(tensors: Mapping[str, Tensor]) -> None:
            there = {name: tensor.to(parameter.device) for name, tensor in tensors.items()}
            part._set_main_param_and_optimizer_states(parameter, there)

        return States(span, get, put if converts else None, is_distributed=True)

    for buffer, by_dtype in zip(part.buffers, part.gbuf_ranges, strict=True):
        for parameter in buffer.param_index_map:
            # This rank steps nothing of it; replaced below where it does.
            found[parameter] = States((0, 0), dict, is_distributed=True)
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, places in bucket["param_map"].items():
                    span = (places["param"].start, places["param"].end)
                    found[parameter] = states_of(parameter, span)
    return found


def _whole_states(part: Any) -> Iterator[tuple[Tensor, States]]:
    """States of an optimizer that every data-parallel rank has whole."""
    pairs: list[tuple[Tensor, Tensor]] = []  # a parameter, and what the optimizer steps for it
    if hasattr(part, "float16_groups"):
        for group, copies in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            pairs += zip(group, copies, strict=True)
        for group in part.fp32_from_fp32_groups:
            pairs += [(parameter, parameter) for parameter in group]
    else:
        for group in part.param_groups:
            pairs += [(parameter, parameter) for parameter in group["params"]]
    for parameter, main in pairs:
        state = part.optimizer.state[main]
        tensors = _without_step(state if main is parameter else {"fp32_param": main, **state})
        span = (0, parameter.numel())
        yield parameter, States(span, lambda tensors=tensors: tensors)


def _without_step(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state as flat tensors; step counts are kept with the groups of parameters."""
    return {
        name: tensor.detach().view(-1)
        for name, tensor in state.items()
        if torch.is_tensor(tensor) and name != "step"
    }
