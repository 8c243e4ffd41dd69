"""What is remembered of prompts goes through checkpoints, and a run with it repeats exactly."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_rl.checkpoints.part_writer import saved_bytes
from megatron_rl.checkpoints.safe_load import load_plain
from megatron_rl.config.method import load_method
from megatron_rl.signals import signals_of
from megatron_rl.signals.prompt_history import PromptHistory
from megatron_rl.trainer.trainer import Trainer
from tests.unit.trainer.runs import rows, timeless

DCPO = {"method": "dcpo", "method_overrides": ["std_ddof=0"]}
# Sixteen prompts, four a step: from step 5 on they are visited again.
EIGHT = ("trainer.num_steps=8", "optim.learning_rate=1e-3")


def trained(row: dict) -> dict:
    """Without the evaluation that the end of a run adds."""
    return {key: value for key, value in timeless(row).items() if not key.startswith("eval/")}


def history(trainer: Trainer) -> PromptHistory:
    (signal,) = trainer.learner.signals.members
    assert isinstance(signal, PromptHistory)
    return signal


def test_a_state_is_a_copy_that_a_checkpoint_file_holds_exactly(tmp_path: Path) -> None:
    """As the policy writes and reads what a checkpoint holds beside tensors; it may be written
    while the next step notes its visits."""
    signals = signals_of(load_method("dcpo"))
    signals.restore({"PromptHistory": {"a": (3, 0.1, 1 / 3), "b": (1, 1.0, 0.0)}})
    state = signals.state()
    file = tmp_path / "extra.pt"
    file.write_bytes(saved_bytes({"signals": state}))
    signals.restore({})
    assert signals.state() == {"PromptHistory": {}}
    signals.restore(load_plain(file, "extra.pt")["signals"])
    wanted = {"a": (3, 0.1, 1 / 3), "b": (1, 1.0, 0.0)}
    assert signals.state() == state == {"PromptHistory": wanted}


def test_a_resumed_run_remembers_and_repeats_the_uninterrupted_one(build) -> None:
    whole = build(*EIGHT, run="whole", **DCPO)
    whole.run()
    build("trainer.num_steps=6", *EIGHT[1:], run="cut", **DCPO).run()
    resumed = build(*EIGHT, run="cut", **DCPO)
    resumed.run()
    state = history(whole).state()
    assert len(state) == 16 and {visits for visits, _, _ in state.values()} == {2}
    assert history(resumed).state() == state
    for row, other in zip(rows(whole), rows(resumed), strict=True):
        assert trained(row) == trained(other)


@pytest.mark.full
def test_without_its_memory_a_resumed_run_would_differ(
    build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above can fail."""
    build("trainer.num_steps=6", *EIGHT[1:], run="cut", **DCPO).run()
    monkeypatch.setattr(PromptHistory, "restore", lambda self, state: None)
    resumed = build(*EIGHT, run="cut", **DCPO)
    resumed.run()
    visits = [visits for visits, _, _ in history(resumed).state().values()]
    assert visits == [1] * 8


SIREN = {"method": "siren", "method_overrides": ["aggregate.norm_len=3", "entropy_anchor.coef=2.0"]}


@pytest.mark.full
def test_a_resumed_run_goes_back_to_the_entropy_of_the_start(build) -> None:
    """Of four tokens, all as likely: log 4. The policy has left it when the run is cut."""
    whole = build(*EIGHT, run="whole", **SIREN)
    whole.run()
    build("trainer.num_steps=6", *EIGHT[1:], run="cut", **SIREN).run()
    resumed = build(*EIGHT, run="cut", **SIREN)
    resumed.run()
    for trainer in (whole, resumed):
        (peaks,) = trainer.learner.signals.members
        assert peaks.state()["anchor"] == pytest.approx(math.log(4), rel=1e-6)
    assert rows(whole)[-1]["loss/entropy_anchor"] > 1e-3
    for row, other in zip(rows(whole), rows(resumed), strict=True):
        assert trained(row) == trained(other)


@pytest.mark.full
def test_the_pull_holds_the_entropy(build) -> None:
    """With a strong one the policy stays closer to where it started."""
    found = []
    for coef in ("0.0", "20.0"):
        overrides = [SIREN["method_overrides"][0], f"entropy_anchor.coef={coef}"]
        trainer = build(*EIGHT, run=f"coef_{coef}", method="siren", method_overrides=overrides)
        trainer.run()
        found.append(rows(trainer)[-1]["entropy/nucleus_peak_mean"])
    assert found[0] < found[1] - 0.01 and found[1] < math.log(4)


LASER = {"method": "laser", "method_overrides": ["self_reward.token_id=3"]}


@pytest.mark.full
def test_a_resumed_run_compares_with_the_start(build) -> None:
    """Token 3 had a probability of one in four behind every response."""
    whole = build(*EIGHT, run="whole", **LASER)
    whole.run()
    build("trainer.num_steps=6", *EIGHT[1:], run="cut", **LASER).run()
    resumed = build(*EIGHT, run="cut", **LASER)
    resumed.run()
    for trainer in (whole, resumed):
        (end,) = trainer.learner.signals.members
        assert end.state()["start"] == pytest.approx(-math.log(4), rel=1e-6)
    first, *_, last = [row for row in rows(whole) if row["step"]]
    # At the start r_s is 0, so it is off by 1 for correct responses, which count half; by the last
    # minibatch of the step the policy has moved.
    finished = 1 - first["rollout/truncated_share"]
    assert first["loss/self_reward"] == pytest.approx(0.05 * finished, rel=0.1)
    assert last["loss/self_reward"] != first["loss/self_reward"]
    for row, other in zip(rows(whole), rows(resumed), strict=True):
        assert trained(row) == trained(other)
