"""Colocation: moves device memory between policy and engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from megatron_rl.protocols import Offloadable, RolloutEngine, WeightSync
from megatron_rl.runtime.memory import Ledger
from megatron_rl.types import SyncReport


class Colocation:
    """Who holds the memory of a device that policy and engine share.

    The phases of a step, in order: update -> offload -> wake_weights -> sync -> wake_kv_cache ->
    generate -> sleep -> reload. At the end of each the ``ledger`` records memory use.

    ``offload``: what of the policy leaves the device while the engine has it. Its weights leave
    after the sync, which reads them.
    """

    def __init__(
        self, policy: Offloadable, engine: RolloutEngine, offload: Sequence[str], ledger: Ledger
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._before_sync = [part for part in offload if part != "weights"]
        self._after_sync = [part for part in offload if part == "weights"]
        self.ledger = ledger
        self.owner: Literal["policy", "engine"] = "policy"

    @contextmanager
    def to_engine(self) -> Iterator[None]:
        """The engine's turn from its end on. Inside, both sides hold their weights: the moment of a
        weight sync."""
        assert self.owner == "policy", "the engine has the memory already"
        self.owner = "engine"
        with self.policy_restored():
            self._policy.offload(self._before_sync)
            self.ledger.record("offload")
            self._engine.wake(("weights",))
            self.ledger.record("wake_weights")
            yield
            self._policy.offload(self._after_sync)
            self._engine.wake(("kv_cache",))
            self.ledger.record("wake_kv_cache")

    def to_policy(self) -> None:
        """The policy's turn: the engine sleeps, what was offloaded comes back. Does nothing when
        the policy has the memory."""
        if self.owner == "policy":
            return
        self._engine.sleep()
        self.ledger.record("sleep")
        self._policy.reload()
        self.ledger.record("reload")
        self.owner = "policy"

    @contextmanager
    def policy_restored(self) -> Iterator[None]:
        """Passes an exception on after the policy has its memory again; a note on it says what did
        not come back."""
        try:
            yield
        except BaseException as error:
            if self.owner == "engine":
                self._clean_up(error)
            raise

    def _clean_up(self, error: BaseException) -> None:
        for name, action in (
            ("engine.sleep", self._engine.sleep),
            ("policy.reload", self._policy.reload),
        ):
            try:
                action()
            except Exception as failure:  # noqa: BLE001 (noted on the exception that matters)
                error.add_note(f"Cleanup also failed: {name}(): {failure}")
        self.owner = "policy"


class ColocatedSync:
    """A weight sync at the moment of a hand-over when both sides hold their weights."""

    def __init__(self, sync: WeightSync, colocation: Colocation) -> None:
        self.inner = sync
        self._colocation = colocation

    def sync(self, version: int) -> SyncReport:
        """Collective. The engine has the memory afterwards."""
        with self._colocation.to_engine():
            report = self.inner.sync(version)
            self._colocation.ledger.record("sync")
        return report
