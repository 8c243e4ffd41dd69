"""Offline runs of wandb, really written and read back: rows, configuration, place in a comparison.
The trainer is real, with a bandit for policy and engine."""

import pytest

from megatron_rl.errors import ConfigError
from tests.unit.reporting.wandb_file import read_runs
from tests.unit.trainer.runs import build_bandit, rows

ON = ("logging.wandb=offline", "seed=3")


def test_an_offline_run_has_every_row_the_settings_and_its_place(tmp_path):
    place = ("logging.wandb_group=ablation/grpo", "logging.wandb_tags=[mine]")
    trainer = build_bandit(tmp_path, *ON, *place)
    trainer.run()
    (run,) = read_runs(tmp_path / "run")
    written = rows(trainer)
    assert len(written) == 4
    for row, logged in zip(written, run.history, strict=True):
        assert {key: logged[key] for key in row} == pytest.approx(row)
    assert run.config["method"]["name"] == "grpo" and run.config["versions"]["torch"]
    about = run.about
    assert (about.run_group, about.job_type, about.display_name) == (
        "ablation/grpo",
        "train",
        "run",
    )
    assert list(about.tags) == ["grpo", "seed=3", "mine"]
    assert run.exit_code == 0


def test_a_start_that_goes_on_belongs_to_the_same_run_and_has_all_of_it(tmp_path):
    stops = iter([False, True])
    build_bandit(tmp_path, *ON, stop=lambda: next(stops)).run()
    build_bandit(tmp_path, *ON, "logging.wandb_name=second").run()
    first, second = read_runs(tmp_path / "run")
    assert first.about.run_id == second.about.run_id
    assert [row["step"] for row in first.history] == [0, 1, 2]
    assert [row["step"] for row in second.history] == [0, 1, 2, 3]
    assert second.history[1]["reward/mean"] == pytest.approx(first.history[1]["reward/mean"])
    assert second.about.display_name == "second"


def test_a_run_that_fails_leaves_its_rows_and_says_that_it_failed(tmp_path):
    def fail() -> bool:
        raise RuntimeError("planted")

    trainer = build_bandit(tmp_path, *ON, stop=fail)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.run()
    (run,) = read_runs(tmp_path / "run")
    assert [row["step"] for row in run.history] == [0, 1]
    assert run.exit_code == 1


def test_a_tag_that_wandb_would_refuse_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"logging.wandb_tags.0 = 'xxx.*at most 64 characters"):
        build_bandit(tmp_path, *ON, f"logging.wandb_tags=[{65 * 'x'}]")
