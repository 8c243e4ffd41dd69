"""The batch script on a real Slurm of two nodes (both on this machine): rendezvous across nodes,
USR1, requeue, going on."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.launch import REPO

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


def test_a_stopped_job_is_requeued_and_goes_on(slurm_env, tmp_path):
    # The folder of submission comes first on the path of `python -m`: its megatron_rl.train is the
    # stand-in.
    package = tmp_path / "megatron_rl"
    (package / "runtime").mkdir(parents=True)
    for folder in (package, package / "runtime"):
        (folder / "__init__.py").touch()  # else one on PYTHONPATH that is a package would go first
    shutil.copy(REPO / "tests/cluster/stand_in_train.py", package / "train.py")
    shutil.copy(REPO / "megatron_rl/runtime/signals.py", package / "runtime/signals.py")
    run_dir, log = tmp_path / "run", tmp_path / "job.out"
    run_dir.mkdir()
    (run_dir / "requeue").write_text("7\n")  # left by an earlier start
    # no --gpus-per-node here: these nodes have none
    script = tmp_path / "train.sbatch"
    script.write_text(
        re.sub(
            r"^#SBATCH --gpus-per-node.*\n",
            "",
            (REPO / "examples/slurm/train.sbatch").read_text(),
            flags=re.MULTILINE,
        )
    )
    submit = [
        "sbatch",
        "--parsable",
        "--time=10",
        "--output",
        str(log),
        str(script),
        "--python",
        sys.executable,
        "--nproc",
        "1",
    ]
    done = subprocess.run(
        [*submit, f"run_dir={run_dir}"],
        env=slurm_env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()

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
