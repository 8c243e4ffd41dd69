"""Faults from outside: signals at odd moments, full disks, little memory, two runs in one folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.trials import looks
from tests.trials.makers import looked_at
from tests.trials.material import small, toy
from tests.trials.place import Case, Place, Running, marked_processes, torchrun
from tests.trials.verdicts import Dies, Ends, Expected, Outcome, Refused

LONG = ("trainer.num_steps=2000", "checkpoint.every_steps=5")
ENDING_S = 30.0


def begun(place: Place, *more: str, run_dir: Path | None = None, log: str = "log.txt") -> Running:
    """A long run of the toy on two ranks."""
    folder = run_dir or place.folder / "run"
    return place.start(torchrun(2, toy(place.material, folder, *LONG, *more)), log=log)


def steps_done(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.is_file() else 0


def in_a_step(running: Running, run_dir: Path, steps: int = 3) -> None:
    running.wait_for(lambda: steps_done(run_dir) > steps)


def in_the_build(running: Running) -> None:
    running.wait_for(lambda: "policy: " in running.text())


def in_a_checkpoint(running: Running, run_dir: Path) -> None:
    in_a_step(running, run_dir)
    running.wait_for(lambda: any((run_dir / "checkpoints").glob("*.tmp-partial")))


def signalled(moment: str, send: Callable[[Running], None]) -> Callable[[Place], Outcome]:
    """A long run, a signal at a moment (``step``, ``build`` or ``checkpoint``), its end."""

    def play(place: Place) -> Outcome:
        run_dir = place.folder / "run"
        running = begun(place)
        if moment == "build":
            in_the_build(running)
        elif moment == "checkpoint":
            in_a_checkpoint(running, run_dir)
        else:
            in_a_step(running, run_dir)
        send(running)
        started = time.monotonic()
        outcome = running.finish(ENDING_S)
        took = time.monotonic() - started
        return outcome.noting(unclear=[f"ended {took:.0f} s after the signal"] if took > 10 else [])

    return play


def to_rank(number: int, what: int) -> Callable[[Running], None]:
    return lambda running: os.kill(running.ranks()[number], what)


def to_ranks(what: int) -> Callable[[Running], None]:
    return lambda running: [os.kill(pid, what) for pid in running.ranks()] and None


def to_torchrun(what: int) -> Callable[[Running], None]:
    return lambda running: os.kill(running.process.pid, what)


def to_group(what: int) -> Callable[[Running], None]:
    return lambda running: os.killpg(running.process.pid, what)


def killed_saving_and_again(place: Place) -> Outcome:
    """Half a checkpoint is not taken; the second start goes on from a whole one."""
    run_dir = place.folder / "run"
    running = begun(place)
    running.wait_for(lambda: any((run_dir / "checkpoints").glob("step_*/manifest.json")))
    in_a_checkpoint(running, run_dir)
    os.kill(running.ranks()[1], signal.SIGKILL)
    running.finish(ENDING_S)
    last = steps_done(run_dir) + 2
    words = toy(place.material, run_dir, *LONG, f"trainer.num_steps={last}")
    outcome = place.command(torchrun(2, words))
    return outcome.noting(looks.trained(run_dir, last)) if outcome.code == 0 else outcome


def preempted(place: Place) -> Outcome:
    run_dir = place.folder / "run"
    running = begun(place)
    in_a_step(running, run_dir)
    to_ranks(signal.SIGUSR1)(running)
    outcome = running.finish(60)
    step = (run_dir / "requeue").read_text().strip() if (run_dir / "requeue").is_file() else None
    if step is None:
        return outcome.noting(["no file requeue"])
    whole = (run_dir / "checkpoints" / f"step_{int(step):06d}" / "manifest.json").is_file()
    return outcome.noting([] if whole else ["the step of requeue was not saved"])


def stopped_for_a_while(place: Place) -> Outcome:
    """Rank 1 stands still for 45 s in the middle of a run."""
    run_dir = place.folder / "run"
    running = begun(place, "trainer.num_steps=60")
    in_a_step(running, run_dir)
    rank = running.ranks()[1]
    os.kill(rank, signal.SIGSTOP)
    time.sleep(45)
    os.kill(rank, signal.SIGCONT)
    return looked_at(running.finish(120), run_dir, 60)


def workers_killed(place: Place) -> Outcome:
    """Processes that judge answers are killed, again and again, for five seconds."""
    run_dir = place.folder / "run"
    words = small(place.material.model("llama"), place.material.rows(), run_dir, "reward.verifier=math", "trainer.num_steps=60")
    running = place.start(torchrun(2, words))
    running.wait_for(lambda: steps_done(run_dir) >= 2)
    keep = {running.process.pid, *running.ranks()}
    until = time.monotonic() + 5
    while time.monotonic() < until and running.process.poll() is None:
        for pid in marked_processes(place.mark):
            if pid not in keep:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.3)
    return looked_at(running.finish(90), run_dir, 60)


def shell(before: str, *more: str) -> Callable[[Place], Outcome]:
    """One step of the toy from a shell that says ``before`` first."""

    def play(place: Place) -> Outcome:
        run_dir = place.folder / "run"
        words = torchrun(2, toy(place.material, run_dir, *more))
        quoted = " ".join(f"'{word}'" if "'" not in word else f'"{word}"' for word in words)
        return looked_at(place.command(["bash", "-c", f"{before} exec {quoted}"]), run_dir)

    return play


def small_shared_memory(place: Place) -> Outcome:
    script = 'mount -t tmpfs -o size=20m tmpfs /dev/shm && exec "$@"'
    words = torchrun(2, toy(place.material, place.folder / "run"))
    return place.command(["unshare", "-m", "bash", "-c", script, "bash", *words])


def port_taken(place: Place) -> Outcome:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
        launcher += ["--master-addr=127.0.0.1", f"--master-port={port}", "-m", "megatron_rl.train"]
        return place.command([*launcher, *toy(place.material, place.folder / "run")], limit_s=60)


def two_runs(place: Place) -> Outcome:
    """The same command while the first one trains: the second is refused, the first is whole."""
    run_dir = place.folder / "run"
    first = begun(place, "trainer.num_steps=300")
    in_a_step(first, run_dir)
    second = Place(place.folder, place.material, place.server, place.limit_s)
    words = torchrun(2, toy(place.material, run_dir, *LONG, "trainer.num_steps=300"))
    outcome = second.start(words, log="second.txt").finish(60)
    ended = first.finish(120)
    wrong = looks.trained(run_dir, 300) if ended.code == 0 else ["the first run did not end well"]
    return outcome.noting(wrong)


def two_at_once(place: Place) -> Outcome:
    """Both started in the same moment: one trains, the other is refused."""
    run_dir = place.folder / "run"
    other = Place(place.folder, place.material, place.server, place.limit_s)
    words = torchrun(2, toy(place.material, run_dir, *LONG, "trainer.num_steps=100"))
    running = [place.start(words, log="one.txt"), other.start(words, log="two.txt")]
    outcomes = sorted((one.finish(120) for one in running), key=lambda one: (one.code is None, one.code or 0))
    winner, loser = outcomes
    wrong = looks.trained(run_dir, 100) if winner.code == 0 else ["neither ended well"]
    return loser.noting(wrong)


def filled(place: Place, disk: Path, free_kib: int = 64) -> Path:
    """A file that leaves ``free_kib`` of the disk."""
    ballast = disk / "ballast"
    room = shutil.disk_usage(disk).free - free_kib * 1024
    with ballast.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, room))
    return ballast


def disk_full(place: Place) -> Outcome:
    """The disk fills while the run trains: that is said, and the last good checkpoint stays."""
    with place.mounted(place.folder / "disk", 30) as disk:
        return _fill_while_training(place, disk)[0]


def _fill_while_training(place: Place, disk: Path) -> tuple[Outcome, Path]:
    run_dir = disk / "run"
    running = begun(place, run_dir=run_dir)
    running.wait_for(lambda: any((run_dir / "checkpoints").glob("step_*/manifest.json")))
    ballast = filled(place, disk)
    outcome = running.finish(60)
    whole = list((run_dir / "checkpoints").glob("step_*/manifest.json"))
    return outcome.noting([] if whole else ["no whole checkpoint is left"]), ballast


def disk_full_again(place: Place) -> Outcome:
    """After the disk has room again, the same command goes on, whatever the dead run left."""
    with place.mounted(place.folder / "disk", 30) as disk:
        _, ballast = _fill_while_training(place, disk)
        ballast.unlink()
        last = steps_done(disk / "run") + 5
        words = torchrun(2, toy(place.material, disk / "run", *LONG, f"trainer.num_steps={last}"))
        outcome = place.start(words, log="again.txt").finish(60)
        left = list((disk / "run" / "checkpoints").glob("*.tmp-*"))
        wrong = [f"{path.name} of the dead run stays" for path in left]
        return outcome.noting(wrong + (looks.trained(disk / "run", last) if outcome.code == 0 else []))


def disk_full_start(place: Place) -> Outcome:
    with place.mounted(place.folder / "disk", 8) as disk:
        filled(place, disk)
        return place.torchrun(toy(place.material, disk / "run"))


def disk_too_small(place: Place) -> Outcome:
    """Room for the first files, none for one checkpoint."""
    with place.mounted(place.folder / "disk", 1) as disk:
        return place.torchrun(toy(place.material, disk / "run"))


def read_only(place: Place) -> Outcome:
    with place.mounted(place.folder / "disk", 8) as disk:
        (disk / "run").mkdir()
        os.system(f"mount -o remount,ro {disk}")
        return place.torchrun(toy(place.material, disk / "run"))


def run_dir_is_a_file(place: Place) -> Outcome:
    (place.folder / "run").write_text("x")
    return place.torchrun(toy(place.material, place.folder / "run"))


def folder_removed(place: Place) -> Outcome:
    run_dir = place.folder / "run"
    running = begun(place)
    in_a_step(running, run_dir)
    run_dir.rename(place.folder / "away")
    return running.finish(60)


def model_removed(place: Place) -> Outcome:
    """The model's folder goes away while it trains: the export needs its tokenizer."""
    run_dir = place.folder / "run"
    model = place.material.copy_of("toy", place.folder / "model")
    running = begun(place, f"model.path={model}", "trainer.num_steps=60")
    in_a_step(running, run_dir)
    model.rename(place.folder / "away")
    return running.finish(90)


def fault(
    name: str, title: str, play: Callable[[Place], Outcome], *expected: Expected, limit_s: float = 120, needs: Sequence[str] = ()
) -> Case:
    return Case(name, "faults", title, play, expected, "torchrun 2", limit_s, needs=tuple(needs))


def signals() -> list[Case]:
    kill, term = signal.SIGKILL, signal.SIGTERM
    dead = ("SIGKILL|signal 9|killed",)
    quiet = Dies(codes=(1, 130, -2, -15, 143, 129, -1), consequences=())
    return [
        fault("b01", "SIGKILL of rank 1 in a step", signalled("step", to_rank(1, kill)), Dies(dead)),
        fault("b02", "SIGKILL of rank 0 in a step", signalled("step", to_rank(0, kill)), Dies(dead)),
        fault("b03", "SIGKILL of rank 1 while it saves", signalled("checkpoint", to_rank(1, kill)), Dies(dead)),
        fault("b03r", "the same, then started again", killed_saving_and_again, Ends(("resumed from",))),
        fault("b04", "SIGKILL of rank 1 in the build", signalled("build", to_rank(1, kill)), Dies(dead)),
        fault("b05", "SIGTERM of torchrun", signalled("step", to_torchrun(term)), quiet),
        fault("b05b", "SIGHUP of torchrun (the terminal closes)", signalled("step", to_torchrun(signal.SIGHUP)), quiet),
        fault("b20", "SIGTERM of all ranks", signalled("step", to_ranks(term)), quiet),
        fault("b06", "Ctrl-C in a step", signalled("step", to_group(signal.SIGINT)), quiet),
        fault("b06b", "Ctrl-C in the build", signalled("build", to_group(signal.SIGINT)), quiet),
        fault("b07", "USR1 of the ranks", preempted, Ends(("saved step",))),
        fault(
            "b07b", "USR1 of torchrun's group", signalled("step", to_group(signal.SIGUSR1)), Dies(codes=(-10, 1), consequences=()), Ends()
        ),
        fault("b08", "rank 1 stands still for 45 s", stopped_for_a_while, Ends((r"wait[^\n]*rank|rank[^\n]*wait",)), limit_s=240).arguing(
            "a rank that is only slow cannot be told from one that stands still without a heartbeat; the run waits, and goes on unharmed"
        ),
        fault("b09", "workers of the verifier are killed", workers_killed, Ends(("server of the verifiers ended",)), limit_s=200),
        fault("b17", "SIGKILL of torchrun alone", signalled("step", to_torchrun(kill)), Dies(codes=(-9,), consequences=())),
        fault("b17b", "SIGKILL of torchrun in the build", signalled("build", to_torchrun(kill)), Dies(codes=(-9,), consequences=())),
    ]


def machines() -> list[Case]:
    root = ("root",)
    space = "no space|disk full|full|room"
    return [
        fault("b10", "ulimit -v of 9 GB", shell("ulimit -v 9000000;"), Ends()),
        fault("b10b", "ulimit -v of 5 GB", shell("ulimit -v 5000000;"), Ends(), Dies(("memory",))),
        fault("b10c", "ulimit -v of 2.6 GB", shell("ulimit -v 2600000;"), Dies(("memory",)), Refused(("memory",), before="", fault=True)),
        fault("b10d", "64 open files", shell("ulimit -n 64;"), Ends(), Dies(("open files",))),
        fault(
            "b11b",
            "/dev/shm of 20 MiB",
            small_shared_memory,
            Dies(("/dev/shm", "MiB|shared memory")),
            Refused(("/dev/shm",), before=""),
            needs=root,
        ),
        fault("b12", "the master's port is taken", port_taken, Dies(("address already in use|EADDRINUSE", "port"), fault=True)),
        fault("b12b", "no home folder", shell("export HOME=/nonexistent;"), Ends()),
        fault(
            "b13", "a second run in the folder of a live one", two_runs, Refused(("run_dir|/run", "pid|process|lives|running|held|another"))
        ),
        fault(
            "b13b",
            "two runs started at once in one folder",
            two_at_once,
            Refused(("run_dir|/run", "pid|process|lives|running|held|another"), within_s=120),
        ),
        fault("b14", "the disk fills while it trains", disk_full, Refused((space,), before="", within_s=120, fault=False), needs=root),
        fault("b14r", "the same, room is made, started again", disk_full_again, Ends(("resumed from",)), needs=root, limit_s=200),
        fault("b14b", "the disk is full at the start", disk_full_start, Refused((space, "run_dir|/disk")), needs=root),
        fault("b14c", "no room for one checkpoint", disk_too_small, Refused((space, "run_dir|/disk|checkpoint")), needs=root),
        fault("b15", "run_dir is a file", run_dir_is_a_file, Refused(("run_dir|/run",))),
        fault("b15b", "run_dir cannot be written", read_only, Refused(("run_dir|/run", "read.only|write|permission")), needs=root),
        fault("b16", "the run folder is moved away", folder_removed, Refused(("/run",), before="", within_s=120), Ends()),
        fault("b19", "the model is moved away", model_removed, Refused(("/model",), before="", within_s=120), Ends()),
    ]


def cases() -> list[Case]:
    return [*signals(), *machines()]
