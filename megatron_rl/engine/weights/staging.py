"""New weights of a worker's model, staged next to those in use: they arrive while it samples and
replace the old ones later, all at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.engine.weights.worker import ShardReceiver
from megatron_rl.protocols import Parameters, Transfer


class StagedWeights:
    """One version, in host memory, as the model's loader gives its parameters: not fused, packed or
    quantized yet. It stays when it has taken its place, so that the model may leave it and come
    back to it."""

    def __init__(self, receiver: ShardReceiver) -> None:
        self._receiver = receiver
        self._tensors: dict[str, Tensor] = {}
        self.version: int | None = None  # None: there is none that is whole

    def take(self, transfer: Transfer, version: int) -> None:
        """Replaces what is staged; the model is not touched."""
        self.version = None
        transfer(self._parameter, lambda key: None)
        self.version = version

    def _parameter(self, key: str) -> Tensor:
        if key not in self._tensors:
            form = self._receiver.forms[key]
            # What no message fills (padding of a vocabulary) is 0, as in ``OpenLayers``.
            self._tensors[key] = torch.zeros_like(
                form, device="cpu", pin_memory=torch.cuda.is_available()
            )
        return self._tensors[key]

    def put_in_place(self, version: int) -> None:
        """Replaces the weights of the model by this staged version.

        Raises:
            ValueError: another version is staged; the model keeps its weights.
        """
        if version != self.version:
            raise ValueError(f"weight version {version} is not staged, but {self.version}")
        self._receiver.receive(self._copy)

    def _copy(self, parameter: Parameters, written: Callable[[str], None]) -> None:
        # Layer by layer: one that is open has memory of the device in addition to that of its old
        # weights, and they may have come in another order (first parts of all experts, then second
        # ones).
        for key in sorted(self._tensors, key=_layer):
            parameter(key).copy_(self._tensors[key])
            written(key)


def _layer(key: str) -> str:
    return key.rpartition(".")[0]
