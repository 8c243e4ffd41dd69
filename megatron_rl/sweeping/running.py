"""Runs on this machine, several at a time: started, watched, stopped together; the share of the
machine that each gets, and a short reason where one fails."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from megatron_rl.run.files import REQUEUE
from megatron_rl.runtime.display import duration
from megatron_rl.runtime.guard import lock
from megatron_rl.runtime.process import die_with_parent
from megatron_rl.sweeping.trials import Trial, is_finished

CONSOLE = "console.log"
_POLL_S = 0.2
_STOP_S = 60  # how long stopped runs may take to end
_LAST_LINES = 5
_LAST_BYTES = 1 << 14
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_THREADS = "OMP_NUM_THREADS"

Share = Mapping[str, str]  # environment variables of a run, in addition to those of the sweep
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


def shares(
    parallel: int, nproc: int, environment: Mapping[str, str], num_gpus: int, num_cores: int
) -> list[Share]:
    """Neighboring GPUs for each run, one a process; without GPUs the cores in equal parts.

    ``torchrun`` gives several processes one thread each, so that cores matter to a run of a single
    process alone. A number of threads that is set already stays.

    Example: two runs of two processes on four GPUs get the GPUs ``0,1`` and ``2,3``.

    Raises:
        ValueError: fewer GPUs than processes.
    """
    if parallel == 1:
        return [{}]
    if num_gpus:
        visible = [str(index) for index in range(num_gpus)]
        if environment.get(_VISIBLE):
            # Names of the user's, which need not be 0, 1, ... CUDA stops at the first that does not
            # exist, so that fewer may count than are listed.
            visible = environment[_VISIBLE].split(",")[:num_gpus]
        wanted = parallel * nproc
        if wanted > num_gpus:
            raise ValueError(
                f"--parallel {parallel} --nproc {nproc}: a process has a GPU of its own, which "
                f"makes {wanted}, and {num_gpus} are visible; lower one of them"
            )
        starts = range(0, wanted, nproc)
        return [{_VISIBLE: ",".join(visible[first : first + nproc])} for first in starts]
    if nproc > 1 or _THREADS in environment:
        return [{} for _ in range(parallel)]
    return [{_THREADS: str(max(1, num_cores // parallel))} for _ in range(parallel)]


@dataclass(frozen=True)
class Failure:
    """The exit code of a run, lines that say why, and the file with all of its output, if any."""

    code: int
    lines: list[str]
    log: Path | None

    @property
    def code_text(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        number = -self.code  # as subprocess has it: -9 is death by signal 9
        names = {known.value: known.name for known in signal.Signals}
        return f"killed by {names.get(number, f'signal {number}')}"  # not all have a name here

    def __str__(self) -> str:
        """One line; of a list of problems the first.

        Example: the lines ``error: config:`` and ``  - seed = x: no number`` make
        ``exit code 1: error: config: seed = x: no number (run/console.log)``.
        """
        text = ": ".join([self.code_text, *self.lines[:1]])
        if text.endswith(":") and len(self.lines) > 1:
            text += f" {self.lines[1].strip().removeprefix('- ')}"
        return f"{text} ({self.log})" if self.log else text


def failure_of(code: int, error_file: Path, log: Path | None) -> Failure:
    """A run that ended with ``code``.

    Its reason is the message of the rank that failed first, which torchrun leaves in
    ``error_file``; where there is none (torchrun itself was killed), the end of the output.
    """
    text = ""
    try:
        content = json.loads(error_file.read_text(encoding="utf-8"))["message"]
        # torch writes {"message": {"message": text, ...}}, or a text in place of the inner object.
        text = content["message"] if isinstance(content, dict) else content
    except (OSError, ValueError, KeyError, TypeError):
        if log is not None and log.is_file():
            # The end alone: a log may hold days. What is cut within a character is replaced.
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - _LAST_BYTES))
                end = file.read().decode("utf-8", "replace")
            text = "\n".join([line for line in end.splitlines() if line.strip()][-_LAST_LINES:])
    return Failure(code, [line for line in str(text).splitlines() if line.strip()], log)


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


@dataclass
class Runner:
    """Runs trials with one command each, as many at a time as there are shares."""

    command: Command
    shares: Sequence[Share]
    outcome: SweepOutcome = field(default_factory=SweepOutcome)
    _live: list[Live] = field(default_factory=list)
    _waiting: deque[Trial] = field(default_factory=deque)
    _scratch: Path = Path()

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
                        for live in list(self._live):
                            if (code := live.process.poll()) is not None:
                                self._live.remove(live)
                                self._note_end(live, code)
                        if self._live:
                            time.sleep(_POLL_S)
                finally:
                    # Signals are still noted here: a second Ctrl-C does not cut the stopping short.
                    stop([live.process for live in self._live])
        if came:
            raise Stopped(came[0])
        for trial in trials:  # what another start has finished meanwhile
            if trial.name in self.outcome.elsewhere and is_finished(trial.config):
                del self.outcome.elsewhere[trial.name]
                self.outcome.done.append(trial.name)
        return self.outcome

    def _fill(self, came: Sequence[str]) -> None:
        """Starts runs in the free shares. Looks at ``came`` before each: whether a trial is
        finished takes a while to see, and a signal may come meanwhile."""
        while self._waiting and len(self._live) < len(self.shares) and not came:
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
        slot = min(set(range(len(self.shares))) - {live.slot for live in self._live})
        error_file = self._scratch / f"{trial.name}.json"
        log = trial.folder / CONSOLE if len(self.shares) > 1 else None
        words = self.command(trial)
        if log is not None:
            try:
                trial.folder.mkdir(parents=True, exist_ok=True)
                with log.open("a", encoding="utf-8") as file:
                    file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}\n")
            except OSError as error:
                raise ValueError(f"{log}: cannot be written ({error.strerror})") from None
        # torchrun leaves the message of the rank that failed first in the file of this variable.
        more = {**self.shares[slot], "TORCHELASTIC_ERROR_FILE": str(error_file)}
        process = start_process(words, {**os.environ, **more}, log)
        self._live.append(Live(trial, process, slot, error_file, log, time.monotonic()))
        self._say(trial, "started" if log is None else f"started, output in {log}")

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

    def _say(self, trial: Trial, what: str) -> None:
        trials = {**vars(self.outcome), "running": self._live, "left": self._waiting}
        progress = ", ".join(f"{len(them)} {name}" for name, them in trials.items() if them)
        stream = sys.stderr if trial.name in self.outcome.failed else sys.stdout
        print(f"--- {trial.folder}: {what} [{progress}]", file=stream, flush=True)
