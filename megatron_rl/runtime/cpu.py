"""Torch-level stand-ins for the few CUDA-only spots that training code reaches on a machine without CUDA.

``platform()`` is a scope: inside it the names below stand in for their CUDA versions, outside nothing is changed (other
libraries of the process patch some of the same names for themselves). With CUDA it does nothing at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Every name of torch.cuda that is replaced inside the scope, and why.
REASONS = {
    "current_device": "buffers are allocated on torch.cuda.current_device() (gradient buffers, receive buffers, rotary tables)",
    "synchronize": "pipeline shapes of variable length are exchanged between two calls of torch.cuda.synchronize()",
    "Stream": "the all-to-all of tokens to experts makes a side stream for its copies",
    "current_stream": "the all-to-all of tokens to experts waits for the current stream before it reads the counts",
}


class CpuEvent:
    """On the CPU everything recorded has already happened."""

    def synchronize(self) -> None: ...


class CpuStream:
    """The only stream there is: in order, synchronous."""

    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> CpuEvent:
        return CpuEvent()


STAND_INS: dict[str, Any] = {
    "current_device": lambda: "cpu",
    "synchronize": lambda *_: None,
    "Stream": CpuStream,
    "current_stream": lambda *_: CpuStream(),
}


class CpuForCuda(TorchFunctionMode):
    """Answers three kinds of call as a CUDA build would, with CPU tensors: a literal ``device="cuda"`` (and the pinned
    memory that goes with it), ``Tensor.cuda()``, and ``Tensor.type()``, whose answer is compared with the CUDA names.

    torch does not apply a function mode inside ``backward()``."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if "device" in kwargs:
            kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


@contextlib.contextmanager
def platform() -> Iterator[None]:
    """The stand-ins, for the duration of a ``with``. May be nested. Nothing where torch has CUDA."""
    if torch.cuda.is_available():
        yield
        return
    before = {name: getattr(torch.cuda, name) for name in STAND_INS}
    for name, stand_in in STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    try:
        with CpuForCuda():
            yield
    finally:
        for name, original in before.items():
            setattr(torch.cuda, name, original)


def device() -> torch.device:
    """Where this process computes."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
