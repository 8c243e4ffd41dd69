"""A device played on the CPU: which tensors would be on it, and where the host would wait for it.

A tensor is on the device when it was made there (``device=`` a ``torch.device``; the text "cpu" is
the host), was moved there, or was computed from one that is. Storages are marked, so views and what
autograd saves keep the mark.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import megatron.core
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatron_rl
from megatron_rl.runtime import device as torch_cpu

# Their result, or its size, is known to the host only when the device has got so far.
WAITS = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_"}
TO_HOST = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
FROM_DATA = {torch.tensor, torch.as_tensor}
# Where a wait is attributed to.
WATCHED = tuple(f"{Path(package.__path__[0])}/" for package in (megatron_rl, megatron.core))


def place_of_call() -> tuple[str, list[str]]:
    """``file:function`` of the innermost frame of the program or of megatron, and the names of all
    functions around it."""
    frame, found, names = sys._getframe(1), "", []
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(WATCHED):
            name = frame.f_code.co_name
            names.append(name)
            # A comprehension has a frame of its own before Python 3.12.
            if not found and name[0] != "<" and name not in ("to_device", "__torch_function__"):
                found = f"{path.rpartition('/')[2]}:{name}"
        frame = frame.f_back
    return found, names


class SimulatedDevice:
    """``waits``: how often the host waited, by ``place: kind``. ``queued``: copies that wait for
    nothing on a GPU (``to_device``). ``vendor``: waits inside the functions named by ``of_vendor``,
    which are counted apart."""

    def __init__(self, of_vendor: Iterable[str]) -> None:
        self.of_vendor = set(of_vendor)
        self.paused = False
        self.calls: list[bool] = []
        self._kept: dict[int, Any] = {}  # storages stay alive: an address is never used twice
        self.clear()

    def clear(self) -> None:
        self.waits: Counter[str] = Counter()
        self.queued: Counter[str] = Counter()
        self.vendor: Counter[str] = Counter()

    def put(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
        self._kept[storage._cdata] = storage

    def take(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            self._kept.pop(tensor.untyped_storage()._cdata, None)

    def holds(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._kept

    def note(self, kind: str) -> None:
        if self.paused:
            return
        place, names = place_of_call()
        if self.of_vendor & set(names):
            self.vendor[f"{place}: {kind}"] += 1
        elif "to_device" in names:
            self.queued[place] += 1
        else:
            self.waits[f"{place}: {kind}"] += 1

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Objects travel between hosts, whatever torch does on the way."""
        gather = dist.all_gather_object

        def on_hosts(*args: Any, **kwargs: Any) -> None:
            before, self.paused = self.paused, True
            try:
                gather(*args, **kwargs)
            finally:
                self.paused = before

        stand_ins = {"current_device": lambda: torch.device("cpu")}
        with (
            mock.patch.object(dist, "all_gather_object", on_hosts),
            mock.patch.dict(torch_cpu.STAND_INS, stand_ins),
            mock.patch.object(torch_cpu, "CpuForCuda", OnDevice),
            Kernels(self),
            Calls(self),
        ):
            yield


class OnDevice(torch_cpu.CpuForCuda):
    """The platform's function mode, that says which CPU tensors are meant to be on the device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.cuda:
            return args[0].to(torch.device("cpu"))
        return super().__torch_function__(func, types, args, kwargs)


class Calls(TorchFunctionMode):
    """What shows only in the calls of Python: where a tensor is made, and moves."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        device, kwargs = self.device, dict(kwargs or {})
        if func is torch.Tensor.to:
            return self._moved(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made_there = isinstance(kwargs.get("device"), torch.device)
        on_device = made_there or any(device.holds(tensor) for tensor in tensors)
        if func in TO_HOST and on_device:
            device.note(func.__name__)
        if func in FROM_DATA and made_there:
            device.note(func.__name__)
        device.calls.append(on_device)
        try:
            result = func(*args, **kwargs)
        finally:
            device.calls.pop()
        if func is torch.Tensor.cpu and on_device:
            return self._other_storage(result, on_device=False)
        if made_there:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    device.put(leaf)
        return result

    def _moved(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        device, source = self.device, args[0]
        target = kwargs.get("device", args[1] if len(args) > 1 else None)
        device.calls.append(device.holds(source))
        try:
            result = func(*args, **kwargs)
        finally:
            device.calls.pop()
        if isinstance(target, Tensor):
            there = device.holds(target)
        elif isinstance(target, torch.device | str):
            there = isinstance(target, torch.device)
        else:
            return result
        if there == device.holds(source):
            return result
        device.note("to the device" if there else "to the host")
        return self._other_storage(result, on_device=there)

    def _other_storage(self, tensor: Tensor, on_device: bool) -> Tensor:
        moved = tensor.clone()
        if on_device:
            self.device.put(moved)
        else:
            self.device.take(moved)
        return moved


class Kernels(TorchDispatchMode):
    """Every operation, those of autograd too: the mark goes from operands to results."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, kwargs = self.device, kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [device.holds(tensor) for tensor in tensors]
        if any(there):
            self._judge(func.overloadpacket.__name__, args, tensors, there)
        result = func(*args, **kwargs)
        # What is made from no tensor follows the call around it; without one it is autograd's.
        made_there = not tensors and (device.calls[-1] if device.calls else True)
        if any(there) or made_there:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    device.put(leaf)
        return result

    def _judge(self, name: str, args: Any, tensors: list[Tensor], there: list[bool]) -> None:
        if name in WAITS:
            self.device.note(name)
        elif name in INDEXED and any(
            tensor.dtype == torch.bool for tensor in tree_leaves(args[1]) if tensor is not None
        ):
            self.device.note("index by a mask")
        elif name == "copy_" and there[0] != there[1]:
            self.device.note("copy to the device" if there[0] else "copy to the host")
        elif not all(
            mine or tensor.dim() == 0 for tensor, mine in zip(tensors, there, strict=True)
        ):
            self.device.note(f"a tensor of the host in {name}")
