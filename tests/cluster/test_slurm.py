"""The batch script on a real Slurm of two nodes (both on this machine): rendezvous across nodes,
USR1, requeue, going on."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.e2e import toy
from tests.launch import REPO, launch

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed (no {', '.join(MISSING)})"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the local Slurm runs as root"),
    pytest.mark.timeout(600),
]
CLUSTER = REPO / "tools/slurm/local_cluster.sh"


@pytest.fixture(scope="module")
def slurm_env():
    folder = (
        Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp")) / "c"
    )  # short: the path of a socket is limited
    done = subprocess.run(
        ["bash", str(CLUSTER), "up", str(folder), "2"], capture_output=True, text=True, timeout=90
    )
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        yield {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    finally:
        subprocess.run(["bash", str(CLUSTER), "down", str(folder)], timeout=90, check=True)
    folder.parent.rmdir()


def wait_until(text: str, file: Path, seconds: float, log: Path) -> None:
    end = time.monotonic() + seconds
    while not (file.exists() and text in file.read_text()):
        said = log.read_text() if log.exists() else "no output"
        assert time.monotonic() < end, (
            f"no '{text}' in {file.name} after {seconds} s:\n{said[-3000:]}"
        )
        time.sleep(0.5)


def submit(env: dict[str, str], folder: Path, overrides: Sequence[str]) -> str:
    """Submits the batch script from ``folder``, one process a node; returns the job's id. What it
    prints goes to ``job.out``."""
    # No --gpus-per-node: these nodes have none.
    text = (REPO / "examples/slurm/train.sbatch").read_text()
    script = folder / "train.sbatch"
    script.write_text(re.sub(r"^#SBATCH --gpus-per-node.*\n", "", text, flags=re.MULTILINE))
    command = ["sbatch", "--parsable", "--output", str(folder / "job.out")]
    # Else Slurm itself sends USR1 within a minute: 900 s before the limit.
    command += ["--time=10", "--signal=B:USR1@30"]
    command += [str(script), "--python", sys.executable, "--nproc", "1", *overrides]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def rank_of_job(job: str, rank: int) -> psutil.Process:
    """The training process of the job with this rank."""
    wanted = {"SLURM_JOB_ID": job, "RANK": str(rank)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if wanted.items() <= process.environ().items():
                return process
    raise AssertionError(f"job {job} has no process of rank {rank}")


def test_a_stopped_job_is_requeued_and_goes_on(slurm_env, tmp_path):
    # The folder of submission comes first on the path of `python -m`: its megatron_rl.train is the
    # stand-in.
    package = tmp_path / "megatron_rl"
    package.mkdir()
    (package / "__init__.py").write_text(f"__path__.append({str(REPO / 'megatron_rl')!r})\n")
    shutil.copy(REPO / "tests/cluster/stand_in_train.py", package / "train.py")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "requeue").write_text("7\n")  # left by an earlier start
    log = tmp_path / "job.out"
    job = submit(slurm_env, tmp_path, [f"run_dir={run_dir}"])

    notes = run_dir / "notes"
    wait_until("start at 0, world 2, restart 0", notes, 60, log)
    assert not (run_dir / "requeue").exists()
    time.sleep(3)
    # what Slurm sends to the script before the time limit (--signal=B:USR1@...)
    subprocess.run(
        ["scancel", "--batch", "--signal=USR1", job], env=slurm_env, check=True, timeout=30
    )
    wait_until("stopped at", notes, 60, log)
    assert "2 ranks were asked" in notes.read_text(), "the signal reached only some ranks"
    stopped_at = int(re.search(r"stopped at (\d+)", notes.read_text()).group(1))
    wait_until("back into the queue", log, 60, log)
    # Slurm holds a requeued job for about two minutes
    wait_until(f"start at {stopped_at}, world 2, restart 1", notes, 300, log)
    wait_until("finished at 40", notes, 90, log)


def test_the_job_of_a_killed_rank_goes_on_alone_and_repeats_nothing(slurm_env, tmp_path):
    """``megatron_rl.train`` itself, data parallel over two nodes: the metrics are those of a run
    that nothing happened to, each step once."""
    run_dir = tmp_path / "run"
    log = tmp_path / "job.out"
    toy.write_model(tmp_path / "model")
    toy.write_data(tmp_path / "data.jsonl")
    more = [
        "parallel=single",
        "rollout.tensor=1",
        "trainer.num_steps=40",
        "checkpoint.every_steps=2",
    ]
    env = {**slurm_env, "PYTHONPATH": str(REPO)}

    job = submit(env, tmp_path, toy.overrides(tmp_path, run_dir, *more))
    wait_until("", run_dir / "checkpoints/step_000004/manifest.json", 120, log)
    rank_of_job(job, 1).kill()
    wait_until("start 2 of 3 from step_0000", log, 60, log)
    wait_until("resumed from", log, 300, log)
    wait_until("finished: run_dir", log, 120, log)

    whole = tmp_path / "whole"
    launch("megatron_rl.train", 2, toy.overrides(tmp_path, whole, *more), 240)
    assert metrics(run_dir) == metrics(whole)
    assert [row["step"] for row in metrics(run_dir)] == list(range(41))


def metrics(run_dir: Path) -> list[dict[str, object]]:
    """Of all steps, but times and memory."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    own = ("time/", "throughput/", "memory/")
    return [{key: row[key] for key in row if not key.startswith(own)} for row in rows]
