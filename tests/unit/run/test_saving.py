"""When the loop saves, what it waits for, and which checkpoints stay."""

from __future__ import annotations

import time

import pytest

from megatron_rl.run import run_folder
from megatron_rl.runtime.guard import failure

EVERY_SECOND = ("trainer.num_steps=5", "checkpoint.every_steps=2", "checkpoint.keep=5")


def names(trainer) -> list[str]:
    return sorted(path.name for path in (trainer.folder.path / "checkpoints").iterdir())


def noted(monkeypatch) -> list[int]:
    """The steps that are noted as saved."""
    steps: list[int] = []
    monkeypatch.setattr(failure, "saved", steps.append)
    return steps


def test_a_checkpoint_is_written_while_the_next_step_runs(build, monkeypatch):
    saved = noted(monkeypatch)
    trainer = build(*EVERY_SECOND)
    trainer.run()
    second, fourth, last = trainer.learner.policy.savings
    # Not whole at once, whole at the look after the next step.
    assert (second.looks, second.waits) == (2, 0) and (fourth.looks, fourth.waits) == (2, 0)
    assert (last.looks, last.waits) == (1, 1), "the run ends with a checkpoint that is whole"
    assert saved == [0, 2, 4, 5]
    assert names(trainer) == ["step_000002", "step_000004", "step_000005"]


def test_what_is_written_is_the_state_of_its_step(build):
    behind = build(*EVERY_SECOND, run="a")
    behind.run()
    waited = build(*EVERY_SECOND, "checkpoint.background=false", run="b")
    waited.run()
    assert waited.learner.policy.savings == [] and names(behind) == names(waited)
    for name in names(behind):
        states = []
        for trainer in (behind, waited):
            policy = trainer.learner.policy
            extra = dict(policy.load(trainer.folder.path / "checkpoints" / name))
            extra.pop("random_states")  # of this process, which nothing here reads
            states.append((policy.logits.tolist(), extra))
        assert states[0] == states[1]
        assert states[0][1]["step"] == int(name.removeprefix("step_"))


def test_only_one_is_written_at_a_time(build):
    """Where the disk needs longer than a step, the next checkpoint waits for the one before."""
    trainer = build("trainer.num_steps=3", "checkpoint.every_steps=1", "checkpoint.keep=5")
    policy = trainer.learner.policy
    start = policy.start_save

    def slow(*arguments):
        assert all(saving.done for saving in policy.savings), "two at a time"
        saving = start(*arguments)
        saving.looks = -100  # not done before somebody waits
        return saving

    policy.start_save = slow
    trainer.run()
    assert [saving.waits for saving in policy.savings] == [1, 1, 1]
    assert names(trainer) == ["step_000001", "step_000002", "step_000003"]


def test_a_failed_write_is_raised_after_the_next_step(build, monkeypatch):
    saved = noted(monkeypatch)
    trainer = build("trainer.num_steps=5", "checkpoint.every_steps=2")
    policy = trainer.learner.policy
    start = policy.start_save

    def failing(*arguments):
        saving = start(*arguments)
        if len(policy.savings) == 2:
            saving.write_fails(ValueError("no space left on the disk of run"))
        return saving

    policy.start_save = failing
    with pytest.raises(ValueError, match="no space left"):
        trainer.run()
    assert saved == [0, 2], "what failed was not saved"
    rest = build("trainer.num_steps=5", "checkpoint.every_steps=2")
    rest.run()
    assert names(rest) == ["step_000004", "step_000005"]


def test_a_stop_request_waits_for_the_writer(build):
    asked = iter([False, False, True])
    trainer = build(
        "trainer.num_steps=9", "checkpoint.every_steps=2", stop=lambda: next(asked), run="stopped"
    )
    trainer.run()
    second, third = trainer.learner.policy.savings
    assert third.waits == 1 and third.done and second.done
    assert names(trainer) == ["step_000002", "step_000003"]
    assert (trainer.folder.path / "requeue").read_text() == "3\n"


def test_every_so_many_minutes_by_the_clock(build, monkeypatch):
    minutes = iter(range(100))
    monkeypatch.setattr(run_folder, "monotonic", lambda: 60.0 * next(minutes))
    trainer = build(
        "trainer.num_steps=7",
        "checkpoint.every_steps=0",
        "checkpoint.every_minutes=3",
        "checkpoint.keep=9",
    )
    trainer.run()
    # The clock is read at the start, after every step, and after every checkpoint.
    assert names(trainer) == ["step_000003", "step_000006", "step_000007"]


def test_without_an_interval_nobody_asks_the_clock(build, monkeypatch):
    trainer = build("trainer.num_steps=2", "checkpoint.every_steps=0")
    trainer.folder._saved_at = time.monotonic() - 10**6
    trainer.run()
    assert names(trainer) == ["step_000002"]


def test_every_kth_stays(build):
    trainer = build(
        "trainer.num_steps=7",
        "checkpoint.every_steps=1",
        "checkpoint.keep=2",
        "checkpoint.keep_every_steps=3",
    )
    trainer.run()
    assert names(trainer) == ["step_000003", "step_000006", "step_000007"]
