"""What is remembered of prompts goes through checkpoints, and a run with it repeats exactly."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron_rl.checkpoints.part_writer import saved_bytes
from megatron_rl.checkpoints.safe_load import load_plain
from megatron_rl.signals.histories import Histories
from tests.unit.trainer.runs import rows, timeless

DCPO = {"method": "dcpo", "method_overrides": ["std_ddof=0"]}
# Sixteen prompts, four a step: from step 5 on they are visited again.
EIGHT = ("trainer.num_steps=8", "optim.learning_rate=1e-3")


def trained(row: dict) -> dict:
    """Without the evaluation that the end of a run adds."""
    return {key: value for key, value in timeless(row).items() if not key.startswith("eval/")}


def test_a_prompt_is_remembered_by_its_uid() -> None:
    histories = Histories()
    new = histories.fields(["a", "b"])
    assert {name: values.tolist() for name, values in new.items()} == {
        "visits": [0, 0],
        "history_mean": [0, 0],
        "history_var": [0, 0],
    }
    histories.note(
        ["b", "c", "c"],
        {
            "visits": torch.tensor([1, 3, 3]),
            "history_mean": torch.tensor([0.1, 0.7, 0.7], dtype=torch.float64),
            "history_var": torch.tensor([0.0, 0.2, 0.2], dtype=torch.float64),
        },
    )
    found = histories.fields(["c", "a", "b", "c"])
    assert found["visits"].tolist() == [3, 0, 1, 3]
    assert found["history_mean"].tolist() == [0.7, 0, 0.1, 0.7]
    assert found["history_var"].tolist() == [0.2, 0, 0, 0.2]
    assert found["history_mean"].dtype == torch.float64


def test_a_state_is_a_copy() -> None:
    """A checkpoint may be written while the next step notes its visits."""
    histories = Histories()
    histories.restore({"a": [1, 0.5, 0.25]})
    state = histories.state()
    histories.restore({})
    assert histories.fields(["a"])["visits"].tolist() == [0]
    histories.restore(state)
    assert histories.fields(["a"])["visits"].tolist() == [1]


def test_a_checkpoint_file_holds_it_exactly(tmp_path: Path) -> None:
    """As the policy writes and reads what a checkpoint holds beside tensors."""
    histories = Histories()
    histories.restore({"a": (3, 0.1, 1 / 3), "b": (1, 1.0, 0.0)})
    file = tmp_path / "extra.pt"
    file.write_bytes(saved_bytes({"histories": histories.state()}))
    again = Histories()
    again.restore(load_plain(file, "extra.pt")["histories"])
    assert again.state() == histories.state() == {"a": (3, 0.1, 1 / 3), "b": (1, 1.0, 0.0)}


def test_a_resumed_run_remembers_and_repeats_the_uninterrupted_one(build) -> None:
    whole = build(*EIGHT, run="whole", **DCPO)
    whole.run()
    build("trainer.num_steps=6", *EIGHT[1:], run="cut", **DCPO).run()
    resumed = build(*EIGHT, run="cut", **DCPO)
    resumed.run()
    state = whole.learner.histories.state()
    assert len(state) == 16 and {visits for visits, _, _ in state.values()} == {2}
    assert resumed.learner.histories.state() == state
    for row, other in zip(rows(whole), rows(resumed), strict=True):
        assert trained(row) == trained(other)


def test_without_its_memory_a_resumed_run_would_differ(
    build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above can fail."""
    build("trainer.num_steps=6", *EIGHT[1:], run="cut", **DCPO).run()
    monkeypatch.setattr(Histories, "restore", lambda self, state: None)
    resumed = build(*EIGHT, run="cut", **DCPO)
    resumed.run()
    visits = [visits for visits, _, _ in resumed.learner.histories.state().values()]
    assert visits == [1] * 8


SIREN = {
    "method": "siren",
    "method_overrides": ["aggregate.norm_len=3", "entropy_anchor.coef=2.0"],
}


def test_a_resumed_run_goes_back_to_the_entropy_of_the_start(build) -> None:
    """Of four tokens, all as likely: log 4. The policy has left it when the run is cut."""
    whole = build(*EIGHT, run="whole", **SIREN)
    whole.run()
    build("trainer.num_steps=6", *EIGHT[1:], run="cut", **SIREN).run()
    resumed = build(*EIGHT, run="cut", **SIREN)
    resumed.run()
    for trainer in (whole, resumed):
        assert trainer.learner.histories.starts["peak_entropy"] == pytest.approx(
            math.log(4), rel=1e-6
        )
    assert rows(whole)[-1]["loss/entropy_anchor"] > 1e-3
    for row, other in zip(rows(whole), rows(resumed), strict=True):
        assert trained(row) == trained(other)


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


def test_a_resumed_run_compares_with_the_start(build) -> None:
    """Token 3 had a probability of one in four behind every response."""
    whole = build(*EIGHT, run="whole", **LASER)
    whole.run()
    build("trainer.num_steps=6", *EIGHT[1:], run="cut", **LASER).run()
    resumed = build(*EIGHT, run="cut", **LASER)
    resumed.run()
    for trainer in (whole, resumed):
        start = trainer.learner.histories.starts["end_logprob"]
        assert start == pytest.approx(-math.log(4), rel=1e-6)
    first, *_, last = [row for row in rows(whole) if row["step"]]
    # At the start r_s is 0, so what it is off by is 1 for the share of correct responses.
    assert first["loss/self_reward"] == pytest.approx(0.1 * first["reward/accuracy"], rel=0.1)
    assert last["loss/self_reward"] != first["loss/self_reward"]
    for row, other in zip(rows(whole), rows(resumed), strict=True):
        assert trained(row) == trained(other)
