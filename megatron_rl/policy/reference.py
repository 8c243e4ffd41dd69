"""The starting weights: kept on the host, and swapped in for the passes that need them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.policy.state.host_memory import HostBuffer, synchronize
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
    """The starting weights: those of the policy when this is built, or filled anew.

    In a reference pass the parameters point to the memory of the gradients, which hold nothing
    between two updates and are never smaller than the weights: the starting weights are copied
    there for each pass, which leaves zeros. The trained weights stay where they are.
    """

    def __init__(self, held: Sequence[LocalParameter], chunks: Sequence[Any]) -> None:
        self.bytes_moved = 0  # from the host, in all passes
        buffers: list[Any] = []
        for chunk in chunks:
            buffers += [*chunk.buffers, *chunk.expert_parallel_buffers]
        self._frozen = [_lay_out(held, buffer) for buffer in buffers]
        # What is not trained keeps its starting weights anyway.
        trained = sum(item.tensor.requires_grad for item in held)
        laid_out = len(self.names)
        assert laid_out == trained, f"{laid_out} of {trained} parameters are in DDP's buffers"
        self.fill()

    @property
    def names(self) -> list[Name]:
        """Names of the trained parameters."""
        return [(item.chunk, item.name) for frozen in self._frozen for item in frozen.held]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Context in which parameters have the starting weights. Gradients are zero after it."""
        own: list[tuple[Tensor, Tensor]] = []
        try:
            for frozen in self._frozen:
                frozen.host.give(frozen.device_bytes)
                self.bytes_moved += frozen.host.num_bytes
                for item, values in frozen.views(frozen.device_bytes):
                    own.append((item.tensor, item.tensor.data))
                    item.tensor.data = values
            yield
        finally:
            for parameter, data in own:
                parameter.data = data
            for frozen in self._frozen:
                frozen.gradients.zero_()

    def tensors(self) -> dict[Name, Tensor]:
        """The starting weights, copies on the CPU."""
        by_name = {}
        for frozen in self._frozen:
            flat = torch.empty(frozen.host.num_bytes, dtype=torch.uint8)
            synchronize(frozen.gradients.device)  # the device may still use the host's copy
            frozen.host.give(flat)
            for item, values in frozen.views(flat):
                by_name[item.chunk, item.name] = values
        return by_name

    @torch.no_grad()
    def assign(self, tensors: Mapping[Name, Tensor]) -> None:
        """Replaces the starting weights by ``tensors``, one for each parameter."""
        for frozen in self._frozen:
            flat = torch.zeros(frozen.host.num_bytes, dtype=torch.uint8)
            for item, values in frozen.views(flat):
                values.copy_(tensors[item.chunk, item.name])
            synchronize(frozen.gradients.device)
            frozen.host.take(flat)

    @torch.no_grad()
    def fill(self) -> None:
        """Makes the current weights the starting ones. Gradients are zero after it."""
        for frozen in self._frozen:
            for item, values in frozen.views(frozen.device_bytes):
                values.copy_(item.tensor)
            frozen.host.take(frozen.device_bytes)
            synchronize(frozen.gradients.device)
            frozen.gradients.zero_()


def _lay_out(held: Sequence[LocalParameter], buffer: Any) -> Frozen:
    places = buffer.param_index_map
    in_buffer = tuple(item for item in held if item.tensor in places)
    num_bytes = buffer.grad_data.numel() * buffer.param_dtype.itemsize
    assert num_bytes <= buffer.grad_data.nbytes, (
        f"gradients in {buffer.grad_dtype} for weights in {buffer.param_dtype}"
    )
    host = HostBuffer(num_bytes, pinned=buffer.grad_data.is_cuda)
    starts = tuple(places[item.tensor][0] for item in in_buffer)
    return Frozen(host, buffer.grad_data, buffer.param_dtype, in_buffer, starts)
