"""The weights of the last versions, kept while the policy trains the next."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.protocols import WeightSource
from megatron_rl.types import Shard

NUM_VERSIONS = 2


class WeightHistory:
    """Implements ``protocols.WeightSource``: what the policy had at the last ``hold``, or at the
    one before, so that a server that joins late, or one that has switched already, can still get
    it. Takes twice as much of the device as the weights of this process do."""

    def __init__(self, policy: WeightSource) -> None:
        self._policy = policy
        self._held: dict[int, dict[str, Tensor]] = {}
        self._version = -1  # in use

    def hold(self, version: int) -> None:
        """Collective over the training side: copies the policy's weights and selects them."""
        self._policy.wait_for_param_gather()
        # The memory of the oldest: no third copy, not even for a moment.
        tensors = self._held.pop(min(self._held)) if len(self._held) == NUM_VERSIONS else {}
        with torch.no_grad():
            for key in {shard.key for shard in self._policy.weight_shards()}:
                weight = self._policy.weight(key).detach()
                if key in tensors:
                    tensors[key].copy_(weight)
                else:
                    tensors[key] = weight.clone(memory_format=torch.preserve_format)
        self._held[version] = tensors
        self._version = version

    def use(self, version: int) -> None:
        """Selects the weights of ``version``, one of the two that were held last."""
        assert version in self._held, f"version {version} is not held, but {sorted(self._held)}"
        self._version = version

    def weight_shards(self) -> Sequence[Shard]:
        return self._policy.weight_shards()

    def wait_for_param_gather(self) -> None:
        """Nothing: held weights do not change."""

    def weight(self, key: str) -> Tensor:
        return self._held[self._version][key]
