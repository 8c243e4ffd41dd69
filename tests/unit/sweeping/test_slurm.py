"""What a sweep gives to Slurm, with stand-ins for Slurm's programs. On a real one:
tests/cluster/test_slurm_array.py."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_rl.config.cli.command_line import Root
from megatron_rl.sweep import main
from megatron_rl.sweeping.commands import Slurm, local, write_trials
from megatron_rl.sweeping.trials import make_trials
from tests.launch import REPO, end
from tests.unit.sweeping.test_running import held

NEEDED = ["model.path=m", "data.train=t", "data.eval=e"]


def test_a_local_run_is_one_torchrun(tmp_path):
    (trial,) = make_trials(["seed=2", *NEEDED], tmp_path, Root())
    assert local(trial, 4, ["--plugin", "a.py"])[1:] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
        "-m",
        "megatron_rl.train",
        "--plugin",
        "a.py",
        "seed=2",
        *NEEDED,
        f"run_dir={tmp_path}/run",
    ]


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """A folder of programs before all others. What sbatch is given is in ``asked``, one word a
    line; ``queue`` is what squeue prints."""
    folder = tmp_path / "programs"
    folder.mkdir()
    programs = {
        "sbatch": f'printf "%s\\n" "$@" >>{folder}/asked; echo "Submitted batch job 7"',
        "squeue": f"cat {folder}/queue 2>/dev/null || true",
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def asked(slurm: Path) -> list[str]:
    file = slurm / "asked"
    return file.read_text().splitlines() if file.exists() else []


def submit(out: Path, *words: str) -> int:
    return main(["--out", str(out), "--nproc", "8", "--sbatch=--nodes=2 -A mine", *words])


def test_several_runs_are_one_array_that_reads_their_overrides(tmp_path, slurm):
    out = tmp_path / "it's a=b, $x"
    suffix = "data.prompt_suffix=' think; then \"$(x)\"'"
    assert submit(out, "--parallel", "2", *NEEDED, suffix, "seed=1,2,3") == 0
    words = asked(slurm)
    script = words.index(str(REPO / "examples/slurm/train.sbatch"))
    assert words[:script] == [
        f"--comment=megatron_rl.sweep {out}",
        "--array=0-2%2",
        "--nodes=2",
        "-A",
        "mine",
    ]
    trials = out / "trials.1.txt"
    assert words[script + 1 :] == ["--nproc", "8", "--trials", str(trials)]
    started = []
    for task in range(3):
        done = batch_script(task, *words[script + 1 :])
        words_of_task = shlex.split(done.stdout)
        first = words_of_task.index("logging.rank_files=true") + 1
        started.append(words_of_task[first:])
    wanted = make_trials([*NEEDED, suffix, "seed=1,2,3"], out, Root())
    assert started == [[*trial.overrides, "resume=auto"] for trial in wanted]


def batch_script(task: int, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(task)}
    command = ["bash", str(REPO / "examples/slurm/train.sbatch"), "--dry-run", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True)


def test_a_single_run_is_a_plain_job(tmp_path, slurm):
    assert submit(tmp_path / "out", *NEEDED, "seed=4") == 0
    words = asked(slurm)
    assert words[-2:] == ["seed=4", f"run_dir={tmp_path}/out/run"]
    assert not any(word.startswith("--array") for word in words)
    assert not list((tmp_path / "out").glob("trials*"))


def test_equal_runs_and_those_that_are_alive_are_not_submitted(tmp_path, slurm, capsys):
    out = tmp_path / "out"
    other = held(out / "optim.clip_grad-2")
    try:
        assert submit(out, *NEEDED, "optim.clip_grad=1,1.0,2,3,4") == 0
    finally:
        end(other)
    lines = (out / "trials.1.txt").read_text().splitlines()
    assert [line.split()[-1].rpartition("-")[2] for line in lines] == ["1", "3", "4"]
    assert "--array=0-2" in asked(slurm)
    said = capsys.readouterr().out
    assert "optim.clip_grad-1.0: the same run as optim.clip_grad-1" in said
    assert "optim.clip_grad-2: is running elsewhere" in said


def test_a_sweep_that_is_in_the_queue_is_not_submitted_again(tmp_path, slurm, capsys):
    out = tmp_path / "out"
    (slurm / "queue").write_text(f"7_[1-2] megatron_rl.sweep {out}\n8 \n9 megatron_rl.sweep /x\n")
    assert submit(out, *NEEDED, "seed=1,2") == 1
    assert "jobs of this sweep are in the queue (7_[1-2])" in capsys.readouterr().err
    assert not asked(slurm)


def test_an_array_keeps_its_file_when_the_next_is_submitted(tmp_path, slurm):
    """Its tasks read their lines when they start, which may be days later."""
    out = tmp_path / "out"
    assert submit(out, *NEEDED, "seed=1,2") == 0
    before = (out / "trials.1.txt").read_text()
    assert submit(out, *NEEDED, "seed=3,4,5") == 0
    assert (out / "trials.1.txt").read_text() == before
    assert len((out / "trials.2.txt").read_text().splitlines()) == 3


def test_what_sbatch_refuses_is_said(tmp_path, slurm, capsys):
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2\nexit 1\n")
    assert submit(tmp_path / "out", *NEEDED, "seed=1,2") == 1
    assert "sbatch ended with exit code 1; nothing was submitted" in capsys.readouterr().err


def test_an_override_over_several_lines_is_refused(tmp_path):
    trials = make_trials([*NEEDED, "data.prompt_suffix='a\nb'", "seed=1,2"], tmp_path, Root())
    with pytest.raises(ValueError, match="an override of seed-1 has a line break"):
        write_trials(tmp_path / "trials.txt", trials)


def test_options_of_the_training_program_are_those_of_the_script(tmp_path):
    """It refuses one that it does not know."""
    trials = make_trials([*NEEDED, "seed=1,2"], tmp_path, Root())
    options = ["--plugin", "a.py", "--config-dir", "/groups", "--config-name", "mine"]
    file = tmp_path / "trials.txt"
    write_trials(file, trials)
    words = Slurm(tmp_path, 8, [], None, options).command(trials, file)
    assert "--array=0-1" in words
    printed = shlex.split(batch_script(1, *words[words.index("--nproc") :]).stdout)
    start = printed.index("megatron_rl.train")
    assert printed[start + 1 : start + 7] == options


def test_a_dry_run_prints_the_array_and_its_lines(tmp_path, capsys):
    assert submit(tmp_path / "out", "--dry-run", *NEEDED, "seed=1,2") == 0
    command, *lines = capsys.readouterr().out.splitlines()
    assert "--array=0-1" in shlex.split(command)
    assert lines[0] == f"# {tmp_path}/out/trials.1.txt:"
    assert lines[2].startswith("# 1: ") and "seed=2" in lines[2]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--array=0-3", "--comment=mine", "-a 0-3"])
def test_options_that_the_sweep_sets_itself_are_refused(tmp_path, capsys, option):
    words = ["--out", str(tmp_path / "out"), "--nproc", "8", f"--sbatch={option} -A mine", *NEEDED]
    assert main(words) == 1
    assert f"{option.split()[0]} is set by the sweep itself" in capsys.readouterr().err
