"""The order in which memory changes hands, and what happens when a phase fails."""

from __future__ import annotations

import pytest

from megatron_rl.runtime.memory import Ledger
from megatron_rl.trainer.handover import HandOver
from megatron_rl.types import SyncReport

EVERYTHING = ("optimizer", "gradients", "weights")
GIVEN = [
    "offload optimizer gradients", "wake weights", "sync 3", "offload weights", "wake kv_cache",
]  # fmt: skip


class Recorder:
    """Policy, engine and weight sync in one: notes the calls, fails at the one named ``fails``."""

    def __init__(self, fails: str = "", weight_version: int = -1) -> None:
        self.calls: list[str] = []
        self.fails, self.weight_version = fails, weight_version

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails:
            raise OSError(f"{call} failed")

    def offload(self, parts) -> None:
        self._note(" ".join(["offload", *parts]))

    def check_weights(self, step: int) -> None: ...

    def reload(self) -> None:
        self._note("reload")

    def sleep(self) -> None:
        self._note("sleep")

    def wake(self, parts) -> None:
        self._note(" ".join(["wake", *parts]))

    def sync(self, version: int) -> SyncReport:
        self._note(f"sync {version}")
        self.weight_version = version
        return SyncReport(version, 1, 0, 8, 0.0)


def hand_over(recorder: Recorder, offload=EVERYTHING, canary=None) -> HandOver:
    return HandOver(recorder, recorder, recorder, offload, Ledger(lambda: {"host": 1.0}, None), canary)


def test_a_whole_step_in_order():
    recorder = Recorder()
    steps = hand_over(recorder)
    assert steps.to_engine(3).version == 3
    assert recorder.calls == GIVEN and steps.owner == "engine"
    with steps.generation():
        recorder.calls.append("generate")
    steps.to_policy()
    assert recorder.calls == [*GIVEN, "generate", "sleep", "reload"] and steps.owner == "policy"
    phases = ["update", "offload", "wake_weights", "sync", "wake_kv_cache", "generate", "sleep", "reload"]
    assert list(steps.ledger.end_step()) == [f"memory/{phase}_host_gib" for phase in phases]


class Watcher:
    """A canary that notes when it is asked; ``fails``: it finds a difference."""

    def __init__(self, recorder: Recorder, fails: bool = False) -> None:
        self.recorder, self.fails = recorder, fails

    def expected(self, version: int) -> str:
        self.recorder.calls.append(f"policy scores {version}")
        return f"of {version}"

    def check(self, version: int, expected: str) -> tuple[float, float]:
        self.recorder.calls.append(f"engine is compared {expected}")
        if self.fails:
            raise OSError("they differ")
        return 0.25, 2.0


CANARY_CALLS = [*GIVEN[:3], "policy scores 3", *GIVEN[3:], "engine is compared of 3"]


def test_the_policy_scores_before_its_weights_leave_and_the_engine_when_it_can():
    recorder = Recorder()
    steps = hand_over(recorder, canary=Watcher(recorder))
    report = steps.to_engine(3)
    assert recorder.calls == CANARY_CALLS and (report.canary_logprob_diff, report.canary_logprob_diff_max) == (0.25, 2.0)
    steps.to_policy()
    with steps.generation():
        pass
    assert recorder.calls[len(CANARY_CALLS) :] == ["sleep", "reload", *[call for call in GIVEN if not call.startswith("sync")]]


def test_an_engine_that_differs_generates_nothing():
    """Nor does it go on with the version before."""
    recorder = Recorder()
    steps = hand_over(recorder, canary=Watcher(recorder))
    steps.to_engine(2)
    steps.to_policy()
    recorder.calls.clear()
    steps.canary = Watcher(recorder, fails=True)
    with pytest.raises(OSError, match="they differ"):
        steps.to_engine(3)
    assert recorder.calls == [*CANARY_CALLS, "sleep", "reload"]
    with pytest.raises(AssertionError, match="call to_engine first"), steps.generation():
        pass


def test_the_policy_gets_its_memory_once():
    recorder = Recorder()
    steps = hand_over(recorder)
    steps.to_policy()
    assert recorder.calls == []
    steps.to_engine(3)
    steps.to_policy()
    steps.to_policy()
    assert recorder.calls == [*GIVEN, "sleep", "reload"]


def test_generation_after_a_checkpoint_hands_over_without_a_sync():
    recorder = Recorder()
    steps = hand_over(recorder)
    steps.to_engine(3)
    steps.to_policy()
    recorder.calls.clear()
    with steps.generation():
        pass
    assert recorder.calls == [call for call in GIVEN if not call.startswith("sync")]


def test_an_engine_that_lost_its_weights_in_its_sleep_gets_them_again():
    recorder = Recorder()
    steps = hand_over(recorder)
    steps.to_engine(3)
    steps.to_policy()
    recorder.calls.clear()
    recorder.weight_version = -1
    with steps.generation():
        pass
    assert recorder.calls == GIVEN


def test_generation_before_any_sync_is_a_mistake():
    with pytest.raises(AssertionError, match="call to_engine first"), hand_over(Recorder()).generation():
        pass


def test_when_generation_fails_the_policy_is_whole_again_and_the_error_goes_on():
    recorder = Recorder()
    steps = hand_over(recorder)
    steps.to_engine(3)
    with pytest.raises(KeyboardInterrupt), steps.generation():
        raise KeyboardInterrupt
    assert recorder.calls == [*GIVEN, "sleep", "reload"] and steps.owner == "policy"
    with steps.generation():  # and the loop may go on
        pass
    assert steps.owner == "engine"


@pytest.mark.parametrize("fails", GIVEN)
def test_when_a_phase_fails_the_policy_is_whole_again(fails):
    recorder = Recorder(fails)
    steps = hand_over(recorder)
    with pytest.raises(OSError, match=f"^{fails} failed$"):
        steps.to_engine(3)
    assert recorder.calls == [*GIVEN[: GIVEN.index(fails) + 1], "sleep", "reload"]
    assert steps.owner == "policy"


@pytest.mark.parametrize(("fails", "note"), [("reload", "policy was not restored: reload failed"), ("sleep", "engine did not fall")])
def test_what_cannot_be_restored_is_said_beside_the_first_error(fails, note):
    recorder = Recorder(fails)
    steps = hand_over(recorder)
    steps.to_engine(3)
    with pytest.raises(ZeroDivisionError) as caught, steps.generation():
        raise ZeroDivisionError
    assert recorder.calls[-2:] == ["sleep", "reload"]
    assert note in caught.value.__notes__[0] and len(caught.value.__notes__) == 1


def test_nothing_is_offloaded_unless_asked():
    recorder = Recorder()
    hand_over(recorder, ()).to_engine(3)
    assert [call for call in recorder.calls if call.startswith("offload")] == ["offload", "offload"]
