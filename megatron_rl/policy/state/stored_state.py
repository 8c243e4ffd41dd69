"""What of this rank's state a checkpoint holds, where it belongs there, and which part is this
rank's to write and to read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
Name = tuple[int, str]  # number of the model chunk, name in it
STATE = "optimizer.state."
REFERENCE = "reference."
# Names of float32 master weights: of a distributed optimizer, and of one that every rank has whole.
MASTERS = ("param", "fp32_param")


@dataclass(frozen=True)
class States:
    """Adam's state of one parameter on this rank: elements ``span`` of the flattened parameter."""

    span: Range
    get: Callable[[], Mapping[str, Tensor]]  # by name, flat
    # Takes what is to replace them; None: ``get`` gives the optimizer's memory, to be written into.
    put: Callable[[Mapping[str, Tensor]], None] | None = None
    is_distributed: bool = False


@dataclass(frozen=True)
class StoredParameter:
    """A parameter (or buffer) of this rank as a checkpoint has it.

    Args:
        name: number of the model chunk, name in it.
        values: of the module; may be kept in FP8.
        location: of the values, as the module has them.
        is_main: among tensor and pipeline ranks that have the same elements, this one writes them.
        states: None: it is not trained.
        writes: which elements this rank writes, of the weight and of all that belongs to it.
        reads: which elements of what all data-parallel ranks hold each of them reads, by rank;
            those that read nothing are left out.
    """

    name: Name
    values: Tensor
    location: ArrayLocation
    is_main: bool
    states: States | None
    writes: Range
    reads: Mapping[int, Range]

    def place(self, dtype: torch.dtype, prefix: str = "") -> ArrayLocation:
        """Location of what belongs to the parameter, under ``prefix`` and the parameter's key."""
        return replace(self.location, key=prefix + self.location.key, dtype=dtype)

    def group(self, device: torch.device) -> Any:
        """The ranks that hold the same parameter; for tensors on the host, their gloo group."""
        return _group(_is_expert(self.values), device)


def _is_expert(values: Tensor) -> bool:
    """megatron marks the parameters of experts so."""
    return not getattr(values, "allreduce", True)


def _group(is_expert: bool, device: torch.device) -> Any:
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
    items: list[tuple[Name, Shard]] = []
    for chunk, shards in enumerate(chunks):
        items += [((chunk, name), each) for name, each in shards.items() if isinstance(each, Shard)]
    cuts = _cuts([(shard.data, states.get(shard.data)) for _, shard in items])
    found = []
    for (name, shard), (rank, writes, reads) in zip(items, cuts, strict=True):
        replica = shard.replica_id
        assert isinstance(replica, tuple) and replica[-1] == rank, (
            f"{name} is replica {replica} on data-parallel rank {rank}"
        )
        # The last number is the data-parallel rank, whose share is cut separately.
        is_main = not any(replica[:-1])
        location = _location(name, shard)
        of_states = states.get(shard.data)
        found.append(StoredParameter(name, shard.data, location, is_main, of_states, writes, reads))
    return found


def _cuts(
    held: Sequence[tuple[Tensor, States | None]],
) -> list[tuple[int, Range, Mapping[int, Range]]]:
    """Of each (parameter, its states): this rank among those that hold the same, what it writes,
    and what each of them reads.

    What a distributed optimizer cuts is written as it cuts it: then a weight and its float32 master
    are on one rank. Everything else, and all reading of what every rank has, is cut evenly.
    """
    cuts: dict[int, tuple[int, Range, Mapping[int, Range]]] = {}
    for is_expert in (False, True):
        mine = [number for number, each in enumerate(held) if _is_expert(each[0]) == is_expert]
        if not mine:
            continue
        group = _group(is_expert, torch.device("cpu"))  # either group has the same ranks
        rank = dist.get_rank(group)
        reads = _even(held, mine, group)
        # Bytes a parameter: a trained one has moments.
        trained = [number for number in mine if held[number][1] is not None]
        others = [number for number in mine if held[number][1] is None]
        writes = _even(held, trained, group) | _even(held, others, group)
        for number in mine:
            states = held[number][1]
            own = writes[number].get(rank, (0, 0))
            if states is not None and states.is_distributed:
                own = states.span
            cuts[number] = (rank, own, reads[number])
    return [cuts[number] for number in range(len(held))]


def _even(
    held: Sequence[tuple[Tensor, Any]], numbers: Sequence[int], group: Any
) -> dict[int, dict[int, Range]]:
    """Of each of ``numbers`` the range on every rank that has one."""
    lengths = [held[number][0].numel() for number in numbers]
    return dict(zip(numbers, even_ranges(lengths, dist.get_world_size(group)), strict=True))


def _pieces(shard: Shard) -> list[ShardedTensor]:
    """The shards of one array in a tensor of the model, as views of a tensor without memory."""
    if isinstance(shard, ShardedTensor):
        return [shard]
    empty = torch.empty(shard.data.shape, dtype=shard.data.dtype, device="meta")
    built = shard.build_fn(shard.key, empty, shard.replica_id, shard.flattened_range)
    pieces = list(built.values()) if isinstance(built, dict) else list(built)
    assert all(isinstance(piece, ShardedTensor) for piece in pieces), f"{shard.key}: {built}"
    return pieces


def _location(name: Name, shard: Shard) -> ArrayLocation:
    pieces = _pieces(shard)
    boxes = []
    end = 0
    in_order = True
    for piece in sorted(pieces, key=lambda piece: _first(piece, len(pieces))):
        first = _first(piece, len(pieces))
        # megatron leaves the axes in front (layers, experts) out of the local shape.
        sizes = ((1,) * piece.prepend_axis_num) + tuple(piece.local_shape)
        suffix = piece.key.removeprefix(shard.key)  # of the parts of a gated delta net's matrix
        array = tuple(piece.global_shape)
        boxes.append(Box(tuple(piece.global_offset), sizes, first, suffix, array))
        in_order &= first == end
        end += torch.Size(sizes).numel()
    of_keys = {(piece.key, tuple(piece.global_shape)) for piece in pieces}
    one_array = len(of_keys) == len({key for key, _ in of_keys})  # each key is one
    one_array &= all(key == shard.key or key.startswith(f"{shard.key}.") for key, _ in of_keys)
    contiguous = len(pieces) == 1 or all(piece.data.is_contiguous() for piece in pieces)
    assert one_array and in_order and end == shard.data.numel() and contiguous, (
        f"megatron cuts {name} into {pieces}, which are no rows of it one after the other"
    )
    may_differ = any(piece.allow_shape_mismatch for piece in pieces)
    shape = tuple(pieces[0].global_shape)
    return ArrayLocation(shard.key, shape, shard.data.dtype, tuple(boxes), may_differ)


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
        yield parameter, States((0, parameter.numel()), lambda tensors=tensors: tensors)


def _without_step(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state as flat tensors; step counts are kept with the groups of parameters."""
    return {
        name: tensor.detach().view(-1)
        for name, tensor in state.items()
        if torch.is_tensor(tensor) and name != "step"
    }
