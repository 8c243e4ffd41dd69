"""The starting weights: kept on the host, and swapped in for the passes that need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.policy.state.host_memory import HostBuffer
from megatron_rl.policy.state.weights import LocalParameter

Name = tuple[int, str]  # number of the chunk, name of the parameter in it


@dataclass(frozen=True)
class Frozen:
    """The starting weights that belong to one of DDP's buffers, laid out like it.

    ``starts[i]``: where ``held[i]`` begins, in elements of ``dtype``; ``gradients``: the buffer's
    gradients, flat and at least as many bytes.
    """

    host: HostBuffer
    gradients: Tensor
    dtype: torch.dtype
    held: tuple[LocalParameter, ...]
    starts: tuple[int, ...]

    @property
    def device_bytes(self) -> Tensor:
        """The first bytes under the gradients, as many as the host holds."""
        return self.gradients.view(torch.uint8)[: self.host.num_bytes]

    def views(self, flat: Tensor) -> Iterator[tuple[LocalParameter, Tensor]]:
        """Each parameter with its part of ``flat``, the bytes of all."""
        values = flat.view(self.dtype)
        for item, start in zip(self.held, self.starts, strict=True):
            yield item, values[start : start + item.tensor.numel()].view(item.tensor.shape)


class Reference:
    """The starting weights: those of the policy when this is built.

    In a reference pass the parameters point to other memory; the trained weights stay where they
    are and are never copied. ``staged`` False (host and device are one): they point to the host's
    copy. True: to the memory of the gradients, which hold nothing between two updates and are never
    smaller than the weights; the starting weights are copied there for each pass, which leaves
    zeros behind.
    """

    def __init__(
        self, held: Sequence[LocalParameter], chunks: Sequence[Any], *, staged: bool
    ) -> None:
        self.bytes_moved = 0  # between host and device, in all passes
        self._staged = staged
        buffers: list[Any] = []
        for chunk in chunks:
            buffers += [*chunk.buffers, *chunk.expert_parallel_buffers]
        self._frozen = [_lay_out(held, buffer, pinned=staged) for buffer in buffers]
        laid_out = sum(len(frozen.held) for frozen in self._frozen)
        untrained = [item for item in held if not item.tensor.requires_grad]
        # They keep their starting weights anyway.
        self.untrained: set[Name] = {(item.chunk, item.name) for item in untrained}
        trained = len(held) - len(untrained)
        assert laid_out == trained, f"{laid_out} of {trained} parameters are in DDP's buffers"
        for frozen in self._frozen:
            self._fill(frozen)

    @property
    def names(self) -> list[Name]:
        """Names of the trained parameters."""
        return [(item.chunk, item.name) for frozen in self._frozen for item in frozen.held]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the parameters have the starting weights. Staged: gradients are zero after it."""
        own: list[tuple[Tensor, Tensor]] = []
        try:
            for frozen in self._frozen:
                for item, values in frozen.views(self._for_pass(frozen)):
                    own.append((item.tensor, item.tensor.data))
                    item.tensor.data = values
            yield
        finally:
            for parameter, data in own:
                parameter.data = data
            self._clear()

    def tensors(self) -> dict[Name, Tensor]:
        """The starting weights on the CPU: copies when staged, else they themselves."""
        by_name = {}
        for frozen in self._frozen:
            for item, values in frozen.views(self._on_cpu(frozen)):
                by_name[item.chunk, item.name] = values
        return by_name

    @torch.no_grad()
    def assign(self, tensors: Mapping[Name, Tensor]) -> None:
        """Replaces the starting weights by ``tensors``, one for each parameter."""
        for frozen in self._frozen:
            flat = self._on_cpu(frozen)
            for item, values in frozen.views(flat):
                values.copy_(tensors[item.chunk, item.name])
            if self._staged:
                frozen.host.take(flat)

    @torch.no_grad()
    def _fill(self, frozen: Frozen) -> None:
        flat = frozen.device_bytes if self._staged else frozen.host.whole
        for item, values in frozen.views(flat):
            values.copy_(item.tensor)
        if self._staged:
            frozen.host.take(flat)
            self._wait(frozen)
            frozen.gradients.zero_()

    def _for_pass(self, frozen: Frozen) -> Tensor:
        if not self._staged:
            return frozen.host.whole
        flat = frozen.device_bytes
        frozen.host.give(flat)
        self.bytes_moved += frozen.host.num_bytes
        return flat

    def _clear(self) -> None:
        if self._staged:
            for frozen in self._frozen:
                frozen.gradients.zero_()

    def _on_cpu(self, frozen: Frozen) -> Tensor:
        if not self._staged:
            return frozen.host.whole
        self._wait(frozen)
        flat = torch.empty(frozen.host.num_bytes, dtype=torch.uint8)
        frozen.host.give(flat)
        return flat

    def _wait(self, frozen: Frozen) -> None:
        """Waits until the device no longer uses the host's copy."""
        if frozen.gradients.device.type == "cuda":
            torch.cuda.synchronize()


def _lay_out(held: Sequence[LocalParameter], buffer: Any, *, pinned: bool) -> Frozen:
    places = buffer.param_index_map
    in_buffer = tuple(item for item in held if item.tensor in places)
    num_bytes = buffer.grad_data.numel() * buffer.param_dtype.itemsize
    assert num_bytes <= buffer.grad_data.nbytes, (
        f"gradients in {buffer.grad_dtype} for weights in {buffer.param_dtype}"
    )
    host = HostBuffer(num_bytes, pinned=pinned)
    starts = tuple(places[item.tensor][0] for item in in_buffer)
    return Frozen(host, buffer.grad_data, buffer.param_dtype, in_buffer, starts)
