"""Little memory, full disks, two runs in one folder, folders that go away."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from tests.launch import REPO
from tests.trials import looks
from tests.trials.fault_cases import LONG, begun, fault, in_a_step, steps_done
from tests.trials.looks import looked_at
from tests.trials.material import toy
from tests.trials.place import Case, Place, torchrun
from tests.trials.verdicts import Dies, Ends, Outcome, Refused


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
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        launcher += ["--nnodes=1", "--nproc-per-node=2"]
        launcher += ["--master-addr=127.0.0.1", f"--master-port={port}", "-m", "megatron_rl.train"]
        return place.command([*launcher, *toy(place.material, place.folder / "run")], limit_s=60)


def two_runs(place: Place) -> Outcome:
    """The same command while the first one trains: the second is refused, the first is whole."""
    run_dir = place.folder / "run"
    first = begun(place, "trainer.num_steps=300")
    in_a_step(first, run_dir)
    second = Place(place.folder, place.material, place.limit_s)
    words = torchrun(2, toy(place.material, run_dir, *LONG, "trainer.num_steps=300"))
    outcome = second.start(words, log="second.txt").finish(60)
    ended = first.finish(120)
    wrong = looks.trained(run_dir, 300) if ended.code == 0 else ["the first run did not end well"]
    return outcome.noting(wrong)


def two_at_once(place: Place) -> Outcome:
    """Both started in the same moment: one trains, the other is refused."""
    run_dir = place.folder / "run"
    other = Place(place.folder, place.material, place.limit_s)
    words = torchrun(2, toy(place.material, run_dir, *LONG, "trainer.num_steps=100"))
    running = [place.start(words, log="one.txt"), other.start(words, log="two.txt")]
    outcomes = [run.finish(120) for run in running]
    winner, loser = sorted(outcomes, key=lambda outcome: (outcome.code is None, outcome.code or 0))
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
        left = (disk / "run" / "checkpoints").glob("*.tmp-*")
        wrong = [f"{path.name} of the dead run stays" for path in left]
        if outcome.code == 0:
            wrong += looks.trained(disk / "run", last)
        return outcome.noting(wrong)


def disk_full_start(place: Place) -> Outcome:
    with place.mounted(place.folder / "disk", 8) as disk:
        filled(place, disk)
        return place.torchrun(toy(place.material, disk / "run"))


def conversion(place: Place) -> Outcome:
    with place.mounted(place.folder / "disk", 1) as disk:
        filled(place, disk)
        program = REPO / "tools" / "convert_checkpoint.py"
        words = [program, "to-megatron", place.material.model("llama"), disk / "out"]
        return place.command([sys.executable, *words])


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


def cases() -> list[Case]:
    """``root``: what only the administrator of a machine can bring about."""
    root = ("root",)
    space = "no space|disk full|full|room"
    memory, files = Dies(("memory",)), Dies(("open files",))
    fault_of_memory = Refused(("memory",), before="", fault=True)
    shared = (Dies(("/dev/shm", "MiB|shared memory")), Refused(("/dev/shm",), before=""))
    port = Dies(("address already in use|EADDRINUSE", "port"), fault=True)
    held = ("run_dir|/run", "pid|process|lives|running|held|another")
    full = Refused((space,), before="", within_s=120)
    no_room = Refused((f"{space}|out",), before="", codes=(1, 2))
    at_start, too_small = (Refused((space, f"run_dir|/disk{more}")) for more in ("", "|checkpoint"))
    no_folder = Refused(("run_dir|/run",))
    unwritable = Refused(("run_dir|/run", "read.only|write|permission"))
    run_away = Refused(("/run",), before="", within_s=120)
    model_away = Refused(("/model",), before="", within_s=120)
    resumed = Ends(("resumed from",))
    return [
        fault("b10", "ulimit -v of 9 GB", shell("ulimit -v 9000000;"), Ends()),
        fault("b10b", "ulimit -v of 5 GB", shell("ulimit -v 5000000;"), Ends(), memory),
        fault("b10c", "2.6 GB", shell("ulimit -v 2600000;"), memory, fault_of_memory),
        fault("b10d", "64 open files", shell("ulimit -n 64;"), Ends(), files),
        fault("b11b", "/dev/shm of 20 MiB", small_shared_memory, *shared, needs=root),
        fault("b12", "the master's port is taken", port_taken, port),
        fault("b12b", "no home folder", shell("export HOME=/nonexistent;"), Ends()),
        fault("b13", "a second run in the folder of a live one", two_runs, Refused(held)),
        fault("b13b", "two at once in one folder", two_at_once, Refused(held, within_s=120)),
        fault("b14", "the disk fills while it trains", disk_full, full, needs=root),
        fault("b14r", "then room is made", disk_full_again, resumed, needs=root, limit_s=200),
        fault("b14b", "the disk is full at the start", disk_full_start, at_start, needs=root),
        fault("b14c", "no room for one checkpoint", disk_too_small, too_small, needs=root),
        fault(
            "b14d",
            "the disk is full: a conversion",
            conversion,
            no_room,
            needs=root,
        ),
        fault("b15", "run_dir is a file", run_dir_is_a_file, no_folder),
        fault("b15b", "run_dir cannot be written", read_only, unwritable, needs=root),
        fault("b16", "the run folder is moved away", folder_removed, run_away, Ends()),
        fault("b19", "the model is moved away", model_removed, model_away, Ends()),
    ]
