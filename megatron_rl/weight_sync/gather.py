"""The plain weight sync: every rank gathers all tensors whole; its engine cuts out what it needs.

Simple, and the reference for any faster one.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from megatron_rl.protocols import WholeWeightSink, WholeWeightSource
from megatron_rl.runtime.digest import kind_on, quick_digest
from megatron_rl.types import SyncReport
from megatron_rl.weight_sync.checks import verify_tensors
from megatron_rl.weight_sync.collectives import raise_everywhere
from megatron_rl.weight_sync.failure import Stage, SyncProgress


@dataclass(frozen=True)
class GatherSync:
    """Streams the policy's gathered weights into the engine, one tensor at a time. ``verify``:
    compare digests of every tensor, as handed to the engine, over all ranks, at every sync."""

    policy: WholeWeightSource
    engine: WholeWeightSink
    verify: bool

    def sync(self, version: int) -> SyncReport:
        """Collective. ``bytes_total`` is the size of the weights, ``bytes_sent`` what this rank
        gave to the policy's gathers for others.

        Where an engine refuses, its rank continues gathering so that no peer waits, then all ranks
        raise; where the policy fails in the middle of a gather, only a rank's end frees the others.

        Raises:
            WeightSyncError: on every rank: the tensors of two of them differ, or are not what the
                model needs; names the tensors. The engine then refuses to generate, unless it had
                taken nothing yet.
        """
        start = time.perf_counter()
        sent_before = self.policy.gathered_bytes_sent
        progress = SyncProgress(version, Stage.OPENING)
        stream = _TensorStream(self.policy.gathered_weights(), progress, self.verify)

        def confirm() -> None:
            progress.stage = Stage.COMPARING
            # A rank whose engine refused is in the ``raise_everywhere`` below: they meet in it.
            raise_everywhere(None)
            if self.verify:
                verify_tensors(stream.digests)
            progress.stage = Stage.FINISHING

        try:
            self.engine.load_weights(iter(stream), version, confirm)
        except Exception as error:
            if progress.stage in (Stage.OPENING, Stage.MOVING):
                deque(stream.weights, maxlen=0)  # the gathers that are left, for the peers
            # A failing gather can only be left; a failing comparison is known to all.
            if progress.stage not in (Stage.GATHERING, Stage.COMPARING):
                raise_everywhere(error)
            raise
        raise_everywhere(None)
        sent_bytes = self.policy.gathered_bytes_sent - sent_before
        seconds = time.perf_counter() - start
        return SyncReport(version, stream.num_tensors, sent_bytes, stream.num_bytes, seconds)


@dataclass
class _TensorStream:
    """The gathered tensors on their way to the engine: counted, and digested if requested."""

    weights: Iterator[tuple[str, Tensor]]
    progress: SyncProgress
    digested: bool
    digests: dict[str, str] = field(default_factory=dict, init=False)
    num_tensors: int = field(default=0, init=False)
    num_bytes: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.progress.stage = Stage.GATHERING
        for name, tensor in self.weights:
            self.progress.stage = Stage.MOVING
            self.num_tensors += 1
            self.num_bytes += tensor.numel() * tensor.element_size()
            if self.digested:
                self.digests[name] = quick_digest(tensor, kind_on(tensor.device))
            yield name, tensor
            self.progress.stage = Stage.GATHERING
        self.progress.stage = Stage.MOVING
