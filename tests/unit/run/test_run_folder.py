"""A run folder keeps its word: the same run goes on, another one is refused, nothing that was
logged is lost."""

import json
import logging
from datetime import date
from pathlib import Path

import pytest
import torch

from megatron_rl.run import run_record
from megatron_rl.run.start import finished_already, with_date
from megatron_rl.runtime.guard import failure
from megatron_rl.runtime.guard.first_failure import FAILED_HOST
from tests.unit.trainer.runs import WORLD


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def stop_at(step: int):
    """A stop request that arrives during ``step``."""
    asked = iter([False] * (step - 1) + [True])
    return lambda: next(asked)


def config_of(trainer):
    return trainer.folder._config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["method=dapo"], ["method.name = grpo there, dapo here"]),
        (
            ["optim.learning_rate=1e-4", "method.kl.coef=0.5"],
            ["optim.learning_rate = 1e-06 there, 0.0001 here", "method.kl.coef"],
        ),
        (["precision=fp8_blockwise"], ["precision.fp8 = null there, set here"]),
        (
            ["batch.responses_per_prompt=4", "seed=7"],
            ["batch.responses_per_prompt = 8 there, 4 here", "seed = 1 there, 7 here"],
        ),
        (["rollout.temperature=0.5"], ["rollout.temperature = 1.0 there, 0.5 here"]),
    ],
)
def test_another_run_is_refused_with_keys_values_and_remedy(build, changes, named):
    build("trainer.num_steps=1").run()
    before = (build().folder.path / "config.json").read_text()
    trainer = build("trainer.num_steps=2", *changes)
    with pytest.raises(ValueError, match="holds a run with other settings") as caught:
        trainer.run()
    text = str(caught.value)
    assert all(line in text for line in named), text
    assert (
        "resume.changed=allow" in text
        and "another run_dir" in text
        and len(text.splitlines()) <= 12
    )
    assert (trainer.folder.path / "config.json").read_text() == before, (
        "the record is still that of the run"
    )
    with pytest.raises(ValueError, match="other settings"):
        finished_already(config_of(build("trainer.num_steps=1", *changes)), WORLD)


def test_what_does_not_change_the_training_may_change(build):
    build("trainer.num_steps=1").run()
    free = [
        "parallel=tp2",
        "rollout.max_num_seqs=3",
        "checkpoint.keep=1",
        "evaluation.every_steps=1",
        "memory.enforce=false",
    ]
    free += [
        "batch.tokens_per_microbatch=32",
        "logging.log_samples=1",
        "weight_sync.logprob_check_every=3",
        "reward.timeout_s=9",
    ]
    trainer = build("trainer.num_steps=2", *free)
    trainer.run()
    assert steps(trainer.folder.path / "metrics.jsonl") == [0, 1, 2]
    assert not (trainer.folder.path / "changes.jsonl").exists()


def test_allowed_changes_are_said_and_recorded(build, caplog):
    build("trainer.num_steps=1").run()
    trainer = build(
        "trainer.num_steps=2", "optim.learning_rate=1e-4", "seed=5", "resume.changed=allow"
    )
    with caplog.at_level(logging.WARNING):
        trainer.run()
    lines = (trainer.folder.path / "changes.jsonl").read_text().splitlines()
    recorded = [json.loads(line) for line in lines]
    assert recorded == [
        {"step": 1, "key": "optim.learning_rate", "old": 1e-06, "new": 1e-4},
        {"step": 1, "key": "seed", "old": 1, "new": 5},
    ]
    assert "seed = 1 there, 5 here" in caplog.text and "the prompts start anew" in caplog.text
    build("trainer.num_steps=3", "optim.learning_rate=1e-4", "seed=5").run()


def test_without_its_config_a_run_is_compared_with_what_the_checkpoint_says(build, caplog):
    build("trainer.num_steps=1").run()
    (build().folder.path / "config.json").unlink()
    with pytest.raises(ValueError, match="seed = 1 there, 7 here"):
        build("trainer.num_steps=2", "seed=7").run()
    with caplog.at_level(logging.WARNING):
        build("trainer.num_steps=2").run()
    assert "config.json is missing; that of step_000001 is taken" in caplog.text


def test_other_prompts_are_refused_by_content_and_the_same_ones_may_move(build):
    first = build("trainer.num_steps=1")
    first.folder.prepare("16:aaaa")
    first.run()
    moved = build("trainer.num_steps=2", "data.train=elsewhere")
    moved.folder.prepare("16:aaaa")
    other = build("trainer.num_steps=2")
    with pytest.raises(ValueError, match="content of data = 16:aaaa there, 16:bbbb here"):
        other.folder.prepare("16:bbbb")
    ordered = build("trainer.num_steps=2", "data.shuffle=false")
    with pytest.raises(ValueError, match=r"data.shuffle = true there, false here") as caught:
        ordered.folder.prepare("16:bbbb")
    assert str(caught.value).count("  - ") == 2, "each difference once"
    unread = build("trainer.num_steps=2", "data.train=elsewhere")
    with pytest.raises(ValueError, match=r"data.train = t there, elsewhere here"):
        unread.run()


def test_the_day_that_templates_show_is_that_of_the_first_start(build):
    config = build("trainer.num_steps=1", "data.template_date='2026-02-03'")
    config.run()
    again = build("trainer.num_steps=2")
    assert with_date(config_of(again), WORLD).data.template_date == "2026-02-03"
    (again.folder.path / "config.json").unlink()
    assert with_date(config_of(again), WORLD).data.template_date == str(date.today())


def test_the_machine_of_an_earlier_failure_is_forgotten_and_this_run_names_its_own(build):
    folder = build().folder
    folder.path.mkdir()
    (folder.path / FAILED_HOST).write_text("node3\n")
    folder.prepare()
    assert not (folder.path / FAILED_HOST).exists()
    assert failure.STATE.failed_host == folder.path / FAILED_HOST


def test_the_prompts_of_several_sources_have_one_fingerprint():
    one = {"epoch": 0, "position": 3, "seed": 1, "shuffle": True, "prompts": "16:aaaa"}
    assert run_record.data_fingerprint(one) == "16:aaaa"
    several = {"weights": [1, 2], "taken": [3, 4], "sources": [one, one | {"prompts": "8:bbbb"}]}
    assert run_record.data_fingerprint(several) == "16:aaaa+8:bbbb"


def test_a_model_is_known_by_content(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(3_000_000))
    fingerprint = run_record.model_fingerprint
    assert (
        fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b") and fingerprint(tmp_path) is None
    )
    (tmp_path / "b" / "model.safetensors").write_bytes(b"\1" * 3_000_000)
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b"), "same names and sizes"


def test_rows_that_are_overwritten_are_archived_and_that_is_logged(build, caplog):
    build("trainer.num_steps=4", "checkpoint.every_steps=2", stop=stop_at(2)).run()
    path = build().folder.path
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (path / name).open("a") as file:
            file.write('{"step": 3, "reward/mean": 9}\n{"step": 4, "rew')
    with caplog.at_level(logging.INFO):
        build("trainer.num_steps=4").run()
    assert steps(path / "metrics.jsonl") == [0, 1, 2, 3, 4]
    for name in ("metrics", "samples"):
        archive = (path / f"{name}.overwritten.jsonl").read_text()
        assert archive == '{"step": 3, "reward/mean": 9}\n{"step": 4, "rew\n'
        assert f"{name}.jsonl: rows from step 3 on were moved to" in caplog.text


def test_a_run_killed_before_its_first_checkpoint_starts_anew_and_keeps_its_rows(build, caplog):
    whole = build("trainer.num_steps=2", run="whole")
    whole.run()
    killed = build("trainer.num_steps=9", "checkpoint.every_steps=0")
    killed.folder.resume(killed.learner.policy, killed.source)
    for step in (0, 1, 2, 3):
        killed.folder.log({"step": step, "reward/mean": 7.0})
    with caplog.at_level(logging.INFO):
        again = build("trainer.num_steps=2")
        again.run()
    assert "rows from step 0 on were moved to" in caplog.text
    assert steps(again.folder.path / "metrics.overwritten.jsonl") == [0, 1, 2, 3]
    assert torch.equal(again.learner.policy.logits, whole.learner.policy.logits)
    with pytest.raises(ValueError, match="other settings"):
        other = build("trainer.num_steps=2", "seed=3", run="killed2")
        other.folder.path.mkdir()
        (other.folder.path / "metrics.jsonl").write_text('{"step": 0}\n')
        (other.folder.path / "config.json").write_text(
            json.dumps(run_record.describe(config_of(again), 1, None))
        )
        other.run()


def test_a_folder_whose_checkpoints_are_all_damaged_is_refused_with_the_remedy(build):
    trainer = build("trainer.num_steps=2", "checkpoint.every_steps=1")
    trainer.run()
    for path in (trainer.folder.path / "checkpoints").glob("*/state.pt"):
        path.write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"no checkpoint of .* is whole; bring one back, delete them all"
    ):
        build("trainer.num_steps=3").run()
    assert steps(trainer.folder.path / "metrics.jsonl") == [0, 1, 2]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_damaged_rows_are_found_before_anything_is_built(build, name):
    trainer = build("trainer.num_steps=1")
    trainer.run()
    path = trainer.folder.path / name
    path.write_text("\0\0\n" + path.read_text())
    with pytest.raises(ValueError, match=rf"{name}: line 1 is damaged .*move the file away"):
        build("trainer.num_steps=2").folder.prepare()


def test_fewer_steps_than_the_checkpoint_has_are_refused(build):
    build("trainer.num_steps=3").run()
    shorter = build("trainer.num_steps=2")
    for action in (shorter.run, lambda: finished_already(config_of(shorter), WORLD)):
        with pytest.raises(
            ValueError, match=r"trainer.num_steps = 2: .*step_000003 has 3 steps already; raise it"
        ):
            action()


def test_a_finished_run_says_so_and_is_not_started_again(build, capsys):
    trainer = build("trainer.num_steps=2", "data.template_date='2026-02-03'")
    config = config_of(trainer)
    assert not finished_already(config, WORLD)
    trainer.run()
    assert not finished_already(config, WORLD), "its export is missing"
    (trainer.folder.path / "export").mkdir()
    (trainer.folder.path / "export" / "config.json").write_text("{}")
    capsys.readouterr()
    assert finished_already(config, WORLD)
    said = capsys.readouterr().out
    assert "already finished at step 2" in said and "held-out accuracy" in said and "export" in said
    undated = config_of(build("trainer.num_steps=2"))
    assert finished_already(undated, WORLD), "its day is that of the run"
    assert not finished_already(config_of(build("trainer.num_steps=3")), WORLD)
    assert not finished_already(config_of(build("trainer.num_steps=2", "resume=never")), WORLD)
    assert not finished_already(
        config_of(build("trainer.num_steps=2", "data.train=other")), WORLD
    ), "decided by content"


def test_a_finished_run_of_epochs_says_so(build):
    """Its record has their number and the steps that they were."""
    trainer = build(
        "trainer.num_steps=2", "trainer.num_epochs=1", "data.template_date='2026-02-03'"
    )
    trainer.run()
    (trainer.folder.path / "export").mkdir()
    (trainer.folder.path / "export" / "config.json").write_text("{}")

    def is_finished(epochs: int) -> bool:
        again = build("trainer.num_steps=null", f"trainer.num_epochs={epochs}")
        return finished_already(config_of(again), WORLD)

    assert is_finished(1)
    assert not is_finished(2), "how many steps that is, the prompts decide"


def test_a_run_that_is_made_longer_has_no_figure_until_it_ends(build):
    """A folder with the figure counts as one whose run has ended."""
    build("trainer.num_steps=2").run()
    longer = build("trainer.num_steps=4")
    figure = longer.folder.path / "curves.png"
    assert figure.is_file()
    longer.folder.prepare()
    longer.folder.resume(longer.learner.policy, longer.source)
    assert not figure.exists()


def test_a_checkpoint_of_elsewhere_is_compared_and_needs_a_folder_of_its_own(build, tmp_path):
    build("trainer.num_steps=2", run="old").run()
    path = tmp_path / "old" / "checkpoints" / "step_000002"
    fork = build("trainer.num_steps=3", f"resume={path}", run="fork")
    fork.run()
    assert steps(fork.folder.path / "metrics.jsonl") == [3]
    with pytest.raises(
        ValueError,
        match=r"step_000002 was written by a run with other settings:\n  - seed = 1 there, 9 here",
    ):
        build("trainer.num_steps=3", f"resume={path}", "seed=9", run="fork2").run()
    with pytest.raises(ValueError, match="already holds a run; resume=auto continues it"):
        build("trainer.num_steps=4", f"resume={path}", run="fork").run()
    (path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"step_000002: no manifest.json"):
        build("trainer.num_steps=3", f"resume={path}", run="fork3").run()


def test_going_back_inside_a_folder_archives_later_checkpoints_and_rows(build, tmp_path):
    build("trainer.num_steps=4", "checkpoint.every_steps=1", "checkpoint.keep=4").run()
    root = tmp_path / "run" / "checkpoints"
    build("trainer.num_steps=3", f"resume={root / 'step_000002'}", "checkpoint.keep=4").run()
    assert sorted(path.name for path in root.iterdir()) == [
        "step_000001",
        "step_000002",
        "step_000003",
    ]
    aside = tmp_path / "run" / "checkpoints.overwritten"
    assert sorted(path.name for path in aside.iterdir()) == ["step_000003", "step_000004"]
    assert steps(tmp_path / "run" / "metrics.overwritten.jsonl") == [3, 4]


def test_a_flipped_checkpoint_is_passed_over_unless_verification_is_off(build, tmp_path, caplog):
    from megatron_rl.checkpoints import directory

    build("trainer.num_steps=2", "checkpoint.every_steps=1").run()
    root = tmp_path / "run" / "checkpoints"
    for path in list(root.iterdir()):
        info = directory.check(path)
        path.rename(path.with_name(path.name + ".tmp-partial"))
        (path.with_name(path.name + ".tmp-partial") / "manifest.json").unlink()
        directory.finish(path, info)
    file = root / "step_000002" / "state.pt"
    content = bytearray(file.read_bytes())
    content[100] ^= 255
    file.write_bytes(content)
    assert build("checkpoint.verify=false").folder.prepare().step == 2
    assert build().folder.prepare().step == 1
    assert "step_000002 is skipped: state.pt is not what was written" in caplog.text


@pytest.mark.parametrize(
    ("make", "why"), [("file", "it is no folder"), ("below_file", "Not a directory")]
)
def test_a_run_dir_that_cannot_be_is_refused(build, tmp_path, make, why):
    (tmp_path / "taken").write_text("a file")
    run = "taken" if make == "file" else "taken/run"
    with pytest.raises(ValueError, match=rf"run_dir = .*taken.*: cannot be written \(({why})"):
        build(run=run).folder.prepare()
    (tmp_path / "taken").unlink()


def test_what_a_dead_run_left_is_removed_at_the_start(build, tmp_path):
    build("trainer.num_steps=1").run()
    for left in (
        "checkpoints/step_000009.tmp-partial",
        "export.tmp-partial",
        "exports/step_000001.tmp-partial",
    ):
        (tmp_path / "run" / left).mkdir(parents=True)
    build("trainer.num_steps=2").run()
    assert not list((tmp_path / "run").rglob("*.tmp-partial"))


def test_a_run_without_its_rows_and_with_files_of_others_resumes(build, tmp_path, capsys):
    build("trainer.num_steps=2", "checkpoint.every_steps=1").run()
    run = tmp_path / "run"
    (run / "metrics.jsonl").unlink()
    (run / "checkpoints" / "notes.txt").write_text("x")
    (run / "checkpoints" / "step_best").mkdir()
    (run / "requeue").write_text("2\n")
    build("trainer.num_steps=3").run()
    assert f"resumed from {run}/checkpoints/step_000002" in capsys.readouterr().out
    assert steps(run / "metrics.jsonl") == [3]
