"""Torch-level stand-ins for the few CUDA-only spots that training code reaches on a machine without CUDA.

``platform()`` is a scope: inside it the names below stand in for their CUDA versions, outside nothing is changed (other
libraries of the process patch some of the same names for themselves). With CUDA it does nothing at all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Every name of torch.cuda that is replaced inside the scope, and why.
REASONS = {
    "current_device": "buffers are allocated on torch.cuda.current_device() (gradient buffers, receive buffers, rotary tables)",
    "synchronize": "pipeline shapes of variable length are exchanged between two calls of torch.cuda.synchronize()",
    "Stream": "the all-to-all of tokens to experts makes a side stream for its copies",
    "Event": "the all-to-all of tokens to experts records an event on its side stream",
    "stream": "the all-to-all of tokens to experts enters its side stream",
    "current_stream": "the all-to-all of tokens to experts orders its side stream after the current one",
    "default_stream": "asynchronous checkpoint writing waits for the default stream",
}


class CpuEvent:
    """A time stamp: on the CPU everything recorded has already happened."""

    def __init__(self, **_: Any) -> None:
        self.recorded_s = 0.0

    def record(self, *_: Any) -> None:
        self.recorded_s = time.perf_counter()

    def elapsed_time(self, later: CpuEvent) -> float:
        """Milliseconds from this event to ``later``."""
        return (later.recorded_s - self.recorded_s) * 1e3

    def synchronize(self) -> None: ...

    def wait(self, *_: Any) -> None: ...


class CpuStream:
    """The only stream there is: in order, synchronous."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        event = CpuEvent() if event is None else event
        event.record()
        return event


STAND_INS: dict[str, Any] = {
    "current_device": lambda: "cpu",
    "synchronize": lambda *_: None,
    "Stream": CpuStream,
    "Event": CpuEvent,
    "stream": lambda _: contextlib.nullcontext(),
    "current_stream": lambda *_: CpuStream(),
    "default_stream": lambda *_: CpuStream(),
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
