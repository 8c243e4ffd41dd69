"""An array of a sweep on a real Slurm of two nodes (both on this machine): each task runs its own
trial, at most as many at a time as asked for, and a task that is requeued takes no other along."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.config.cli.command_line import Root
from megatron_rl.sweeping.commands import Slurm, write_trials
from megatron_rl.sweeping.trials import make_trials
from tests.cluster.test_slurm import MISSING, slurm_env, wait_until
from tests.launch import REPO

assert slurm_env  # a fixture
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed (no {', '.join(MISSING)})"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the local Slurm runs as root"),
    pytest.mark.timeout(600),
]


def test_each_task_runs_its_cell_and_is_requeued_alone(slurm_env, tmp_path):
    """The training program is the stand-in of the other tests, which takes 20 s."""
    package = tmp_path / "megatron_rl"
    package.mkdir()
    (package / "__init__.py").write_text(f"__path__.append({str(REPO / 'megatron_rl')!r})\n")
    shutil.copy(REPO / "tests/cluster/stand_in_train.py", package / "train.py")
    out = tmp_path / "runs"
    needed = ["model.path=m", "data.train=t", "data.eval=e", "resume=auto"]
    trials = make_trials([*needed, "seed=1,2"], out, Root())
    file = out / "trials.1.txt"
    write_trials(file, trials)
    for trial in trials:
        trial.folder.mkdir()
    # One node a task, so that both run at a time; longer than the 15 minutes before whose end Slurm
    # sends USR1. The nodes of this Slurm have no GPUs.
    options = ["--nodes=1", "--time=60", f"--output={tmp_path}/%a.out", "--parsable"]
    command = Slurm(out, 1, options).command(trials, file)
    script = next(word for word in command if word.endswith("train.sbatch"))
    text = re.sub(r"^#SBATCH --gpus-per-node.*\n", "", Path(script).read_text(), flags=re.MULTILINE)
    (tmp_path / "train.sbatch").write_text(text)
    place = command.index(script)
    command[place : place + 1] = [str(tmp_path / "train.sbatch"), "--python", sys.executable]
    done = subprocess.run(
        command, env=slurm_env, cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()

    notes = [trial.folder / "notes" for trial in trials]
    logs = [tmp_path / f"{task}.out" for task in range(2)]
    for note, log in zip(notes, logs, strict=True):
        wait_until("start at 0, world 1, restart 0", note, 120, log)
    queue = subprocess.run(
        ["squeue", "--me", "--noheader", "--format=%k"],
        env=slurm_env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert queue.stdout.splitlines() == 2 * [f"megatron_rl.sweep {out}"]
    stop = ["scancel", "--batch", "--signal=USR1", f"{job}_0"]
    subprocess.run(stop, env=slurm_env, check=True, timeout=30)
    wait_until("stopped at", notes[0], 60, logs[0])
    wait_until("back into the queue", logs[0], 60, logs[0])
    wait_until("finished at 40", notes[1], 120, logs[1])
    assert "restart 1" not in notes[1].read_text(), "the other task was requeued with it"
    wait_until("world 1, restart 1", notes[0], 300, logs[0])
    assert f"task 0 of {file} is {trials[0].folder}" in logs[0].read_text()
    wait_until("finished at 40", notes[0], 90, logs[0])
    time.sleep(1)
    assert "start" not in notes[1].read_text().split("finished at 40")[1]
