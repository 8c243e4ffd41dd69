"""Ablations: which runs a sweep makes, under which names, what it leaves out, and its table."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_rl.config.cli.command_line import Root
from megatron_rl.config.load import compose, conf_dir, validate
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError
from megatron_rl.run.run_record import describe
from megatron_rl.sweep import main
from megatron_rl.sweeping import commands
from megatron_rl.sweeping.trials import check, combinations, is_finished, make_trials, run_names

NEEDED = ["model.path=m", "data.train=t", "data.eval=e"]


def folders(out, runs):
    return [out / name for name in run_names(runs)]


def test_every_combination_is_checked_before_the_first_runs(tmp_path):
    runs = combinations(["method=grpo,dapo", "method.kl.coeff=1", *NEEDED])
    with pytest.raises(ConfigError) as caught:
        check(runs, folders(tmp_path, runs), Root())
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "method-grpo",
        "method-dapo",
    ]


def test_the_folder_arrives_whatever_its_name(tmp_path):
    out = tmp_path / "it's a=b, $x ${y} (z)"
    runs = combinations(["seed=1,2", *NEEDED])
    configs = check(runs, folders(out, runs), Root())
    assert [config.run_dir for config in configs] == [str(out / "seed-1"), str(out / "seed-2")]


def test_a_dry_run_prints_what_a_shell_reads_as_the_same_words(tmp_path, capsys):
    out = tmp_path / "it's a=b, $x"
    arguments = ["--nproc", "2", "seed=1,2", "data.prompt_suffix=' think, then'", *NEEDED]
    assert main(["--out", str(out), "--dry-run", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = [commands.local(trial, 2) for trial in make_trials(arguments[2:], out, Root())]
    assert [shlex.split(line) for line in lines] == wanted
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {lines[1]}"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == wanted[1]


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
        (
            ["--metric", "reward/men", "seed=1,2", *NEEDED],
            "reward/men: no such metric; did you mean",
        ),
        (["--parallel", "0", "seed=1,2", *NEEDED], "--parallel 0: give a number of runs"),
        (["--config-name", "a/b", "seed=1,2", *NEEDED], "--config-name a/b: name a file"),
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
