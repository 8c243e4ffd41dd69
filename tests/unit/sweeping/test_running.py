"""Runs side by side, with stand-ins for them: how many at a time, what a failure, a signal and a
kill leave, and what is alive elsewhere."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from megatron_rl.config.cli.command_line import Root
from megatron_rl.sweep import main
from megatron_rl.sweeping import commands
from megatron_rl.sweeping.running import Failure, Runner, start_process
from megatron_rl.sweeping.trials import Trial, make_trials
from tests.launch import REPO, end

NEEDED = ["model.path=m", "data.train=t", "data.eval=e"]
HOLD = (
    "import sys, time; from pathlib import Path; from megatron_rl.runtime.guard import lock;"
    " lock.hold(Path(sys.argv[1]), 'other'); print('held', flush=True); time.sleep(60)"
)


def trials(out: Path, *overrides: str) -> list[Trial]:
    return make_trials([*NEEDED, *overrides], out, Root())


def sweep(out: Path, *words: str, nproc: int = 1) -> int:
    """The exit code of a sweep, its runs one at a time unless ``words`` say otherwise."""
    return main(["--out", str(out), "--nproc", str(nproc), *NEEDED, *words])


def program(source: str):
    """A command for every trial: ``source`` with the trial's folder as ``folder``."""

    def command(trial: Trial, *_: object, **__: object) -> Sequence[str]:
        head = "import json, os, sys, time\nfrom pathlib import Path\n"
        head += f"folder = Path({str(trial.folder)!r})\n"
        return [sys.executable, "-c", head + source]

    return command


@pytest.fixture
def stand_in(monkeypatch):
    """Makes the sweep start programs of this source instead of runs."""
    return lambda source: monkeypatch.setattr(commands, "local", program(source))


def test_as_many_run_at_a_time_as_there_are_shares_each_with_its_own(tmp_path):
    source = (
        "begin = time.time(); time.sleep(0.5)\n"
        "times = [begin, time.time(), os.environ['SHARE']]\n"
        "(folder / 'times').write_text(json.dumps(times))"
    )
    todo = trials(tmp_path, "seed=1,2,3,4,5")
    outcome = Runner(program(source), [{"SHARE": "a"}, {"SHARE": "b"}]).run(todo)
    assert sorted(outcome.done) == [trial.name for trial in todo]
    times = [json.loads((trial.folder / "times").read_text()) for trial in todo]
    overlapping = [
        [other for other in times if other[0] <= begin < other[1]] for begin, _, _ in times
    ]
    assert max(map(len, overlapping)) == 2
    assert all(len({share for *_, share in group}) == len(group) for group in overlapping)


def test_a_failed_run_is_named_with_its_reason_and_the_others_run_all_the_same(
    tmp_path, stand_in, capsys
):
    """The reason is what torchrun was told; without that, the end of the output."""
    message = {"message": {"message": "error: data.train = x: no such file\n  - more"}}
    stand_in(
        "print('first line'); print('what went wrong', flush=True)\n"
        "told = folder.name == 'seed-2'\n"
        "file = os.environ['TORCHELASTIC_ERROR_FILE']\n"
        f"told and Path(file).write_text({json.dumps(message)!r})\n"
        "sys.exit({'seed-2': 3, 'seed-3': 4}.get(folder.name, 0))"
    )
    words = ["--parallel", "2", "seed=1,2,3"]
    assert sweep(tmp_path, *words, nproc=2) == 1
    said = capsys.readouterr()
    assert f"--- {tmp_path}/seed-1: finished in " in said.out
    log = f"{tmp_path}/seed-2/console.log"
    assert (
        f"{tmp_path}/seed-2: exit code 3: error: data.train = x: no such file ({log})" in said.err
    )
    assert "    what went wrong" in said.err.splitlines()
    last = said.err.splitlines()[-1]
    assert last == f"error: 2 of 3 runs failed: {tmp_path}/seed-2, {tmp_path}/seed-3"
    assert "not in the table, because not finished: seed-2, seed-3" in said.out
    assert sweep(tmp_path, *words, nproc=2) == 1
    text = Path(log).read_text()
    assert text.count("what went wrong") == 2, "the output of the second start is added"


def test_a_single_run_at_a_time_has_the_console(tmp_path, stand_in, capfd):
    stand_in("print('on the console')")
    assert sweep(tmp_path, "seed=1,2") == 0
    assert capfd.readouterr().out.count("on the console") == 2
    assert not list(tmp_path.glob("*/console.log"))


def test_equal_runs_are_started_once(tmp_path, stand_in, capsys):
    stand_in("open(folder.parent / folder.name.replace('.', '_'), 'x')")
    assert sweep(tmp_path, "optim.clip_grad=1,1.0,2") == 0
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["optim_clip_grad-1", "optim_clip_grad-2"]
    assert "optim.clip_grad-1.0: the same run as optim.clip_grad-1\n" in capsys.readouterr().out


def held(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the folder as a live run does."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", HOLD, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_run_that_is_alive_elsewhere_is_neither_started_nor_failed(tmp_path, stand_in, capsys):
    stand_in("(folder / 'started').touch()")
    other = held(tmp_path / "seed-1")
    try:
        assert sweep(tmp_path, "--parallel", "2", "seed=1,2") == 0
    finally:
        end(other)
    assert not (tmp_path / "seed-1" / "started").exists()
    assert (tmp_path / "seed-2" / "started").exists()
    said = capsys.readouterr().out
    assert f"process {other.pid}, launch other" in said
    assert said.splitlines()[-1].startswith("running elsewhere: seed-1; the same command again")


def test_a_run_that_another_start_was_quicker_to_take_has_not_failed(tmp_path):
    """Between the look at the folder and its lock a run reads its data: both may have started."""
    folder = tmp_path / "run"
    script = [sys.executable, "-c", HOLD, str(folder)]
    source = (
        "import subprocess\n"
        f"other = subprocess.Popen({script!r}, stdout=subprocess.PIPE, start_new_session=True)\n"
        "other.stdout.readline(); (folder / 'pid').write_text(str(other.pid)); sys.exit(1)"
    )
    environment = {"PYTHONPATH": str(REPO)}
    try:
        outcome = Runner(program(source), [environment, environment]).run(trials(tmp_path))
    finally:
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    assert not outcome.failed and not outcome.done and list(outcome.elsewhere) == ["run"]


def test_a_run_that_was_stopped_on_request_is_not_done(tmp_path, stand_in, capsys):
    stand_in("(folder / 'requeue').write_text('3')")
    assert sweep(tmp_path, "--parallel", "2", "seed=1,2") == 0
    assert "stopped on request: seed-1, seed-2; the same command" in capsys.readouterr().out


def test_the_signal_that_killed_a_run_is_named():
    assert Failure(-9, [], None).code_text == "killed by SIGKILL"
    # Signals of real time have numbers; Python names the first and the last of them alone.
    assert Failure(-(signal.SIGRTMIN + 1), [], None).code_text == "killed by signal 35"


def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="no-such-torchrun: no such program on this machine"):
        start_process(["no-such-torchrun"], {}, None)


LIVING = """
import signal
def leave(*_):
    time.sleep(0.3)
    (folder / 'ended').touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, leave)
(folder / 'pid').write_text(str(os.getpid()))
(folder / 'started').touch()
time.sleep(60)
"""


def sweep_of_two(out: Path) -> subprocess.Popen[str]:
    """A sweep of three runs, two at a time, in a process of its own; returns when both live."""
    source = (
        "import sys\n"
        "from megatron_rl.sweep import main\n"
        "from megatron_rl.sweeping import commands\n"
        "from tests.unit.sweeping.test_running import LIVING, program\n"
        "commands.local = program(LIVING)\nsys.exit(main(sys.argv[1:]))"
    )
    words = ["--out", str(out), "--nproc", "1", "--parallel", "2", *NEEDED, "seed=1,2,3"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(
        [sys.executable, "-c", source, *words], stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 60
    while not all((out / f"seed-{seed}" / "started").exists() for seed in (1, 2)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    return process


def pids(out: Path) -> list[int]:
    return [int((out / f"seed-{seed}" / "pid").read_text()) for seed in (1, 2)]


FULL = pytest.mark.full
NUMBERS = [
    signal.SIGTERM,
    pytest.param(signal.SIGINT, marks=FULL),
    pytest.param(signal.SIGHUP, marks=FULL),
]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_to_the_sweep_ends_its_runs(tmp_path, number):
    """They must be gone, by a SIGTERM that they could act on, when the sweep is; no further one is
    started."""
    sweep = sweep_of_two(tmp_path)
    sweep.send_signal(number)
    said = sweep.communicate(timeout=30)[1]
    assert sweep.returncode == 130
    assert f"stopped by {signal.Signals(number).name}; the same command starts runs" in said
    assert all((tmp_path / f"seed-{seed}" / "ended").exists() for seed in (1, 2))
    assert not (tmp_path / "seed-3" / "started").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel of Linux does it")
def test_a_sweep_that_is_killed_leaves_no_run_behind(tmp_path):
    sweep = sweep_of_two(tmp_path)
    runs = pids(tmp_path)
    sweep.kill()
    sweep.wait()
    deadline = time.monotonic() + 10
    while any(map(alive, runs)):
        assert time.monotonic() < deadline, "a run outlives its sweep"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
