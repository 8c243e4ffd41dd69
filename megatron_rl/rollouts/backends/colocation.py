"""Colocation: policy and engine on one device, which take turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from megatron_rl.protocols import Offloadable, RolloutEngine, WeightSync
from megatron_rl.rollouts.logprob_check import LogprobCheck
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
        self,
        policy: Offloadable,
        engine: RolloutEngine,
        weight_sync: WeightSync,
        offload: Sequence[str],
        ledger: Ledger,
        check: LogprobCheck | None = None,
    ) -> None:
        self._policy = policy
        self.engine = engine
        self.weight_sync = weight_sync
        self._check = check
        self._before_sync = [part for part in offload if part != "weights"]
        self._after_sync = [part for part in offload if part == "weights"]
        self._published: int | None = None  # None: the engine must generate nothing
        self._reload_s = 0.0  # since the last publication
        self.ledger = ledger
        self.owner: Literal["policy", "engine"] = "policy"

    @contextmanager
    def training(self) -> Iterator[None]:
        """See protocols.RolloutSource."""
        begin_s = time.perf_counter()
        self.to_policy()
        self._reload_s += time.perf_counter() - begin_s
        yield

    @contextmanager
    def generation(self) -> Iterator[None]:
        """See protocols.RolloutSource. When the policy has the memory (after a checkpoint, say) it
        is handed over first, without a sync unless the engine lost its weights in its sleep."""
        assert self._published is not None, (
            "the engine generates with published weights: call publish first"
        )
        if self.owner == "policy":
            if self.engine.weight_version == self._published:
                with self.to_engine():
                    pass
            else:
                self._sync(self._published)
        with self.policy_restored():
            yield
        self.ledger.record("generate")

    def publish(self, version: int) -> SyncReport:
        """See protocols.RolloutSource. The report has the memory of all phases since the last
        one."""
        self.ledger.record("update")
        report = self._sync(version)
        measured = self.ledger.end_step() | {"time/reload_s": self._reload_s}
        self._reload_s = 0.0
        return replace(report, measured=measured)

    def _sync(self, version: int) -> SyncReport:
        self._published = None  # whatever fails from here on, the engine generates nothing
        with self.policy_restored():
            # The policy scores first: its weights may be off the device when the engine is awake.
            expected = None if self._check is None else self._check.expected(version)
            with self.to_engine():
                report = self.weight_sync.sync(version)
                self.ledger.record("sync")
            if self._check is not None and expected is not None:
                report = self._check.check(report, expected)
        self._published = version
        return report

    @contextmanager
    def to_engine(self) -> Iterator[None]:
        """The engine's turn from its end on. Inside, both sides hold their weights: the moment of a
        weight sync."""
        assert self.owner == "policy", "the engine has the memory already"
        self.owner = "engine"
        with self.policy_restored():
            self._policy.offload(self._before_sync)
            self.ledger.record("offload")
            self.engine.wake(("weights",))
            self.ledger.record("wake_weights")
            yield
            self._policy.offload(self._after_sync)
            self.engine.wake(("kv_cache",))
            self.ledger.record("wake_kv_cache")

    def to_policy(self) -> None:
        """The policy's turn: the engine sleeps, what was offloaded comes back. Does nothing when
        the policy has the memory."""
        if self.owner == "policy":
            return
        self.engine.sleep()
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
        actions = {"engine.sleep": self.engine.sleep, "policy.reload": self._policy.reload}
        for name, action in actions.items():
            try:
                action()
            except Exception as failure:  # noqa: BLE001 (noted on the exception that matters)
                error.add_note(f"Cleanup also failed: {name}(): {failure}")
        self.owner = "policy"
