"""Which checkpoints are kept for their score, when a run stops rising, and what is exported."""

import json
import logging

import pytest

from megatron_rl.run.start import Scores, finished_already
from tests.unit.run.test_run_folder import config_of, steps
from tests.unit.trainer.runs import WORLD


def scores_of(trainer, values):
    """Gives the evaluations of a run these accuracies, from the start on."""
    pending = iter(values)
    trainer.evaluator.run = lambda: {"eval/accuracy": next(pending)}
    return trainer


BEST = [
    "checkpoint.every_steps=0",
    "checkpoint.keep=1",
    "checkpoint.keep_best=true",
    "evaluation.every_steps=1",
]


def test_the_best_checkpoint_is_kept_besides_the_newest(build, tmp_path, capsys):
    scores_of(build("trainer.num_steps=5", *BEST), [0.1, 0.2, 0.6, 0.5, 0.6, 0.3]).run()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step_000002",
        "step_000005",
    ]
    best = json.loads((tmp_path / "run" / "best.json").read_text())
    assert best == {"metric": "eval/accuracy", "score": 0.6, "step": 2, "checkpoint": "step_000002"}
    assert "best eval/accuracy 0.600 at step 2" in capsys.readouterr().out
    scores_of(build("trainer.num_steps=7", *BEST), [0.55, 0.7]).run()
    assert json.loads((tmp_path / "run" / "best.json").read_text())["step"] == 7, (
        "a resumed run knows the scores so far"
    )
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000007"]


def test_a_run_that_stops_rising_ends_as_finished_and_stays_so(build, tmp_path, caplog):
    stop = ["trainer.num_steps=9", "evaluation.stop_after=2", *BEST]
    with caplog.at_level(logging.INFO):
        trainer = scores_of(build(*stop), [0.1, 0.6, 0.5, 0.6, 0.3])
        trainer.run()
    assert steps(tmp_path / "run" / "metrics.jsonl") == [0, 1, 2, 3]
    assert (
        "evaluation.stop_after" in caplog.text
        and trainer.learner.policy.exported == tmp_path / "run" / "export"
    )
    (tmp_path / "run" / "export").mkdir()
    (tmp_path / "run" / "export" / "config.json").write_text("{}")
    assert finished_already(config_of(build(*stop)), WORLD)
    again = build(*stop)
    again.run()
    assert again.learner.policy.microbatch_sizes == [], (
        "killed before its export, it goes straight to it"
    )
    assert not finished_already(config_of(build("trainer.num_steps=9", *BEST)), WORLD)


def test_exports_come_on_their_own_schedule(build, tmp_path):
    trainer = build(
        "trainer.num_steps=5", "checkpoint.every_steps=0", "checkpoint.export_every_steps=2"
    )
    exported = []
    trainer.learner.policy.export = exported.append
    trainer.run()
    assert [path.relative_to(tmp_path / "run").as_posix() for path in exported] == [
        "exports/step_000002",
        "exports/step_000004",
        "export",
    ]


def test_a_score_that_no_evaluation_gives_is_named():
    with pytest.raises(
        ValueError,
        match=r"checkpoint.best_metric = eval/acc: .* choose one of eval/accuracy, eval/pass_at_1",
    ):
        Scores("eval/acc", None).note({"step": 1, "eval/accuracy": 0.5, "eval/pass_at_1": 0.5})
    assert Scores("eval/acc", None).note({"step": 1, "reward/mean": 0.5}) is False
