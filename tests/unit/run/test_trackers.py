"""Runs in trackers, really written by their libraries and read back: rows, samples, configuration,
place in a comparison. The trainer is real, with a bandit for policy and engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron_rl.config.rules import checks
from megatron_rl.errors import ConfigError
from megatron_rl.reporting.tracking import TRACKERS, check_accounts
from megatron_rl.trainer.trainer import Trainer
from tests.unit.reporting.tracker_files import STORED, same
from tests.unit.reporting.wandb_file import read_runs
from tests.unit.trainer.runs import bandit_config, build_bandit, rows, samples

OPTIONAL = ("mlflow", "trackio", "swanlab")  # not in the environment of the core tests
LIBRARIES = [
    pytest.param(name, marks=[pytest.mark.full] if name in OPTIONAL else []) for name in TRACKERS
]


def with_trackers(folder: Path, *names: str) -> tuple[str, ...]:
    for name in names:
        if find_spec(name) is None:  # importing it here would be before what the package sets
            pytest.skip(f"{name} is not installed")
    project = folder.name.replace("[", "-").replace("]", "")
    return (f"logging.trackers=[{','.join(names)}]", f"logging.project={project}", "seed=3")


def compare(trainer: Trainer, name: str) -> None:
    """Every value of metrics.jsonl is in the tracker, and no other."""
    run = trainer.folder.path
    points = STORED[name](run).points
    for row in rows(trainer):
        found = points.pop(row.pop("step"))
        assert found.keys() == row.keys()
        assert not {key: (found[key], row[key]) for key in row if not same(found[key], row[key])}
    assert not points


def known(trainer: Trainer) -> dict:
    return json.loads((trainer.folder.path / "trackers.json").read_text())


def two_starts(folder: Path, first: tuple[str, ...], second: tuple[str, ...]) -> Iterator[Trainer]:
    """A run that is stopped after step 2, and the start that resumes it to step 3."""
    stops = iter([False, True])
    trainer = build_bandit(folder, *first, stop=lambda: next(stops))
    trainer.run()
    yield trainer
    trainer = build_bandit(folder, *second)
    trainer.run()
    yield trainer


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_run_is_there_with_rows_samples_and_settings(name: str, tmp_path: Path) -> None:
    trainer = build_bandit(tmp_path, *with_trackers(tmp_path, name))
    trainer.run()
    compare(trainer, name)
    stored = STORED[name](trainer.folder.path)
    assert stored.id == known(trainer)[name]["id"]
    assert stored.config["method"]["name"] == "grpo" and stored.config["versions"]["torch"]
    if name == "tensorboard":
        return
    written = samples(trainer)
    assert len(written) == 6
    shown = [row for step in sorted(stored.samples) for row in stored.samples[step]]
    texts = [{key: str(value) for key, value in row.items()} for row in shown]
    assert texts == [{key: str(value) for key, value in row.items()} for row in written]


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_run_that_resumes_is_the_same_run_there(name: str, tmp_path: Path) -> None:
    settings = with_trackers(tmp_path, name)
    starts = two_starts(tmp_path, settings, settings)
    first = known(next(starts))  # read before the second start
    second = next(starts)
    assert known(second) == first == {name: {"id": first[name]["id"], "lacks_from": None}}
    assert STORED[name](tmp_path / "run").id == first[name]["id"]
    assert [row["step"] for row in rows(second)] == [0, 1, 2, 3]
    compare(second, name)


def test_a_tracker_that_is_added_later_gets_the_earlier_rows(tmp_path: Path) -> None:
    both = with_trackers(tmp_path, "tensorboard", "wandb")
    *_, trainer = two_starts(tmp_path, with_trackers(tmp_path, "tensorboard"), both)
    compare(trainer, "tensorboard")
    compare(trainer, "wandb")


def test_a_tracker_that_fails_stops_no_run_and_gets_its_rows_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = with_trackers(tmp_path, "tensorboard")
    add_scalar = SummaryWriter.add_scalar

    def fail(self: SummaryWriter, key: str, value: float, step: int) -> None:
        if step == 2:
            raise ConnectionError("planted")
        add_scalar(self, key, value, step)

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(SummaryWriter, "add_scalar", fail)
        trainer = build_bandit(tmp_path, *settings)
        trainer.run()
    assert "logging.trackers: tensorboard failed at step 2 (planted)" in caplog.text
    assert known(trainer)["tensorboard"]["lacks_from"] == 2
    assert max(STORED["tensorboard"](tmp_path / "run").points) == 1
    trainer = build_bandit(tmp_path, *settings, "trainer.num_steps=4")
    trainer.run()
    compare(trainer, "tensorboard")


def test_what_a_tracker_has_before_it_fails_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def fail(*table: object) -> None:
        raise FileNotFoundError("planted")

    monkeypatch.setattr(wandb, "Table", fail)
    trainer = build_bandit(tmp_path, *with_trackers(tmp_path, "wandb"))
    trainer.run()
    assert max(row["step"] for row in rows(trainer)) > 1
    (run,) = read_runs(tmp_path / "run")
    assert [row["step"] for row in run.history] == [0]
    assert run.exit_code == 1


def test_steps_that_are_done_again_are_shown_once(tmp_path: Path) -> None:
    settings = (*with_trackers(tmp_path, "tensorboard"), "checkpoint.every_steps=1")
    build_bandit(tmp_path, *settings, "checkpoint.keep=3").run()
    assert max(STORED["tensorboard"](tmp_path / "run").points) == 3
    again = f"resume={tmp_path}/run/checkpoints/step_000001"
    trainer = build_bandit(tmp_path, *settings, again, "trainer.num_steps=2")
    trainer.run()
    assert [row["step"] for row in rows(trainer)] == [0, 1, 2]
    compare(trainer, "tensorboard")


def test_a_run_that_fails_leaves_its_rows_and_its_place_in_a_comparison(tmp_path: Path) -> None:
    def fail() -> bool:
        raise RuntimeError("planted")

    place = ("logging.group=ablation/grpo", "logging.tags=[mine]", "logging.run_name=second")
    trainer = build_bandit(tmp_path, *with_trackers(tmp_path, "wandb"), *place, stop=fail)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.run()
    (run,) = read_runs(tmp_path / "run")
    assert [row["step"] for row in run.history] == [0, 1]
    assert run.exit_code == 1
    about = run.about
    shown = (about.run_group, about.job_type, about.display_name)
    assert shown == ("ablation/grpo", "train", "second")
    assert list(about.tags) == ["grpo", "seed=3", "mine"]


def test_a_library_that_is_missing_is_named_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "mlflow" else object())
    config = bandit_config(tmp_path, ["logging.trackers=[wandb,mlflow,wandb]"])
    with pytest.raises(ConfigError) as error:
        checks.check(config, 1)
    assert "logging.trackers: mlflow is not installed; pip install mlflow" in str(error.value)
    assert "names one twice" in str(error.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (f"logging.tags=[{65 * 'x'}]", r"logging.tags.0 = 'xxx.*at most 64 characters"),
        ("logging.wandb=offline", "logging.wandb: unknown key; here it is logging.trackers"),
        ("logging.tensorboard=false", "tensorboard: unknown key; here it is logging.trackers"),
        ("logging.wandb_name=mine", "wandb_name: unknown key; here it is logging.run_name"),
        ("logging.trackers=[comet]", r"logging.trackers.0 = 'comet': .*'mlflow'"),
    ],
)
def test_what_is_no_setting_of_trackers_is_refused(given: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        bandit_config(tmp_path, [given])


def test_wandb_online_without_a_key_is_one_message_and_asks_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = bandit_config(tmp_path, ["logging.trackers=[wandb]", "logging.online=true"]).logging
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    begin = "logging.trackers: wandb: "
    with pytest.raises(ValueError, match=f"{begin}no account or server is known.*wandb login"):
        check_accounts(online)
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(ValueError, match=f"{begin}.*invalid.*logging.online=false"):
        check_accounts(online)
    check_accounts(bandit_config(tmp_path, ["logging.trackers=[wandb]"]).logging)
