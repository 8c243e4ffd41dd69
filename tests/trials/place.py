"""Where a case runs: a folder of its own, shared inputs, and the ways to start something. Whatever
is started carries a mark in its environment, so that what outlives it is found and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests import warm
from tests.launch import REPO
from tests.trials.material import Material
from tests.trials.verdicts import Expected, Outcome

MARK = "MEGATRON_RL_TRIAL"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}
GRACE_S = 4.0  # a rank may need a moment to see that its torchrun is gone


def environment(mark: str = "", **more: str) -> dict[str, str]:
    """The environment of everything that is started here."""
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    base = {**os.environ, **SETTINGS, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}
    return {**base, MARK: mark}


def torchrun(nproc: int, overrides: Sequence[object], *options: str) -> list[str]:
    """The command a user types."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc-per-node={nproc}", *options, "-m", "megatron_rl.train"]
    return [*launcher, *map(str, overrides)]


@dataclass(frozen=True)
class Place:
    """One case's world. ``limit_s``: the longest that one command may take."""

    folder: Path
    material: Material
    limit_s: float
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def torchrun(
        self,
        overrides: Sequence[object],
        nproc: int = 2,
        *,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Outcome:
        """``torchrun ... -m megatron_rl.train overrides``."""
        return self.command(torchrun(nproc, overrides, *options), env=env, cwd=cwd)

    def command(
        self,
        words: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        limit_s: float | None = None,
    ) -> Outcome:
        """Any command, to its end or its limit."""
        running = self.start(words, env=env, cwd=cwd)
        return running.finish(limit_s or self.limit_s)

    def start(
        self,
        words: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        log: str = "log.txt",
    ) -> Running:
        """A command left running; ``finish`` gives its outcome."""
        file = self.folder / log
        with file.open("a") as output:
            process = subprocess.Popen(
                list(map(str, words)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(self.mark, **(env or {})),
                cwd=cwd or self.folder,
                start_new_session=True,
            )
        return Running(process, file, file.stat().st_size, time.monotonic(), self)

    def train(self, overrides: Sequence[object]) -> Outcome:
        """``megatron_rl.train`` without torchrun, by a Python whose imports are done."""
        return self.command([warm.python(), "-m", "megatron_rl.train", *overrides])

    def left_behind(self) -> tuple[str, ...]:
        """Processes of this case that still live (they are ended)."""
        deadline = time.monotonic() + GRACE_S
        while True:
            left = marked_processes(self.mark)
            if not left:
                return ()
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        words = tuple(sorted({f"process {_command_line(pid)}" for pid in left}))
        end_all(lambda pid: _marked(pid, self.mark))
        return words

    @contextmanager
    def mounted(self, folder: Path, mib: int) -> Iterator[Path]:
        """A disk of ``mib`` MiB at ``folder`` (needs root)."""
        folder.mkdir(parents=True, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
        subprocess.run(words, check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@dataclass(frozen=True)
class Running:
    """A command that was started."""

    process: subprocess.Popen[bytes]
    log: Path
    offset: int
    started: float
    place: Place

    def text(self) -> str:
        return _read_from(self.log, self.offset)

    def ranks(self) -> list[int]:
        """Process ids of the ranks of a torchrun, in rank order."""
        found = {}
        for pid in _processes():
            variables = _variables(pid)
            ours = variables.get(MARK) == self.place.mark and "LOCAL_RANK" in variables
            if ours and "megatron_rl" in _command_line(pid) and _parent(pid) == self.process.pid:
                found[int(variables["LOCAL_RANK"])] = pid
        return [found[rank] for rank in sorted(found)]

    def wait_for(self, condition: Callable[[], bool], limit_s: float = 90.0) -> None:
        """Returns when ``condition`` holds.

        Raises:
            TimeoutError: it does not within ``limit_s``, or the command ended before.
        """
        deadline = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None:
                raise TimeoutError(f"the command ended first: {self.text()[-600:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not reached within {limit_s} s: {self.text()[-600:]}")
            time.sleep(0.02)

    def finish(self, limit_s: float) -> Outcome:
        """Waits for the end; at the limit everything that bears the mark is ended."""
        try:
            code: int | None = self.process.wait(max(0.1, limit_s))
        except subprocess.TimeoutExpired:
            code = None
            end_all(lambda pid: _marked(pid, self.place.mark))
            self.process.wait()
        seconds = time.monotonic() - self.started
        left = () if code is None else self.place.left_behind()
        return Outcome(code, self.text(), seconds, left=left)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
        name: how it is chosen on the command line, e.g. ``res_more``.
        title: what is tried, in a few words.
        play: makes the input, runs it, looks at what it left.
        expected: what may happen; one of them is enough.
        how: torchrun, warm or command.
        argued: why a poor verdict is accepted.
        needs: what the machine must have (root, bwrap), else the case is not counted.
    """

    name: str
    group: str
    title: str
    play: Callable[[Place], Outcome]
    expected: tuple[Expected, ...]
    how: str
    limit_s: float = 90.0
    argued: str = ""
    needs: tuple[str, ...] = ()

    def arguing(self, text: str) -> Case:
        return replace(self, argued=text)


def shared_segments() -> set[str]:
    """Names of what lies in /dev/shm; the empty lock file of an engine that was not built does not
    count."""
    return {
        path.name for path in Path("/dev/shm").iterdir() if path.is_file() and path.stat().st_size
    }


def marked_processes(mark: str) -> list[int]:
    """Process ids of everything that bears the mark."""
    return [pid for pid in _processes() if _marked(pid, mark)]


def _read_from(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read().decode("utf-8", "replace")


def _processes() -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    ]


def _variables(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {
        key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, _, value in pairs
    }


def _marked(pid: int, mark: str) -> bool:
    return _variables(pid).get(MARK) == mark


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat behind the name: state, parent, group, session."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _command_line(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return f"{pid}"
    words = raw.decode("utf-8", "replace").split("\0")
    return " ".join(words[:5]).replace(str(REPO), "").replace(sys.executable, "python")[:90]


def end_all(ours: Callable[[int], bool]) -> None:
    """SIGKILL until none is left; a process may fork between two looks."""
    for _ in range(50):
        found = [pid for pid in _processes() if ours(pid)]
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
