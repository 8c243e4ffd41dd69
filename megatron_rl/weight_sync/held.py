"""The weights of one version, kept while the policy goes on to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.protocols import WeightSource
from megatron_rl.types import Shard


class HeldWeights:
    """Implements ``protocols.WeightSource``: what the policy had at the last ``hold``, so that a
    server that comes late can still be given it. Takes as much of the device as the weights of this
    process do."""

    def __init__(self, policy: WeightSource) -> None:
        self._policy = policy
        self._held: dict[str, Tensor] = {}

    def hold(self) -> None:
        """Collective over the training side: from now on these are the policy's present weights."""
        self._policy.wait_for_param_gather()
        with torch.no_grad():
            for key in {shard.key for shard in self._policy.weight_boxes()}:
                weight = self._policy.weight(key).detach()
                if key in self._held:  # into the memory it has: no third copy for a moment
                    self._held[key].copy_(weight)
                else:
                    self._held[key] = weight.clone(memory_format=torch.preserve_format)

    def weight_boxes(self) -> Sequence[Shard]:
        """See ``WeightSource``."""
        return self._policy.weight_boxes()

    def wait_for_param_gather(self) -> None:
        """Nothing: held weights do not change."""

    def weight(self, key: str) -> Tensor:
        """See ``WeightSource``."""
        return self._held[key]
