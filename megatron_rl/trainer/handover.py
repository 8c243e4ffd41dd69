"""Policy and engine share one device: who holds its memory, and how it changes hands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from megatron_rl.protocols import Policy, RolloutEngine, WeightSync
from megatron_rl.runtime.memory import Ledger
from megatron_rl.trainer.canary import Canary
from megatron_rl.types import SyncReport


class HandOver:
    """The phases of a step, in order: update -> offload -> wake_weights -> sync -> wake_kv_cache -> generate -> sleep -> reload.

    ``offload``: what of the policy leaves the device while the engine has it. Its weights leave after the sync, which reads them.
    At every phase's end the ``ledger`` takes down the memory in use. Whatever fails while the engine has the memory, the policy
    gets its state back before the exception goes on.

    ``canary``: the policy scores before its weights leave, the engine when it is awake; a difference counts as a failure.
    """

    def __init__(
        self,
        policy: Policy,
        engine: RolloutEngine,
        weight_sync: WeightSync,
        offload: Sequence[str],
        ledger: Ledger,
        canary: Canary | None = None,
    ) -> None:
        self.policy, self.engine, self.weight_sync, self.ledger, self.canary = policy, engine, weight_sync, ledger, canary
        self.owner: Literal["policy", "engine"] = "policy"
        self._before_sync = [part for part in offload if part != "weights"]
        self._after_sync = [part for part in offload if part == "weights"]
        self._version: int | None = None

    def to_engine(self, version: int) -> SyncReport:
        """Collective: after an update, gives the engine the memory and the policy's weights, as number ``version``. Weights change
        in an update only: those that pass here are the ones that are saved and exported.

        Raises:
            NonFiniteError: the weights are not finite; the engine keeps what it has.
        """
        self.policy.check_weights(version)
        self.ledger.record("update")
        report = self._give(version, sync=True)
        assert report is not None
        return report

    @contextmanager
    def generation(self) -> Iterator[None]:
        """The engine's turn. When the policy has the memory (after a checkpoint, say) it is handed over first, without a sync unless
        the engine lost its weights."""
        assert self._version is not None, "the engine generates with weights of the policy: call to_engine first"
        if self.owner == "policy":
            self._give(self._version, sync=False)
        with self._policy_restored():
            yield
        self.ledger.record("generate")

    def to_policy(self) -> None:
        """The policy's turn: the engine sleeps, what was offloaded comes back. Does nothing when the policy has the memory."""
        if self.owner == "policy":
            return
        self.engine.sleep()
        self.ledger.record("sleep")
        self.policy.reload()
        self.ledger.record("reload")
        self.owner = "policy"

    def _give(self, version: int, *, sync: bool) -> SyncReport | None:
        report, expected, self.owner = None, None, "engine"
        with self._policy_restored():
            self.policy.offload(self._before_sync)
            self.ledger.record("offload")
            self.engine.wake(("weights",))
            self.ledger.record("wake_weights")
            if sync or self.engine.weight_version != version:
                self._version = None  # whatever fails from here on, the engine generates nothing
                report = self.weight_sync.sync(version)
                expected = None if self.canary is None else self.canary.expected(version)
                self.ledger.record("sync")
            self.policy.offload(self._after_sync)
            self.engine.wake(("kv_cache",))
            self.ledger.record("wake_kv_cache")
            if self.canary is not None and report is not None and expected is not None:
                mean, largest = self.canary.check(version, expected)
                report = replace(report, canary_logprob_diff=mean, canary_logprob_diff_max=largest)
            self._version = version
        return report

    @contextmanager
    def _policy_restored(self) -> Iterator[None]:
        """Passes an exception on after the policy has its memory again; a note on it says what did not come back."""
        try:
            yield
        except BaseException as error:
            for what, action in (("engine did not fall asleep", self.engine.sleep), ("policy was not restored", self.policy.reload)):
                try:
                    action()
                except Exception as failure:  # noqa: BLE001 (noted on the exception that matters)
                    error.add_note(f"After this error the {what}: {failure}")
            self.owner = "policy"
            raise
