"""The plain weight sync: every rank gathers every tensor whole, and its engine cuts out what it wants.

Simple, and the reference for any faster one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from megatron_rl.protocols import Policy, RolloutEngine
from megatron_rl.runtime.digest import kind_on, quick_digest
from megatron_rl.types import SyncReport
from megatron_rl.weight_sync.verify import agree, verify_tensors


class GatherSync:
    """Streams the policy's gathered weights into the engine, one tensor at a time."""

    def __init__(self, policy: Policy, engine: RolloutEngine, verify: bool) -> None:
        """``verify``: compare digests of every tensor, as it is handed to the engine, over all ranks, at every sync."""
        self._policy, self._engine, self._verify = policy, engine, verify

    def sync(self, version: int) -> SyncReport:
        """Collective. ``bytes_total`` is the size of the weights, ``bytes_sent`` what this rank gave to the policy's gathers for others.

        Where an engine refuses, its rank goes on gathering so that no peer waits, then all ranks raise; where the policy fails in the
        middle of a gather, only a rank that ends can free the others.

        Raises:
            WeightSyncError: on every rank: the tensors of two of them differ, or are not what the model wants; names the tensors. The
                engine then refuses to generate, unless it had taken nothing yet.
        """
        start, sent_before = time.perf_counter(), self._policy.gathered_bytes_sent
        weights = self._policy.gathered_weights()
        digests: dict[str, str] = {}
        num_tensors = num_bytes = 0
        reached = "gathering"

        def stream() -> Iterator[tuple[str, Tensor]]:
            nonlocal num_tensors, num_bytes, reached
            reached = "policy failed"
            for name, tensor in weights:
                reached = "gathering"
                num_tensors += 1
                num_bytes += tensor.numel() * tensor.element_size()
                if self._verify:
                    digests[name] = quick_digest(tensor, kind_on(tensor.device))
                yield name, tensor
                reached = "policy failed"
            reached = "gathering"

        def confirm() -> None:
            nonlocal reached
            reached = "comparison"
            agree(None)
            if self._verify:
                verify_tensors(digests)
            reached = "end"

        try:
            self._engine.load_weights(stream(), version, confirm)
        except Exception as error:
            if reached == "gathering":
                for _ in weights:
                    pass
            if reached in ("gathering", "end"):  # a comparison that fails is known to all
                agree(error)
            raise
        agree(None)
        sent_bytes = self._policy.gathered_bytes_sent - sent_before
        return SyncReport(version, num_tensors, sent_bytes, num_bytes, time.perf_counter() - start)
