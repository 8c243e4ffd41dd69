"""Runs on this machine, several at a time: started, watched, stopped together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from megatron_rl.run.start import REQUEUE
from megatron_rl.runtime.display import duration
from megatron_rl.runtime.guard import lock
from megatron_rl.runtime.guard.parent import die_with_parent
from megatron_rl.sweeping.failures import Failure, failure_of
from megatron_rl.sweeping.machine import Share
from megatron_rl.sweeping.trials import Trial, is_finished

CONSOLE = "console.log"
_POLL_S = 0.2
_STOP_S = 60  # how long stopped runs may take to end

Command = Callable[[Trial], Sequence[str]]


class Stopped(Exception):
    """A signal asks the sweep to end."""


@contextmanager
def noted_signals() -> Iterator[list[str]]:
    """Inside, SIGINT, SIGTERM and SIGHUP end nothing; their names appear in the list."""
    came: list[str] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(signal.Signals(number).name)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, note) for number in signals}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def start_process(
    words: Sequence[str], variables: dict[str, str], log: Path | None
) -> subprocess.Popen[bytes]:
    """Starts a command in a session of its own, which the kernel ends with this process (Linux).

    A session of its own, because a Ctrl-C of the terminal would reach torchrun twice, and its ranks
    never: the terminal signals the sweep's group, torchrun among it, the sweep signals torchrun
    again, and torchrun's ranks are in sessions of their own.

    Args:
        log: file that its output is added to; None: the console.

    Raises:
        ValueError: there is no such program.
    """
    try:
        with nullcontext() if log is None else log.open("ab") as output:
            return subprocess.Popen(
                words,
                env=variables,
                stdin=None if log is None else subprocess.DEVNULL,
                stdout=output,
                stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
    except FileNotFoundError:
        raise ValueError(f"{words[0]}: no such program on this machine") from None


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends the processes by SIGTERM, those that do not follow by SIGKILL, and awaits their end."""
    for process in processes:
        process.terminate()
    end = time.monotonic() + _STOP_S
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Live:
    """A run that was started here, in the share with the number ``slot``."""

    trial: Trial
    process: subprocess.Popen[bytes]
    slot: int
    error_file: Path
    log: Path | None
    since: float


@dataclass
class SweepOutcome:
    """Results of the trials, by name: each is in one of these, or was not reached."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, Failure] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)  # and who runs it
    stopped: list[str] = field(default_factory=list)  # on request, with a checkpoint


class Runner:
    """Runs trials with one command each, as many at a time as there are shares."""

    def __init__(self, command: Command, shares: Sequence[Share]) -> None:
        self._command = command
        self._shares = shares
        self._has_logs = len(shares) > 1
        self._live: list[Live] = []
        self._waiting: deque[Trial] = deque()
        self._scratch = Path()
        self.outcome = SweepOutcome()

    def run(self, trials: Sequence[Trial]) -> SweepOutcome:
        """Runs what is not finished, in the order given.

        A run that fails stops no other. One whose folder another live run holds is left to that.
        Ends with none of its own runs alive, whatever happens.

        Raises:
            ValueError: there is no such program.
            Stopped: a signal came; the runs were stopped.
        """
        self._waiting.extend(trials)
        with tempfile.TemporaryDirectory(prefix="megatron_rl_sweep_") as scratch:
            self._scratch = Path(scratch)
            with noted_signals() as came:
                try:
                    while (self._waiting or self._live) and not came:
                        self._fill(came)
                        self._reap()
                        if self._live:
                            time.sleep(_POLL_S)
                finally:
                    # Signals are still noted here: a second Ctrl-C does not cut the stopping short.
                    stop([live.process for live in self._live])
        if came:
            raise Stopped(came[0])
        self._look_again(trials)
        return self.outcome

    def _fill(self, came: Sequence[str]) -> None:
        """Starts runs in the free shares. Looks at ``came`` before each: whether a trial is
        finished takes a while to see, and a signal may come meanwhile."""
        while self._waiting and len(self._live) < len(self._shares) and not came:
            trial = self._waiting.popleft()
            if is_finished(trial.config):
                self.outcome.done.append(trial.name)
                self._say(trial, "finished before")
            elif holder := lock.holder(trial.folder):
                self.outcome.elsewhere[trial.name] = holder
                self._say(trial, f"is running elsewhere ({holder}) and left to that")
            else:
                self._start(trial)

    def _start(self, trial: Trial) -> None:
        # The first share that no run has; a run keeps its own, since it has the GPUs of it.
        taken = {live.slot for live in self._live}
        slot = min(set(range(len(self._shares))) - taken)
        error_file = self._scratch / f"{trial.name}.json"
        log = trial.folder / CONSOLE if self._has_logs else None
        words = self._command(trial)
        if log is not None:
            try:
                trial.folder.mkdir(parents=True, exist_ok=True)
                with log.open("a", encoding="utf-8") as file:
                    file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}\n")
            except OSError as error:
                raise ValueError(f"{log}: cannot be written ({error.strerror})") from None
        # torchrun leaves the message of the rank that failed first in the file of this variable.
        more = {**self._shares[slot], "TORCHELASTIC_ERROR_FILE": str(error_file)}
        process = start_process(words, {**os.environ, **more}, log)
        self._live.append(Live(trial, process, slot, error_file, log, time.monotonic()))
        self._say(trial, "started" if log is None else f"started, output in {log}")

    def _reap(self) -> None:
        for live in list(self._live):
            if (code := live.process.poll()) is not None:
                self._live.remove(live)
                self._note_end(live, code)

    def _note_end(self, live: Live, code: int) -> None:
        trial = live.trial
        took = duration(time.monotonic() - live.since)
        # A run that was stopped on request ends with 0 as well; exit codes of ranks do not survive
        # torchrun, so it leaves a file.
        if code == 0 and (trial.folder / REQUEUE).is_file():
            self.outcome.stopped.append(trial.name)
            self._say(trial, f"was stopped on request after {took}")
        elif code == 0:
            self.outcome.done.append(trial.name)
            self._say(trial, f"finished in {took}")
        elif holder := lock.holder(trial.folder):
            # Another start took the folder between our look at it and the run's, which was refused.
            self.outcome.elsewhere[trial.name] = holder
            self._say(trial, f"is running elsewhere ({holder}) and left to that")
        else:
            failure = failure_of(code, live.error_file, live.log)
            self.outcome.failed[trial.name] = failure
            self._say(trial, f"failed after {took}: {failure.code_text}")
            if live.log is not None:  # without a log its output is on the console already
                for line in failure.lines:
                    print(f"    {line}", file=sys.stderr, flush=True)

    def _look_again(self, trials: Sequence[Trial]) -> None:
        """Counts what another start has finished meanwhile."""
        for trial in trials:
            if trial.name in self.outcome.elsewhere and is_finished(trial.config):
                del self.outcome.elsewhere[trial.name]
                self.outcome.done.append(trial.name)

    def _say(self, trial: Trial, what: str) -> None:
        trials = {**vars(self.outcome), "running": self._live, "left": self._waiting}
        progress = ", ".join(f"{len(them)} {name}" for name, them in trials.items() if them)
        stream = sys.stderr if trial.name in self.outcome.failed else sys.stdout
        print(f"--- {trial.folder}: {what} [{progress}]", file=stream, flush=True)
