"""Offloads weights, gradients and optimizer state; what must come back is kept in pinned memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.policy.optimizer import gradient, parts
from megatron_rl.policy.state.host_memory import HostBuffer, synchronize


@dataclass
class OffloadedStorage:
    """A storage that was emptied, and a copy of its bytes (None: it comes back as zeros)."""

    storage: torch.UntypedStorage
    num_bytes: int
    host: HostBuffer | None


@dataclass
class Offload:
    """Empties the storages under tensors and fills them again, so that every view stays valid.

    ``tensors[part]`` is called for the tensors of a part; ``dropped`` parts come back as zeros;
    ``constant`` ones never change, and are copied to the host once. A
    storage that two parts share belongs to the one named first in ``tensors``. On a machine without
    CUDA the same bytes move between two places of host memory.
    """

    tensors: Mapping[str, Callable[[], Iterable[Tensor]]]
    dropped: Sequence[str]
    device: torch.device
    constant: bool = False
    _away: dict[str, list[OffloadedStorage]] = field(default_factory=dict, init=False)
    # Kept between steps: pinning memory takes longer than the copy.
    _hosts: dict[tuple[str, int], HostBuffer] = field(default_factory=dict, init=False)

    @property
    def away(self) -> tuple[str, ...]:
        """The parts that are offloaded now."""
        return tuple(self._away)

    def require(self, *parts: str) -> None:
        """Raises RuntimeError when one of ``parts`` is away: a read would crash the process."""
        missing = [part for part in parts if part in self._away]
        if missing:
            raise RuntimeError(
                f"the policy's {' and '.join(missing)} are offloaded; call reload() before using"
                " them"
            )

    @torch.no_grad()
    def offload(self, parts: Sequence[str]) -> None:
        """Offloads ``parts``; already offloaded ones are left alone.

        Raises:
            ValueError: there is no part of that name.
        """
        unknown = [part for part in parts if part not in self.tensors]
        if unknown:
            raise ValueError(
                f"offload: no part is called {unknown[0]}; there are {', '.join(self.tensors)}"
            )
        for part in self.tensors:
            if part in parts and part not in self._away:
                storages = enumerate(self._storages(part))
                self._away[part] = [self._store(part, *numbered) for numbered in storages]
        # Storages are freed only after every copy out of them has ended.
        synchronize(self.device)
        for part in parts:
            for stored in self._away[part]:
                stored.storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def reload(self) -> None:
        """Brings everything back, bit for bit."""
        for part in list(self._away):
            for stored in self._away[part]:
                stored.storage.resize_(stored.num_bytes)
                target = _bytes(stored.storage)
                if stored.host is None:
                    target.zero_()
                else:
                    stored.host.give(target)
            del self._away[part]
        synchronize(self.device)

    def _storages(self, part: str) -> list[torch.UntypedStorage]:
        """The storages of ``part`` on the device, each once, without those of earlier parts."""
        taken = {stored.storage._cdata for others in self._away.values() for stored in others}
        for other in self.tensors:
            if other == part:
                break
            taken |= {tensor.untyped_storage()._cdata for tensor in self.tensors[other]()}
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in self.tensors[part]():
            storage = tensor.untyped_storage()
            is_on_device = tensor.device.type == self.device.type
            if is_on_device and storage._cdata not in taken and storage.nbytes() > 0:
                storages.setdefault(storage._cdata, storage)
        return list(storages.values())

    def _store(self, part: str, number: int, storage: torch.UntypedStorage) -> OffloadedStorage:
        num_bytes = storage.nbytes()
        if part in self.dropped:
            return OffloadedStorage(storage, num_bytes, None)
        host = self._hosts.get((part, number))
        is_new = host is None or host.num_bytes != num_bytes
        if host is None or is_new:
            host = HostBuffer(num_bytes, pinned=self.device.type == "cuda")
            self._hosts[part, number] = host
        if is_new or not self.constant:
            host.take(_bytes(storage))
        return OffloadedStorage(storage, num_bytes, host)


def training_tensors(
    modules: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None
) -> dict[str, Callable[[], Iterable[Tensor]]]:
    """What a policy has on the device, by part. What is not trained has weights only."""

    def parameters() -> list[torch.nn.Parameter]:
        return [parameter for module in modules for parameter in module.parameters()]

    def optimizer_states() -> Iterable[Tensor]:
        for part in parts(optimizer) if optimizer is not None else ():
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter.data
                    state = part.optimizer.state.get(parameter, {})
                    yield from filter(torch.is_tensor, state.values())

    return {
        "weights": lambda: [each.data for each in parameters()],
        "gradients": lambda: [gradient(each) for each in parameters() if each.requires_grad],
        "optimizer": optimizer_states,
    }


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def release_caches(modules: Iterable[torch.nn.Module], dispatchers: Mapping[int, set[str]]) -> None:
    """Drops caches that layers rebuild on demand.

    They are rotary tables, FP8 copies of weights, and what the dispatchers of experts hold of the
    last micro-batch. ``dispatchers``: see ``dispatcher_tensors``.
    """
    for layer in _layers(modules):
        clear = getattr(type(layer).forward, "cache_clear", None)
        if clear is not None:
            clear()
        getattr(layer, "_fp8_workspaces", {}).clear()
        dispatcher = getattr(layer, "token_dispatcher", None)
        if dispatcher is not None:
            for name in _tensor_names(dispatcher) - dispatchers[id(dispatcher)]:
                setattr(dispatcher, name, None)


def dispatcher_tensors(modules: Iterable[torch.nn.Module]) -> dict[int, set[str]]:
    """Names of the tensors that each dispatcher of experts must keep, by the dispatcher's id.

    They are those it has before the first pass.
    """
    each = (getattr(layer, "token_dispatcher", None) for layer in _layers(modules))
    return {id(dispatcher): _tensor_names(dispatcher) for dispatcher in each if dispatcher}


def _layers(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    return chain.from_iterable(module.modules() for module in modules)


def _tensor_names(thing: object) -> set[str]:
    return {name for name, value in vars(thing).items() if torch.is_tensor(value)}
