"""Signals at odd moments."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.trials import looks
from tests.trials.looks import looked_at
from tests.trials.material import small, toy
from tests.trials.place import Case, Place, Running, marked_processes, torchrun
from tests.trials.verdicts import Dies, Ends, Expected, Outcome

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


def stopped_for_good(place: Place) -> Outcome:
    """Rank 1 stands still in the middle of a run."""
    run_dir = place.folder / "run"
    running = begun(place)
    in_a_step(running, run_dir)
    os.kill(running.ranks()[1], signal.SIGSTOP)
    return running.finish(60)


def workers_killed(place: Place) -> Outcome:
    """Processes that judge answers are killed, again and again, for five seconds."""
    run_dir = place.folder / "run"
    model, rows = place.material.model("llama"), place.material.rows()
    words = small(model, rows, run_dir, "reward.verifier=math", "trainer.num_steps=60")
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


def fault(
    name: str,
    title: str,
    play: Callable[[Place], Outcome],
    *expected: Expected,
    limit_s: float = 120,
    needs: Sequence[str] = (),
) -> Case:
    return Case(name, "faults", title, play, expected, "torchrun 2", limit_s, needs=tuple(needs))


def cases() -> list[Case]:
    kill, term, hang_up = signal.SIGKILL, signal.SIGTERM, signal.SIGHUP
    dead = Dies(("SIGKILL|signal 9|killed",))
    resumed = Ends(("resumed from",))
    quiet = Dies(codes=(1, 130, -2, -15, 143, 129, -1), consequences=())
    by_user = Dies(codes=(-10, 1), consequences=())
    alone = Dies(codes=(-9,), consequences=())
    stopped = Dies((r"rank 1 [^\n]*is stopped \(SIGSTOP", "start again"))
    step, build, save = (partial(signalled, moment) for moment in ("step", "build", "checkpoint"))
    return [
        fault("b01", "SIGKILL of rank 1 in a step", step(to_rank(1, kill)), dead),
        fault("b02", "SIGKILL of rank 0 in a step", step(to_rank(0, kill)), dead),
        fault("b03", "SIGKILL of rank 1 while it saves", save(to_rank(1, kill)), dead),
        fault("b03r", "the same, then started again", killed_saving_and_again, resumed),
        fault("b04", "SIGKILL of rank 1 in the build", build(to_rank(1, kill)), dead),
        fault("b05", "SIGTERM of torchrun", step(to_torchrun(term)), quiet),
        fault("b05b", "the terminal closes", step(to_torchrun(hang_up)), quiet),
        fault("b20", "SIGTERM of all ranks", step(to_ranks(term)), quiet),
        fault("b06", "Ctrl-C in a step", step(to_group(signal.SIGINT)), quiet),
        fault("b06b", "Ctrl-C in the build", build(to_group(signal.SIGINT)), quiet),
        fault("b07", "USR1 of the ranks", preempted, Ends(("saved step",))),
        fault("b07b", "USR1 of the group", step(to_group(signal.SIGUSR1)), by_user, Ends()),
        fault("b08", "rank 1 stands still", stopped_for_good, stopped),
        fault(
            "b09",
            "workers of the verifier are killed",
            workers_killed,
            Ends(("server of the verifiers ended",)),
            limit_s=200,
        ),
        fault("b17", "SIGKILL of torchrun alone", step(to_torchrun(kill)), alone),
        fault("b17b", "SIGKILL of torchrun in the build", build(to_torchrun(kill)), alone),
    ]
