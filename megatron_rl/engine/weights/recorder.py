"""Records where an engine's own loader puts each element of a checkpoint, by watching it load
tensors that have no data.

No table of architectures: whatever slices the loader cuts and wherever it copies them, views of a
tensor without data carry their offset, shape and strides all the same, and a shard is no more.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.types import Shard

Loader = Callable[[Iterable[tuple[str, Tensor]]], Any]


class UndiscoveredError(RuntimeError):
    """A loader does something to a checkpoint's tensor other than copy slices of it."""


def record_shards(
    load: Loader,
    shapes: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> tuple[list[Shard], set[str]]:
    """The shards of the tensors ``shapes`` that ``load`` copies into ``parameters``, in the order
    of the copies, and the parameters into which it copies a tensor that it has made zero (a bias
    that another rank adds). Nothing is copied.

    ``load`` gets tensors of ``dtype`` on the meta device. Raises UndiscoveredError, which names the
    tensor that cannot be followed.
    """
    recorder = _Recorder(parameters)

    def feed() -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            yield name, recorder.source(name, torch.empty(shape, dtype=dtype, device="meta"))

    try:
        with recorder:
            load(feed())
    except UndiscoveredError:
        raise
    except Exception as error:
        raise UndiscoveredError(
            f"the loader of the engine cannot be watched at {recorder.latest}: {error}"
        ) from error
    return recorder.shards, recorder.zeroed


class _Recorder(TorchDispatchMode):
    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.parameters = {_storage(tensor): (key, tensor) for key, tensor in parameters.items()}
        # Keeps the tensors, so that no storage is mistaken for another.
        self.sources: dict[int, tuple[str, Tensor]] = {}
        # Copies of views of sources (``contiguous``), each with its view.
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.shards: list[Shard] = []
        self.zeros: set[int] = set()  # sources
        self.zeroed: set[str] = set()
        self.latest = "the start"

    def source(self, name: str, tensor: Tensor) -> Tensor:
        self.sources[_storage(tensor)] = (name, tensor)
        self.latest = name
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        target = args[0] if args and isinstance(args[0], Tensor) else None
        aten = torch.ops.aten
        is_source = target is not None and _storage(target) in self.sources
        if target is None or not func._schema.is_mutable or _storage(target) not in self.parameters:
            if is_source and func._schema.is_mutable:
                self._make_zero(func, target)
            result = func(*args, **(kwargs or {}))
            if is_source and func is aten.clone.default:
                self.copies[_storage(result)] = (result, target)
            return result
        key, parameter = self.parameters[_storage(target)]
        # From here on nothing is called: there are no data, and the parameters stay as they are.
        if func is aten.copy_.default:
            if _storage(args[1]) in self.zeros:
                self.zeroed.add(key)
            elif target.numel():  # a shard of the vocabulary may be padding throughout
                self.shards.append(self._shard(key, parameter, target, args[1]))
            return target
        fills = (aten.fill_.Scalar, aten.fill_.Tensor)
        # Zeros are padding.
        if func is not aten.zero_.default and not (func in fills and args[1] == 0):
            raise UndiscoveredError(
                f"the loader of the engine changes {key} by {func} at {self.latest}"
            )
        return target

    def _make_zero(self, func: Any, source: Tensor) -> None:
        name, whole = self.sources[_storage(source)]
        if func is not torch.ops.aten.zero_.default or _layout(source) != _layout(whole):
            raise UndiscoveredError(f"the loader of the engine changes {name} by {func}")
        self.zeros.add(_storage(source))

    def _shard(self, key: str, parameter: Tensor, target: Tensor, source: Tensor) -> Shard:
        """What a copy of ``source`` into ``target``, a view of ``parameter``, says of the two."""
        copy, view = self.copies.get(_storage(source), (source, source))
        if _layout(copy) == _layout(source):
            source = view
        if _storage(source) not in self.sources:
            raise UndiscoveredError(
                f"the loader of the engine computes what it copies into {key} at {self.latest}"
            )
        name, whole = self.sources[_storage(source)]
        # The whole tensor is contiguous: an offset in the digits of its strides is a corner.
        start = []
        rest = int(source.storage_offset())
        for step in whole.stride():
            first, rest = divmod(rest, max(int(step), 1))
            start.append(first)
        axes = _sliced_axes(source, whole)
        # A loader may add or drop axes of one element, so both sides are compared without them;
        # along such an axis any step will do.
        steps = [step for size, step in zip(target.shape, target.stride()) if size > 1]
        shape = [1] * whole.dim()
        stride = [1] * whole.dim()
        is_slice = axes is not None and list(axes.values()) == [n for n in target.shape if n > 1]
        if is_slice:
            for (axis, size), step in zip(axes.items(), steps, strict=True):
                shape[axis] = size
                stride[axis] = step
        inside = zip(start, shape, whole.shape, strict=True)
        if not is_slice or any(first + size > full for first, size, full in inside):
            raise UndiscoveredError(
                f"the loader of the engine copies a view of {name} that is no slice of it: shape"
                f" {tuple(source.shape)}, strides {source.stride()}, into {key}"
                f" {tuple(target.shape)}"
            )
        return Shard(
            name,
            full=tuple(whole.shape),
            start=tuple(start),
            shape=tuple(shape),
            offset=int(target.storage_offset() - parameter.storage_offset()),
            stride=tuple(stride),
            key=key,
            dtype=str(parameter.dtype).removeprefix("torch."),
        )


def _sliced_axes(source: Tensor, whole: Tensor) -> dict[int, int] | None:
    """Axis of ``whole`` -> size of ``source`` along it, for the axes of ``source`` longer than 1,
    in their order; an axis is known by its stride. None where one is no axis of ``whole``."""
    # The whole tensor is contiguous: two axes longer than 1 have different steps.
    sizes = enumerate(zip(whole.shape, whole.stride(), strict=True))
    axis_of = {step: axis for axis, (size, step) in sizes if size > 1}
    longer = [(size, step) for size, step in zip(source.shape, source.stride()) if size > 1]
    if any(step not in axis_of for _, step in longer):
        return None
    return {axis_of[step]: size for size, step in longer}


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _storage(tensor: Tensor) -> int:
    # Tensors without data all have the address 0; the storage object itself tells them apart.
    return tensor.untyped_storage()._cdata


def partly_filled(shards: Iterable[Shard], parameters: Mapping[str, Tensor]) -> set[str]:
    """The parameters that the shards do not fill to the last element (a vocabulary has padding)."""
    filled: dict[str, int] = defaultdict(int)
    for shard in shards:
        filled[shard.key] += math.prod(shard.shape)
    return {key for key, count in filled.items() if count != parameters[key].numel()}
