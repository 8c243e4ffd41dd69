"""The plain weight sync: every rank gathers every tensor whole, and its engine cuts out what it wants.

Simple, and the reference for any faster one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from megatron_rl.protocols import Policy, RolloutEngine
from megatron_rl.runtime.digest import tensor_digest
from megatron_rl.types import SyncReport
from megatron_rl.weight_sync.verify import verify_transfer


class GatherSync:
    """Streams the policy's gathered weights into the engine, one tensor at a time."""

    def __init__(self, policy: Policy, engine: RolloutEngine, verify: bool) -> None:
        """``verify``: compare a digest of every tensor as sent with the one received, over all ranks, at every sync."""
        self._policy, self._engine, self._verify = policy, engine, verify

    def sync(self, version: int) -> SyncReport:
        """Collective. ``bytes_total`` is the size of the weights; ``bytes_sent`` is 0, for the bytes travel inside the policy's
        gathers, not here.

        Raises:
            WeightSyncError: what arrived differs from what was sent, or is not what the model wants; names the tensors.
        """
        start = time.perf_counter()
        sent: dict[str, str] = {}
        num_bytes = 0

        def stream() -> Iterator[tuple[str, Tensor]]:
            nonlocal num_bytes
            for name, tensor in self._policy.gathered_weights():
                num_bytes += tensor.numel() * tensor.element_size()
                if self._verify:
                    sent[name] = tensor_digest(tensor)
                yield name, tensor

        received = self._engine.load_weights(stream(), version)
        if self._verify:
            verify_transfer(sent, received)
        return SyncReport(version, len(received), 0, num_bytes, time.perf_counter() - start)
