"""Where experience comes from: implementations of ``protocols.RolloutSource``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from megatron_rl.protocols import CheckedWeights, RolloutEngine, WeightSync
from megatron_rl.rollouts.colocation import Colocation
from megatron_rl.rollouts.experience import Experience
from megatron_rl.rollouts.metrics import Clock
from megatron_rl.types import SyncReport


class Collects(Protocol):
    """What asks the engine for the responses of a step; see ``rollouts.Rollouts``."""

    def collect(self, step: int) -> Experience: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Colocated:
    """Policy and engine in the same processes, on the same devices, taking turns.

    ``weight_sync`` hands the memory over too (``ColocatedSync``). Every token is sampled with
    the newest weights; what a step samples ahead and does not need is dropped at its end, so that
    the engine is idle outside of ``generation``. ``rollouts`` says whether responses that have not
    ended go on in the next step.
    """

    def __init__(
        self,
        rollouts: Collects,
        policy: CheckedWeights,
        engine: RolloutEngine,
        weight_sync: WeightSync,
        colocation: Colocation,
    ) -> None:
        self.rollouts = rollouts
        self.engine = engine
        self.weight_sync = weight_sync
        self.colocation = colocation
        self._policy = policy
        self._clock = Clock()
        self._published: int | None = None  # None: the engine must generate nothing

    def next(self, step: int) -> Experience:
        """See protocols.RolloutSource."""
        with self.generation():
            return self.rollouts.collect(step)

    @contextmanager
    def training(self) -> Iterator[None]:
        """See protocols.RolloutSource."""
        with self._clock("reload"):
            self.colocation.to_policy()
        yield

    @contextmanager
    def generation(self) -> Iterator[None]:
        """See protocols.RolloutSource. When the policy has the memory (after a checkpoint, say) it
        is handed over first, without a sync unless the engine lost its weights in its sleep."""
        assert self._published is not None, (
            "the engine generates with published weights: call publish first"
        )
        if self.colocation.owner == "policy":
            if self.engine.weight_version == self._published:
                with self.colocation.to_engine():
                    pass
            else:
                self._sync(self._published)
        with self.colocation.policy_restored():
            yield
        self.colocation.ledger.record("generate")

    def publish(self, version: int) -> SyncReport:
        """See protocols.RolloutSource. The report has the memory of all phases since the last one.

        Weights change in an update only: those that are checked here are the ones that are saved
        and exported.
        """
        self._policy.check_weights(version)
        self.colocation.ledger.record("update")
        report = self._sync(version)
        measured = self.colocation.ledger.end_step()
        measured["time/reload_s"] = self._clock.seconds["reload"]
        self._clock = Clock()
        return replace(report, measured=measured)

    def _sync(self, version: int) -> SyncReport:
        self._published = None  # whatever fails from here on, the engine generates nothing
        with self.colocation.policy_restored():
            report = self.weight_sync.sync(version)
        self._published = version
        return report

    def state(self) -> dict[str, Any]:
        """See protocols.RolloutSource."""
        return self.rollouts.state()

    def restore(self, state: dict[str, Any]) -> None:
        """See protocols.RolloutSource."""
        self.rollouts.restore(state)
