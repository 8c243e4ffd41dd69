"""Where an engine's own loader puts each element of a checkpoint: found by watching it load tensors that have no data.

No table of architectures: whatever slices the loader cuts and wherever it copies them, views of a tensor without data carry their
offset, shape and strides all the same, and that is all a box is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.types import Box

Loader = Callable[[Iterable[tuple[str, Tensor]]], Any]


class UndiscoveredError(RuntimeError):
    """A loader does something to a checkpoint's tensor other than copy slices of it."""


def record_boxes(load: Loader, shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Tensor], dtype: torch.dtype) -> list[Box]:
    """The boxes of the tensors ``shapes`` that ``load`` copies into ``parameters``, in the order of the copies. Nothing is copied.

    ``load`` gets tensors of ``dtype`` on the meta device. Raises UndiscoveredError naming the tensor whose way cannot be followed.
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
        raise UndiscoveredError(f"the loader of the engine cannot be watched at {recorder.latest}: {error}") from error
    return recorder.boxes


class _Recorder(TorchDispatchMode):
    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.parameters = {_storage(tensor): (key, tensor) for key, tensor in parameters.items()}
        self.sources: dict[int, tuple[str, Tensor]] = {}  # keeps the tensors, so that no storage is mistaken for another
        self.boxes: list[Box] = []
        self.latest = "the start"

    def source(self, name: str, tensor: Tensor) -> Tensor:
        self.sources[_storage(tensor)] = (name, tensor)
        self.latest = name
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        target = args[0] if args and isinstance(args[0], Tensor) else None
        if target is None or not func._schema.is_mutable or _storage(target) not in self.parameters:
            return func(*args, **(kwargs or {}))
        key, parameter = self.parameters[_storage(target)]
        aten = torch.ops.aten
        if func is aten.copy_.default:
            if target.numel():  # a shard of the vocabulary may be padding throughout
                self.boxes.append(self._box(key, parameter, target, args[1]))
        elif not (func is aten.zero_.default or (func in (aten.fill_.Scalar, aten.fill_.Tensor) and args[1] == 0)):  # padding is zero
            raise UndiscoveredError(f"the loader of the engine changes {key} by {func} at {self.latest}")
        return target

    def _box(self, key: str, parameter: Tensor, target: Tensor, source: Tensor) -> Box:
        if _storage(source) not in self.sources:
            raise UndiscoveredError(f"the loader of the engine computes what it copies into {key} at {self.latest}")
        name, whole = self.sources[_storage(source)]
        start, rest = [], source.storage_offset()
        for size in whole.stride():
            start.append(rest // max(size, 1))
            rest %= max(size, 1)
        shape, stride = [1] * whole.dim(), [1] * whole.dim()
        sizes = [n for n in source.shape if n > 1]
        steps = [s for n, s in zip(source.shape, source.stride(), strict=True) if n > 1]
        to = [s for n, s in zip(target.shape, target.stride(), strict=True) if n > 1]
        dims = [[d for d in range(whole.dim()) if whole.shape[d] > 1 and whole.stride(d) == step] for step in steps]
        straight = sizes == [n for n in target.shape if n > 1] and all(len(found) == 1 for found in dims)
        for size, found, step in zip(sizes, dims, to, strict=True) if straight else ():
            shape[found[0]], stride[found[0]] = size, step
        if not straight or any(a + n > full for a, n, full in zip(start, shape, whole.shape, strict=True)):
            raise UndiscoveredError(
                f"the loader of the engine copies a view of {name} that is no slice of it: shape {tuple(source.shape)}, "
                f"strides {source.stride()}, into {key} {tuple(target.shape)}"
            )
        offset = target.storage_offset() - parameter.storage_offset()
        dtype = str(parameter.dtype).removeprefix("torch.")
        return Box(name, tuple(whole.shape), dtype, tuple(start), tuple(shape), key, offset, tuple(stride))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def partly_filled(boxes: Iterable[Box], parameters: Mapping[str, Tensor]) -> set[str]:
    """The parameters that the boxes do not fill to the last element (a vocabulary has padding)."""
    filled: dict[str, int] = {}
    for box in boxes:
        filled[box.key] = (filled[box.key] if box.key in filled else 0) + math.prod(box.shape)
    return {key for key, count in filled.items() if count != parameters[key].numel()}
