"""The policy's device memory, given away and taken back: weights and optimizer states by way of pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.policy.host_memory import HostBuffer


@dataclass
class Stored:
    """A storage that was emptied: its size in bytes, and its bytes (None: they need not come back and are zero then)."""

    storage: torch.UntypedStorage
    num_bytes: int
    host: HostBuffer | None


class Offload:
    """Empties the storages under tensors, so that every view of them stays what it is, and fills them again.

    ``tensors[part]`` lists the tensors of a part when it is asked; ``dropped`` parts come back as zeros. A storage that two parts
    share belongs to the one named first in ``tensors``. Host buffers are kept: pinning them again at every step would take longer
    than the copy. On a machine without CUDA the same bytes move between two places of host memory.
    """

    def __init__(self, tensors: Mapping[str, Callable[[], Iterable[Tensor]]], dropped: Sequence[str], device: torch.device) -> None:
        self._tensors, self._dropped, self._device = tensors, dropped, device
        self._away: dict[str, list[Stored]] = {}
        self._hosts: dict[tuple[str, int], HostBuffer] = {}

    @property
    def away(self) -> tuple[str, ...]:
        """The parts that are not there now."""
        return tuple(self._away)

    def require(self, *parts: str) -> None:
        """Raises RuntimeError when one of ``parts`` is away: reading it would crash the process, or give nonsense."""
        missing = [part for part in parts if part in self._away]
        if missing:
            raise RuntimeError(f"the policy's {' and '.join(missing)} are offloaded; call reload() before using them")

    @torch.no_grad()
    def offload(self, parts: Sequence[str]) -> None:
        """Gives away ``parts``; those that are away already stay so. Raises ValueError for a part that does not exist."""
        unknown = [part for part in parts if part not in self._tensors]
        if unknown:
            raise ValueError(f"offload: no part is called {unknown[0]}; there are {', '.join(self._tensors)}")
        for part in self._tensors:
            if part in parts and part not in self._away:
                self._away[part] = [self._store(part, number, found) for number, found in enumerate(self._storages(part))]
        self._finish_copies()
        for part in parts:
            for stored in self._away[part]:
                stored.storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def reload(self) -> None:
        """Takes everything back, bit for bit."""
        for part in list(self._away):
            for stored in self._away[part]:
                stored.storage.resize_(stored.num_bytes)
                target = _bytes(stored.storage)
                if stored.host is None:
                    target.zero_()
                else:
                    stored.host.give(target)
            del self._away[part]
        self._finish_copies()

    def _finish_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _storages(self, part: str) -> list[torch.UntypedStorage]:
        """The storages of ``part`` on the device, each once, without those of the parts before it."""
        taken = {stored.storage._cdata for others in self._away.values() for stored in others}
        for other in self._tensors:
            if other == part:
                break
            taken |= {tensor.untyped_storage()._cdata for tensor in self._tensors[other]()}
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors[part]():
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage._cdata not in taken and storage.nbytes() > 0:
                found.setdefault(storage._cdata, storage)
        return list(found.values())

    def _store(self, part: str, number: int, storage: torch.UntypedStorage) -> Stored:
        num_bytes = storage.nbytes()
        if part in self._dropped:
            return Stored(storage, num_bytes, None)
        host = self._hosts.get((part, number))
        if host is None or host.num_bytes != num_bytes:
            host = HostBuffer(num_bytes, pinned=self._device.type == "cuda")
            self._hosts[part, number] = host
        host.take(_bytes(storage))
        return Stored(storage, num_bytes, host)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def release_caches(modules: Iterable[torch.nn.Module], dispatchers: Mapping[int, frozenset[str]]) -> None:
    """Lets go of what layers keep between passes and make again when they need it: rotary tables, FP8 copies of weights, and what
    the dispatchers of experts remember of the last micro-batch. ``dispatchers``: see ``dispatcher_tensors``."""
    for module in modules:
        for layer in module.modules():
            clear = getattr(type(layer).forward, "cache_clear", None)
            if clear is not None:
                clear()
            workspaces = getattr(layer, "_fp8_workspaces", None)
            if workspaces is not None:
                workspaces.clear()
            dispatcher = getattr(layer, "token_dispatcher", None)
            if dispatcher is not None:
                for name in _tensor_names(dispatcher) - dispatchers[id(dispatcher)]:
                    setattr(dispatcher, name, None)


def dispatcher_tensors(modules: Iterable[torch.nn.Module]) -> dict[int, frozenset[str]]:
    """Names of the tensors that each dispatcher of experts holds before the first pass, by the dispatcher's id: these must stay."""
    found = [layer.token_dispatcher for module in modules for layer in module.modules() if hasattr(layer, "token_dispatcher")]
    return {id(dispatcher): frozenset(_tensor_names(dispatcher)) for dispatcher in found}


def _tensor_names(thing: object) -> set[str]:
    return {name for name, value in vars(thing).items() if torch.is_tensor(value)}
