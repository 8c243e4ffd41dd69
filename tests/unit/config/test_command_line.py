"""What one types from knowing Hydra works, or is answered with the way here."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_rl import train
from megatron_rl.config.cli.command_line import answer, arguments, words_of_sweep
from megatron_rl.config.load import compose, known_keys, validate
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError
from megatron_rl.runtime.process import launched


def printed(capsys: pytest.CaptureFixture, *words: str) -> str:
    assert answer(arguments(words)) == 0
    return capsys.readouterr().out


def test_nothing_is_answered_where_a_run_is_to_be_started():
    assert answer(arguments(["seed=2"])) is None


@pytest.mark.parametrize("flag", ["--multirun", "-m"])
def test_multirun_starts_the_sweep(flag, capsys):
    words = ["method=grpo,dapo", 'data.answer_after="####"', "run_dir=refused"]
    with pytest.raises(SystemExit) as ended:
        train.main([flag, "--nproc", "2", "--out", "runs/mine", *words])
    said = capsys.readouterr()
    command = f"python -m megatron_rl.sweep --out runs/mine --nproc 2 {shlex.join(words)}\n"
    assert said.out == command, "which continues with it"
    assert said.err.startswith("error: run_dir: each run of a sweep has a folder of its own")
    assert ended.value.code == 1, "the sweep's"


def test_a_multirun_has_a_folder_of_its_own():
    words = words_of_sweep(arguments(["-m", "--nproc", "1", "seed=1,2"]))
    assert re.fullmatch(r"runs/multirun/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", words[1])


def test_a_multirun_that_cannot_be_started_says_what_to_type(monkeypatch):
    with pytest.raises(ValueError, match=r"type python .*train --nproc N --multirun seed=1,2$"):
        arguments(["seed=1,2", "-m"])
    with pytest.raises(ValueError, match="belong to --multirun"):
        arguments(["seed=1", "--out", "here"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ValueError, match=r"started without; .*--nproc 8 --multirun seed=1,2$"):
        arguments(["seed=1,2", "-m"], launched()[1])


def test_info_lists_groups_and_the_options_of_one(capsys):
    groups = printed(capsys, "--info")
    assert "method=a_grae | " in groups and "parallel=pp2 | " in groups
    one = printed(capsys, "--info", "method")
    assert "GRPO, group relative policy optimization" in one and "parallel" not in one
    assert printed(capsys, "--info", "method=dapo") == groups  # an override, not a group
    with pytest.raises(ValueError, match="--info metod: no such group; there are data, "):
        answer(arguments(["--info", "metod"]))


@pytest.mark.parametrize("words", [("--cfg", "job", "--resolve"), ("-c", "job")])
def test_the_configuration_is_shown_resolved(capsys, words):
    out = printed(capsys, *words, "run_dir=runs/${seed}", "seed=7")
    assert "run_dir: runs/7" in out


def test_the_first_rank_answers_for_all(capsys):
    assert answer(arguments(["--info"]), rank=1) == 0
    assert capsys.readouterr().out == ""


def test_without_torchrun_a_process_is_the_first(monkeypatch):
    for name in ("RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launched() == (0, None)


def test_another_root_is_composed(capsys, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("defaults:\n  - config\n  - _self_\nseed: 11\n")
    for name in ("mine", "mine.yaml"):
        out = printed(capsys, "--cfg", "job", "--config-dir", str(tmp_path), "--config-name", name)
        assert "seed: 11" in out and "num_steps" in out
    with pytest.raises(ConfigError, match=r"--config-name yours: no such file; .*config, mine"):
        compose("yours", [], tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config-name", "experiment/quickstart_cpu"], "GROUP=OPTION, e.g. experiment="),
        (["--cfg", "hydra"], "invalid choice: 'hydra'"),
        (["--completion", "fish"], "invalid choice: 'fish'"),
        (["--hydra-help"], "--help shows what there is"),
    ],
)
def test_other_words_of_hydra_are_answered(words, message):
    with pytest.raises(ValueError, match=message):
        arguments(words)


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra/launcher", "hydra.mode", "+hydra.mine"])
def test_settings_of_hydra_are_refused_not_ignored(key):
    with pytest.raises(ConfigError, match="problem in the overrides") as caught:
        compose("config", [f"{key}=x"])
    (problem,) = caught.value.problems
    assert problem.startswith(f"{key}=x: ")
    assert "run_dir=DIR" in problem and "conf/README.md" in problem
    with pytest.raises(ConfigError, match="unknown key"):
        validate(Config, compose("config", ["hydration.rate=1"]), "the configuration")


def completed(script: str, line: str) -> list[str]:
    """What bash offers after ``line``."""
    ask = f"COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; _megatron_rl 2>/dev/null\n"
    program = f'{script}\n{ask}printf "%s\\n" "${{COMPREPLY[@]}}"'
    words = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return words.stdout.split()


def test_bash_completes_groups_keys_and_options(capsys):
    script = printed(capsys, "--completion", "bash")
    start = "torchrun --nproc-per-node 2 -m megatron_rl.train"
    assert completed(script, f"{start} seed=1 method=a_grae_d") == [
        "a_grae_dapo",
        "a_grae_ddas",
        "a_grae_dr_grpo",
    ]
    assert completed(script, f"{start} trainer.num_s") == ["trainer.num_steps="]
    assert {"--config-name", "--config-dir"} <= set(completed(script, f"{start} --config-"))
    assert completed(script, "python other.py meth") == []
    assert all(f"{key}=" in script for key in known_keys(Config))
