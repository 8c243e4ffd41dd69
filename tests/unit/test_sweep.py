"""Ablations: which runs a sweep makes, under which names, what it leaves out, and its table."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl import sweep
from megatron_rl.config.load import compose, conf_dir, validate
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError
from megatron_rl.sweep import (
    check,
    combinations,
    command,
    is_finished,
    main,
    run_names,
    run_one,
    summary,
)
from megatron_rl.trainer.run_record import describe
from tests.launch import REPO

NEEDED = ["model.path=m", "data.train=t", "data.eval=e"]


def folders(out, runs):
    return [out / name for name in run_names(runs)]


def test_the_product_of_all_choices_in_the_order_given():
    runs = combinations(["experiment=x", "method=grpo,dapo", "seed=1,2"])
    assert runs == [
        ["experiment=x", f"method={method}", f"seed={seed}"]
        for method in ("grpo", "dapo")
        for seed in (1, 2)
    ]


def test_lists_are_values_and_not_choices():
    assert combinations(["evaluation.pass_at=[1,4]"]) == [["evaluation.pass_at=[1,4]"]]


def test_choices_keep_the_quotes_they_need():
    runs = combinations(["data.prompt_suffix='a, b','c=d'"])
    assert [compose("config", run)["data"]["prompt_suffix"] for run in runs] == ["a, b", "c=d"]


def test_names_hold_what_differs_and_nothing_that_needs_quotes():
    assert run_names([["a=1", "seed=1"], ["a=1", "seed=2"]]) == ["seed-1", "seed-2"]
    assert run_names(combinations(["method=grpo,dapo", "seed=1"])) == ["method-grpo", "method-dapo"]
    assert run_names([["x=1"]]) == ["run"]
    hostile = run_names([["p=a b"], ["p=a,b"], ["p=/a/b"], ["p=" + 300 * "x"], ["p=\u00fc"]])
    assert len(set(hostile)) == 5
    assert all(len(name) < 140 and name == shlex.quote(name) and name.isascii() for name in hostile)
    with pytest.raises(ValueError, match="seed-1 is listed twice"):
        run_names([["seed=1", "a=0"], ["seed=1", "a=0"], ["seed=2", "a=0"]])


def test_every_combination_is_checked_before_the_first_runs(tmp_path):
    runs = combinations(["method=grpo,dapo", "method.kl.coeff=1", *NEEDED])
    with pytest.raises(ConfigError) as caught:
        check(runs, folders(tmp_path, runs))
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "method-grpo",
        "method-dapo",
    ]


def test_the_folder_arrives_whatever_its_name(tmp_path):
    out = tmp_path / "it's a=b, $x ${y} (z)"
    runs = combinations(["seed=1,2", *NEEDED])
    configs = check(runs, folders(out, runs))
    assert [config.run_dir for config in configs] == [str(out / "seed-1"), str(out / "seed-2")]


def test_the_command_of_a_local_and_of_a_slurm_run(tmp_path):
    assert command(["seed=2"], tmp_path / "r", 4, None)[1:] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
        "-m",
        "megatron_rl.train",
        "seed=2",
        f"run_dir={tmp_path}/r",
    ]
    words = command(["seed=2"], tmp_path / "a=b", 8, ["--nodes=2"])
    assert words[:2] == ["sbatch", "--nodes=2"]
    assert words[2].endswith("examples/slurm/train.sbatch")
    assert words[3:] == ["--nproc", "8", "seed=2", f"run_dir='{tmp_path}/a=b'"]


def test_a_dry_run_prints_what_a_shell_reads_as_the_same_words(tmp_path, capsys):
    out = tmp_path / "it's a=b, $x"
    arguments = ["--nproc", "2", "seed=1,2", "data.prompt_suffix=' think, then'", *NEEDED]
    assert main(["--out", str(out), "--dry-run", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    runs = combinations(arguments[2:])
    wanted = [command(run, folder, 2, None) for run, folder in zip(runs, folders(out, runs))]
    assert [shlex.split(line) for line in lines] == wanted
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {lines[1]}"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == wanted[1]


def test_the_table_averages_over_seeds(tmp_path):
    runs = combinations(["method=grpo,dapo", "seed=1,2"])
    places = folders(tmp_path, runs)
    for folder, score in zip(places, (0.2, 0.4, 0.9)):
        folder.mkdir()
        lines = [{"step": 0, "eval/accuracy": 0.0}, {"step": 1, "eval/accuracy": score}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [line.split() for line in summary(runs, places).splitlines()[2:]]
    assert rows == [
        ["method=grpo", "2", "0.300", "+-", "0.100"],
        ["method=dapo", "1", "0.900", "+-", "0.000"],
    ]


def finished_run(config):
    """The files that a run of two steps leaves, in the order in which they are written."""
    folder = Path(config.run_dir)
    (folder / "export").mkdir(parents=True)
    (folder / "checkpoints" / "step_000002").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(describe(config, 2, "data")))
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.1}\n{"step": 2, "reward/mean": 0.2}\n'
    )
    (folder / "checkpoints" / "step_000002" / "manifest.json").write_text(
        '{"info": {}, "files": {}}'
    )
    (folder / "export" / "config.json").touch()
    (folder / "curves.png").touch()


def test_a_failed_run_is_named_and_the_others_run_all_the_same(tmp_path, monkeypatch, capsys):
    """Stand-ins for the runs: each leaves a file, that of seed 2 fails."""

    def stand_in(run: object, folder: Path, *_: object) -> list[str]:
        leaves = f"open({str(tmp_path / folder.name)!r}, 'w')"
        return [sys.executable, "-c", f"{leaves}; exit({int(folder.name == 'seed-2')})"]

    monkeypatch.setattr(sweep, "command", stand_in)
    out = tmp_path / "runs"
    assert main(["--out", str(out), "--nproc", "2", *NEEDED, "seed=1,2,3"]) == 1
    left = sorted(file.name for file in tmp_path.iterdir() if file.is_file())
    assert left == ["seed-1", "seed-2", "seed-3"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"error: 1 of 3 runs failed: {out / 'seed-2'}"


def test_only_what_is_finished_under_the_same_settings_is_left_out(tmp_path):
    values = compose("config", [*NEEDED, "trainer.num_steps=2", "method=dapo"])
    config = validate(Config, values, "the test")
    other = validate(Config, {**values, "seed": 7}, "the test")
    longer = validate(
        Config, {**values, "trainer": {**values["trainer"], "num_steps": 3}}, "the test"
    )
    at = {"run_dir": str(tmp_path / "a")}
    config, other, longer = (each.model_copy(update=at) for each in (config, other, longer))
    assert not is_finished(config)
    finished_run(config)
    assert is_finished(config)
    assert not is_finished(other)
    assert not is_finished(longer)
    for name, damage in {
        "stopped": lambda folder: (folder / "requeue").touch(),
        "no figure": lambda folder: (folder / "curves.png").unlink(),
        "no export": lambda folder: (folder / "export" / "config.json").unlink(),
        "killed": (
            lambda folder: (folder / "checkpoints" / "step_000002").rename(
                folder / "checkpoints" / "step_000001"
            )
        ),
        "damaged": lambda folder: (folder / "config.json").write_text("{"),
    }.items():
        here = config.model_copy(update={"run_dir": str(tmp_path / name)})
        finished_run(here)
        assert is_finished(here)
        damage(tmp_path / name)
        assert not is_finished(here), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method=gpro,dapo", *NEEDED], "method=gpro: no such option; did you mean"),
        (
            ["seed=1,2", "run_dir=x", *NEEDED],
            "run_dir: each run of a sweep has a folder of its own",
        ),
        (["seed=1,2,1", *NEEDED], "seed-1 is listed twice"),
        (["seed=1,x", *NEEDED], "seed = 'x'"),
        (["run.name=a=b", *NEEDED], "run.name=a=b: the value has characters that need quotes"),
    ],
)
def test_a_wrong_sweep_is_one_message(capsys, tmp_path, arguments, message):
    assert main(["--out", str(tmp_path), "--nproc", "2", *arguments]) == 1
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert message in said
    assert main(["--out", str(tmp_path), "--nproc", "0", *arguments]) == 1


def test_a_program_that_is_not_there_is_named():
    assert run_one([sys.executable, "-c", "raise SystemExit(3)"]) == 3
    with pytest.raises(ValueError, match="no-such-sbatch: no such program on this machine"):
        run_one(["no-such-sbatch"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_sweep_ends_its_run(tmp_path, number):
    """The run must be gone, by a SIGTERM that it could act on, when the sweep is."""
    marks = [tmp_path / name for name in ("started", "ended")]
    child = (
        "import pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_:"
        f" (pathlib.Path({str(marks[1])!r}).touch(),"
        f" sys.exit(1)))\npathlib.Path({str(marks[0])!r}).touch()\ntime.sleep(60)"
    )
    source = (
        "import sys\nfrom megatron_rl.sweep import Stopped, run_one\ntry: run_one([sys.executable,"
        f" '-c', {child!r}])\n"
    )
    source += "except Stopped as stopped: print(stopped)"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    sweep = subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=environment
    )
    for _ in range(600):
        if marks[0].exists():
            break
        time.sleep(0.05)
    sweep.send_signal(number)
    assert sweep.communicate(timeout=30)[0] == f"{signal.Signals(number).name}\n"
    assert marks[1].exists()


@pytest.mark.usefixtures("fresh_registries")
def test_plug_ins_are_loaded_for_the_check_and_handed_to_every_run(capsys, tmp_path):
    plugin = "examples/plugins/clipped_advantage.py"
    overrides = ["method=clipped_grpo", "seed=1,2", "model.path=m", "data.train=t", "data.eval=e"]
    options = ["--out", str(tmp_path), "--nproc", "2", "--plugin", plugin, "--dry-run"]
    assert main([*options, *overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    absolute = Path(plugin).resolve()
    assert len(lines) == 2
    assert all(
        f"-m megatron_rl.train --plugin {absolute} method=clipped_grpo" in line for line in lines
    )
    words = command(["seed=2"], tmp_path / "r", 8, [], ["--plugin", "mine.py"])
    assert words[2:] == ["--nproc", "8", "--plugin", "mine.py", "seed=2", f"run_dir={tmp_path}/r"]
    assert main([*options[:-2], "no_such_module", *overrides]) == 1
    assert "--plugin = no_such_module: cannot be imported" in capsys.readouterr().err


def test_a_folder_of_groups_is_searched_and_handed_to_every_run(capsys, tmp_path):
    (tmp_path / "mine" / "method").mkdir(parents=True)
    text = (conf_dir() / "method" / "grpo.yaml").read_text(encoding="utf-8")
    file = tmp_path / "mine" / "method" / "my_grpo.yaml"
    file.write_text(text.replace("name: grpo", "name: my_grpo"), encoding="utf-8")
    overrides = ["method=my_grpo,grpo", "model.path=m", "data.train=t", "data.eval=e"]
    options = ["--out", str(tmp_path), "--nproc", "2", "--dry-run"]
    assert main([*options, "--config-dir", str(tmp_path / "mine"), *overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(f"megatron_rl.train --config-dir {tmp_path / 'mine'} " in line for line in lines)
    assert main([*options, *overrides]) == 1
    assert "method=my_grpo: no such option" in capsys.readouterr().err
