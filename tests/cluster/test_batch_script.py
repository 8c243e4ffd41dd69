"""The batch script, without a cluster: the command it would run, its complaints, and shellcheck on
every shell script."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import REPO

SCRIPT = REPO / "examples/slurm/train.sbatch"
SHELL_SCRIPTS = sorted(
    path
    for pattern in ("**/*.sh", "**/*.sbatch")
    for tree in ("tools", "examples", "tests")
    for path in (REPO / tree).glob(pattern)
)


def sbatch_script(
    *args: str, slurm: dict[str, str] | None = None, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env.update(slurm or {})
    if path:
        env["PATH"] = f"{path}:{env['PATH']}"
    return subprocess.run(
        ["bash", str(SCRIPT), *args], capture_output=True, text=True, timeout=60, env=env, cwd=REPO
    )


def dry_run(*args: str, **kwargs) -> list[str]:
    done = sbatch_script("--dry-run", *args, **kwargs)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def test_the_command_of_a_job_on_four_nodes(tmp_path):
    """Every part that matters: nodes, processes, a rendezvous on the first node under a name new at
    each restart, USR1 ignored."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\nif [ "$2" = hostnames ]; then printf "gpu07\\ngpu08\\ngpu09\\ngpu10\\n"; else\n'
        '[ "$3" = gpu07 ] && echo "   NodeAddr=10.1.0.7 NodeHostName=gpu07 Version=22.05"; fi\n'
    )
    scontrol.chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_NODELIST": "gpu[07-10]",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_SUBMIT_DIR": "/project",
    }
    words = dry_run("run_dir=/shared/a", "method=dapo", slurm=slurm, path=tmp_path)
    assert words == [
        "srun",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "bash",
        "-c",
        'trap "" USR1; ulimit -S -n "$(ulimit -H -n)"; exec "$@"',
        "torchrun",
        "/project/.venv/bin/python",
        "-m",
        "torch.distributed.run",
        "--nnodes=4",
        "--nproc-per-node=8",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.1.0.7:23456",
        "--rdzv-id=123456-2",
        "-m",
        "megatron_rl.train",
        "logging.rank_files=true",
        "run_dir=/shared/a",
        "method=dapo",
        "resume=auto",
    ]


def test_plug_ins_are_handed_on_before_the_overrides():
    words = dry_run("--nproc", "8", "--plugin", "a.py", "--plugin", "b.c", "run_dir=/a/r")
    start = words.index("megatron_rl.train")
    assert words[start:] == [
        "megatron_rl.train",
        "--plugin",
        "a.py",
        "--plugin",
        "b.c",
        "logging.rank_files=true",
        "run_dir=/a/r",
        "resume=auto",
    ]


def test_the_container_gets_its_flags_and_its_own_python():
    words = dry_run(
        "--nproc",
        "8",
        "--container",
        "registry:5000#team/megatron_rl:1",
        "--mounts",
        "/a:/a,/b:/b",
        "run_dir=/a/r",
    )
    assert "--container-image=registry:5000#team/megatron_rl:1" in words
    assert "--container-mounts=/a:/a,/b:/b" in words
    assert words[words.index("torchrun") + 1] == "python3"


def test_an_explicit_resume_is_kept():
    for given in ("resume=never", "resume.checkpoint=never"):
        words = dry_run("--nproc", "1", "run_dir=/r", given)
        assert [word for word in words if word.startswith("resume")] == [given]


@pytest.mark.parametrize("spelling", ["{}", "'{}'", '"{}"', "+{}", "++'{}'"])
def test_the_folder_is_found_behind_the_quotes_of_hydra(tmp_path, spelling):
    """A marker of an earlier start is taken away before the step starts, which needs the folder
    itself."""
    folder = tmp_path / "a b,seed=1"
    folder.mkdir()
    for program in ("srun", "scancel", "scontrol"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    (folder / "requeue").write_text("7\n")
    plus = spelling[: spelling.count("+")]
    override = f"{plus}run_dir={spelling.lstrip('+').format(folder)}"
    slurm = {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = sbatch_script("--nproc", "2", override, slurm=slurm, path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (folder / "requeue").exists()


@pytest.fixture
def failing(tmp_path) -> Path:
    """Programs of a Slurm of three nodes, on which every step fails at node2; what scontrol is
    asked for is in ``asked``. ``run`` is the folder of the run."""
    programs = {
        "srun": 'echo "srun $*" >>"$ASKED"; echo "srun: error: node2: task 1: Exited with exit code'
        ' 1" >&2; exit 1',
        "scancel": "",
        "scontrol": 'case "$2" in hostnames) printf "node1\\nnode2\\nnode3\\n" ;;'
        ' node) echo "   NodeAddr=addr-$3 X=1" ;; *) echo "$*" >>"$ASKED" ;; esac',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nASKED={tmp_path}/asked\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "run").mkdir()
    return tmp_path


SLURM = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "node[1-3]"}


def start_of(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    slurm = {**SLURM, "SLURM_SUBMIT_DIR": str(folder)}
    words = ["--nproc", "2", *options, f"run_dir={folder / 'run'}"]
    return sbatch_script(*words, slurm=slurm, path=folder)


def requeues(folder: Path) -> int:
    return (folder / "asked").read_text().count("requeue 5")


def test_a_failed_job_goes_back_into_the_queue_within_its_budget(failing):
    for number, said in ((1, "start 2 of 3"), (2, "start 3 of 3"), (2, "not started again")):
        done = start_of(failing)
        assert done.returncode == 1
        assert said in done.stdout, done.stdout + done.stderr
        assert requeues(failing) == number


@pytest.mark.full
def test_a_new_checkpoint_gives_the_whole_budget_again(failing):
    for step in range(1, 7):
        (failing / f"run/checkpoints/step_{step:06}").mkdir(parents=True)
        start_of(failing)
        start_of(failing)
    assert requeues(failing) == 12
    start_of(failing)
    assert requeues(failing) == 12
    assert (failing / "run/failed_starts").read_text() == "3 step_000006\n"


def test_the_newest_checkpoint_is_found_by_number(failing):
    """Names have six digits, and more from a million steps on."""
    (failing / "run/failed_starts").write_text("2 step_999999\n")
    (failing / "run/failed_nodes").write_text("node2\nnode3\n")
    for step in (999_999, 1_000_000):
        (failing / f"run/checkpoints/step_{step:06}").mkdir(parents=True)
    assert "start 2 of 3 from step_1000000" in start_of(failing).stdout
    assert (failing / "run/failed_nodes").read_text() == "node2\n"  # there is none to spare


def test_a_job_that_fails_before_it_has_a_folder_stays_down(failing):
    """A wrong key is wrong at the second start, too."""
    (failing / "run").rmdir()
    assert "not started again" in start_of(failing).stdout
    assert requeues(failing) == 0


def test_a_spare_node_takes_the_place_of_the_one_that_failed(failing):
    start_of(failing, "--spare", "1")
    start_of(failing, "--spare", "1")
    first, second = (
        line for line in (failing / "asked").read_text().splitlines() if line.startswith("srun")
    )
    assert "--nodes=2" in first and "--nodelist=node1,node2 " in first
    assert "--nodelist=node1,node3 " in second and "--rdzv-endpoint=addr-node1" in second


@pytest.mark.parametrize(
    ("host", "blamed"),
    [
        ("node3", "node3"),
        ("node3.cluster.example", "node3"),
        ("", None),  # a stall: no machine is known to be at fault
        ("elsewhere", "node2"),  # no node by that name
    ],
)
def test_the_node_that_the_ranks_name_is_to_blame(failing, host, blamed):
    """Not the one that srun names first, node2: of a machine that fell silent others know first."""
    srun = (failing / "srun").read_text()
    says = f"echo '{host}' >{failing}/run/failed_host"
    (failing / "srun").write_text(srun.replace("; exit 1", f"; {says}; exit 1"))
    start_of(failing)
    noted = failing / "run/failed_nodes"
    assert (noted.read_text() if noted.exists() else None) == (f"{blamed}\n" if blamed else None)
    assert not (failing / "run/failed_host").exists()


def test_the_node_of_an_earlier_start_is_not_to_blame(failing):
    (failing / "run/failed_host").write_text("node3\n")
    start_of(failing)
    assert (failing / "run/failed_nodes").read_text() == "node2\n"


def test_of_more_failed_nodes_than_are_spare_the_last_one_stays_out(failing):
    """In the order in which they failed, not in that of the allocation."""
    (failing / "run/failed_nodes").write_text("node3\nnode1\nnode3\nnode1\n")
    start_of(failing, "--spare", "1")
    start_of(failing, "--spare", "1")
    first, second = (
        line for line in (failing / "asked").read_text().splitlines() if line.startswith("srun")
    )
    assert "--nodelist=node2,node3 " in first
    # node2 has failed now, after node1.
    assert "--nodelist=node3,node1 " in second


def test_a_new_checkpoint_forgets_the_nodes_that_failed_long_ago(failing):
    """But for as many as are spare: those need not work."""
    (failing / "run/failed_starts").write_text("1 step_000001\n")
    (failing / "run/checkpoints/step_000002").mkdir(parents=True)
    (failing / "run/failed_nodes").write_text("node1\nnode4\nnode3\n")
    start_of(failing, "--spare", "1")
    assert (failing / "run/failed_nodes").read_text() == "node3\nnode2\n"


def test_a_job_that_succeeds_forgets_its_failures(failing):
    start_of(failing)
    (failing / "srun").write_text("#!/bin/sh\nexit 0\n")
    assert start_of(failing).returncode == 0
    assert requeues(failing) == 1
    assert not list((failing / "run").glob("failed_*"))


def test_a_task_of_an_array_asks_about_itself_alone(failing):
    """The id of one of its jobs is that of the whole array, which it must not requeue."""
    (failing / "trials").write_text(f"run_dir={failing}/other\nrun_dir={failing}/run seed=2\n")
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}
    slurm = {**SLURM, **array, "SLURM_SUBMIT_DIR": str(failing)}
    words = ["--nproc", "2", "--trials", str(failing / "trials")]
    done = sbatch_script(*words, slurm=slurm, path=failing)
    assert f"task 1 of {failing}/trials is {failing}/run" in done.stdout
    assert (failing / "asked").read_text().splitlines()[-1] == "requeue 5_1"
    array["SLURM_ARRAY_TASK_ID"] = "2"
    done = sbatch_script(*words, slurm={**slurm, **array}, path=failing)
    assert done.returncode == 2 and "has no line for task 2 (from 0)" in done.stderr


def test_torchrun_accepts_the_options(tmp_path):
    """The printed command, its program replaced by one that prints its rank, really starts."""
    words = dry_run("--python", sys.executable, "--nproc", "2", "run_dir=/r")
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os\nos.write(1, f\"rank {os.environ['RANK']} of"
        " {os.environ['WORLD_SIZE']}\\n\".encode())\n"
    )
    command = words[words.index("bash") : words.index("megatron_rl.train") - 1]
    done = subprocess.run([*command, str(worker)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line) == [
        "rank 0 of 2",
        "rank 1 of 2",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dry-run", "--nproc", "8", "seed=1"], "run_dir=DIR is missing"),
        (["--dry-run", "run_dir=/r"], "give --nproc N"),
        (["--dry-run", "--nproc", "8", "run_dir=/r\\x"], "this script cannot follow backslashes"),
        (["--dry-run", "--nproc", "8", "run_dir=/r/${x}"], "this script cannot follow backslashes"),
        (["--dry-run", "--frob", "run_dir=/r"], "unknown option --frob"),
        (["--nproc", "8", "run_dir=/r"], "not inside a Slurm job"),
        (["--dry-run", "--nproc", "8", "--starts", "0", "run_dir=/r"], "--starts 0: give a number"),
        (["--dry-run", "--nproc", "8", "--spare", "x", "run_dir=/r"], "--spare x: give a number"),
        (["--dry-run", "--nproc", "8", "--spare", "1", "run_dir=/r"], "ask for more"),
        (["--dry-run", "--nproc", "8", "--trials", "/none"], "--trials /none: no such file"),
        (["--dry-run", "--nproc", "8", "--trials", str(SCRIPT)], "submit with sbatch --array"),
        (
            ["--dry-run", "--trials", "/c", "seed=1"],
            "its lines are the overrides; leave out seed=1",
        ),
    ],
)
def test_a_wrong_call_is_named(args, message):
    done = sbatch_script(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    "path", [*SHELL_SCRIPTS, REPO / ".ci/run"], ids=lambda path: str(path.relative_to(REPO))
)
def test_shellcheck_is_content(path):
    done = subprocess.run(
        [str(Path(sys.executable).parent / "shellcheck"), "-x", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_shellcheck_can_find_something(tmp_path):
    (tmp_path / "bad.sh").write_text("#!/bin/bash\nrm -rf $1/x\n")
    assert (
        subprocess.run(
            [str(Path(sys.executable).parent / "shellcheck"), str(tmp_path / "bad.sh")],
            capture_output=True,
        ).returncode
        == 1
    )
