"""The order in which memory changes hands in the colocated source, and what happens when a phase
fails."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_rl.rollouts.backends.colocated import ColocatedEngines, Colocation
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.runtime.memory import Ledger
from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.types import SyncReport

EVERYTHING = ("optimizer", "gradients", "weights")
GIVEN = [
    "offload optimizer gradients",
    "wake weights",
    "sync 3",
    "offload weights",
    "wake kv_cache",
]
WITHOUT_SYNC = [call for call in GIVEN if call != "sync 3"]


class Recorder:
    """Rollouts, policy, engine and weight sync in one: notes the calls, fails at the one named
    ``fails``."""

    def __init__(self, fails: str = "", weight_version: int = -1) -> None:
        self.calls: list[str] = []
        self.fails = fails
        self.weight_version = weight_version

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

    def collect(self, step: int) -> str:
        self._note(f"generate {step}")
        return f"experience of {step}"

    def sync(self, version: int) -> SyncReport:
        self._note(f"sync {version}")
        self.weight_version = version
        return SyncReport(version, 1, 0, 8, 0.0)


class Recorded(Rollouts):
    """What a step is made of does not matter here."""

    def collect(self, step: int) -> str:
        return self.policy.collect(step)

    @property
    def colocation(self) -> Colocation:
        return self.engines.colocation

    @property
    def calls(self) -> list[str]:
        return self.policy.calls


def colocated(recorder: Recorder | None = None, offload=EVERYTHING, logprob_check=None) -> Recorded:
    recorder = recorder or Recorder()
    ledger = Ledger(lambda: {"host": 1.0})
    colocation = Colocation(recorder, recorder, recorder, offload, ledger, logprob_check)
    job = SimpleNamespace(rules=StepRules(1, 1))
    engines = ColocatedEngines(None, None, job, colocation)
    return Recorded(None, recorder, engines, job, None)


def train(source: Recorded) -> None:
    """The policy's turn, in which nothing is done."""
    with source.training():
        pass


def generate(source: Recorded) -> None:
    """The engine's turn, in which nothing is done."""
    with source.generation():
        pass


def test_a_whole_step_in_order():
    source = colocated()
    assert source.publish(3).version == 3
    assert source.calls == GIVEN and source.colocation.owner == "engine"
    assert source.next(4) == "experience of 4"
    train(source)
    assert source.calls == [*GIVEN, "generate 4", "sleep", "reload"]
    assert source.colocation.owner == "policy"
    phases = "generate sleep reload update offload wake_weights sync wake_kv_cache".split()
    keys = [f"memory/{phase}_host_gib" for phase in phases]
    assert list(source.publish(4).measured) == [*keys, "time/reload_s"]


class Watcher:
    """A logprob_check that notes when it is asked; ``fails``: it finds a difference."""

    def __init__(self, recorder: Recorder, fails: bool = False) -> None:
        self.recorder = recorder
        self.fails = fails

    def expected(self, version: int) -> str:
        self.recorder.calls.append(f"policy scores {version}")
        return f"of {version}"

    def check(self, report: SyncReport, expected: str) -> SyncReport:
        self.recorder.calls.append(f"engine is compared {expected}")
        if self.fails:
            raise OSError("they differ")
        return replace(report, logprob_check_diff=0.25, logprob_check_diff_max=2.0)


CHECKED_CALLS = ["policy scores 3", *GIVEN, "engine is compared of 3"]


def test_the_policy_scores_before_its_weights_leave_and_the_engine_when_it_can():
    recorder = Recorder()
    source = colocated(recorder, logprob_check=Watcher(recorder))
    report = source.publish(3)
    assert recorder.calls == CHECKED_CALLS
    assert (report.logprob_check_diff, report.logprob_check_diff_max) == (0.25, 2.0)
    train(source)
    generate(source)
    assert recorder.calls[len(CHECKED_CALLS) :] == ["sleep", "reload", *WITHOUT_SYNC]


def test_an_engine_that_differs_generates_nothing():
    """Nor does it go on with the version before."""
    recorder = Recorder()
    watcher = Watcher(recorder)
    source = colocated(recorder, logprob_check=watcher)
    source.publish(2)
    train(source)
    recorder.calls.clear()
    watcher.fails = True
    with pytest.raises(OSError, match="they differ"):
        source.publish(3)
    assert recorder.calls == [*CHECKED_CALLS, "sleep", "reload"]
    with pytest.raises(AssertionError, match="call publish first"):
        generate(source)


def test_the_policy_gets_its_memory_once():
    source = colocated()
    train(source)
    assert source.calls == []
    source.publish(3)
    train(source)
    train(source)
    assert source.calls == [*GIVEN, "sleep", "reload"]


def test_nothing_is_published_while_the_engine_has_the_memory():
    source = colocated()
    source.publish(3)
    with pytest.raises(AssertionError, match="the engine has the memory already"):
        source.publish(4)


@pytest.mark.parametrize(
    ("version_after_sleep", "calls"), [(3, WITHOUT_SYNC), (-1, GIVEN)], ids=["kept", "lost"]
)
def test_generation_after_a_checkpoint_syncs_where_the_engine_lost_its_weights(
    version_after_sleep, calls
):
    source = colocated()
    source.publish(3)
    train(source)
    source.calls.clear()
    source.policy.weight_version = version_after_sleep
    generate(source)
    assert source.calls == calls


def test_generation_before_any_sync_is_a_mistake():
    source = colocated(Recorder())
    with pytest.raises(AssertionError, match="call publish first"):
        generate(source)
    with pytest.raises(AssertionError, match="call publish first"):
        source.next(1)


def test_when_generation_fails_the_policy_is_whole_again_and_the_error_goes_on():
    source = colocated()
    source.publish(3)
    with pytest.raises(KeyboardInterrupt), source.generation():
        raise KeyboardInterrupt
    assert source.calls == [*GIVEN, "sleep", "reload"]
    assert source.colocation.owner == "policy"
    generate(source)  # and the loop may go on
    assert source.colocation.owner == "engine"


@pytest.mark.parametrize("fails", GIVEN)
def test_when_a_phase_fails_the_policy_is_whole_again(fails):
    source = colocated(Recorder(fails))
    with pytest.raises(OSError, match=f"^{fails} failed$"):
        source.publish(3)
    assert source.calls == [*GIVEN[: GIVEN.index(fails) + 1], "sleep", "reload"]
    assert source.colocation.owner == "policy"


@pytest.mark.parametrize(
    ("fails", "note"),
    [
        ("reload", "Cleanup also failed: policy.reload(): reload failed"),
        ("sleep", "Cleanup also failed: engine.sleep(): sleep failed"),
    ],
)
def test_what_cannot_be_restored_is_said_beside_the_first_error(fails, note):
    source = colocated(Recorder(fails))
    source.publish(3)
    with pytest.raises(ZeroDivisionError) as caught, source.generation():
        raise ZeroDivisionError
    assert source.calls[-2:] == ["sleep", "reload"]
    assert note in caught.value.__notes__[0] and len(caught.value.__notes__) == 1


def test_nothing_is_offloaded_unless_asked():
    recorder = Recorder()
    colocated(recorder, ()).publish(3)
    assert [call for call in recorder.calls if call.startswith("offload")] == ["offload", "offload"]
