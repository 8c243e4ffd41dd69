"""The device of this process, and stand-ins for CUDA on a machine without it.

Megatron calls a few functions of ``torch.cuda`` unconditionally. Inside ``platform()`` the names
below replace them, outside nothing is changed (other libraries of the process patch some of the
same names for themselves). On a machine with CUDA nothing is ever replaced.
"""

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _CpuEvent:
    """An event of a CPU, where everything recorded has already happened."""

    def synchronize(self) -> None: ...


class _CpuStream:
    """The only stream of a CPU: in order, synchronous."""

    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _CpuEvent:
        return _CpuEvent()


# Variables of deterministic kernels: what counts as such, of which the first is set where there is
# nothing. The reasons stand in the manuals of cuBLAS (workspaces), NCCL and Transformer Engine.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}
# Every name of torch.cuda that is replaced inside the scope.
STAND_INS: dict[str, Any] = {
    # Gradient buffers, receive buffers and rotary tables are allocated on it.
    "current_device": lambda: "cpu",
    # Called before and after pipeline shapes of variable length are exchanged.
    "synchronize": lambda *_: None,
    # The all-to-all of tokens to experts makes a side stream for its copies, and waits for the
    # current one before it reads the counts.
    "Stream": _CpuStream,
    "current_stream": lambda *_: _CpuStream(),
}


class CpuForCuda(TorchFunctionMode):
    """Answers three kinds of call with CPU tensors as a CUDA build would.

    A literal ``device="cuda"`` (and the pinned memory that goes with it), ``Tensor.cuda()``, and
    ``Tensor.type()``, whose answer Megatron compares with the CUDA names. torch does not apply a
    function mode inside ``backward()``.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
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
    """Puts the stand-ins in place for a ``with`` block; may be nested. No-op with CUDA."""
    if torch.cuda.is_available():
        yield
        return
    originals = {name: getattr(torch.cuda, name) for name in STAND_INS}
    for name, stand_in in STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    try:
        with CpuForCuda():
            yield
    finally:
        for name, original in originals.items():
            setattr(torch.cuda, name, original)


def device() -> torch.device:
    """The device on which this process computes."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` of the host on ``device``; the host does not wait for the copy.

    CUDA copies from pageable memory only after everything queued before has run. From pinned memory
    the copy is queued like a kernel; torch reuses the pinned block only after it.
    """
    if device.type != "cuda" or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def make_deterministic(environment: MutableMapping[str, str]) -> None:
    """Has torch, cuBLAS, NCCL and Transformer Engine choose kernels that give the same bits for the
    same input, before the first of their calls on a device.

    torch warns, once, of an operation that has no such kernel: the engine of a colocated run shares
    the switch, and its samplers may have some.

    Args:
        environment: the variables of this process.

    Raises:
        ValueError: a variable says otherwise.
    """
    for name, values in DETERMINISTIC.items():
        if environment.setdefault(name, values[0]) not in values:
            raise ValueError(
                f"trainer.deterministic = true and {name}={environment[name]}: set it to"
                f" {' or '.join(values)}, or unset it"
            )
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Nothing here reads memory before it is written, so it need not be filled.
    torch.utils.deterministic.fill_uninitialized_memory = False  # ty: ignore[missing-attribute]
