"""Functions of a test file, run on several ranks of one gloo group.

    @on_ranks(2)
    def test_the_sum_is_that_of_all_ranks():
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == dist.get_world_size()

    def test_every_rank_says_its_number():
        assert call(2, dist_rank) == [0, 1]

A test session starts one process that imports torch and megatron once (tests/rank_server.py) and
forks the ranks of every call from it. A call therefore costs tenths of a second instead of the
5 to 10 seconds of CPU that a launch spends on imports, and its ranks are new: process groups,
megatron's parallel state, random states, patches and environment of one call cannot reach another.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests import warm
from tests.launch import REPO, TAIL_LINES

Function = TypeVar("Function", bound=Callable[..., Any])
START_S = 250.0  # imports of a loaded machine; below the limit of pytest for a test
# How long ranks may live on after one of them failed: they may be waiting for it in a collective.
GRACE_S = 5.0
FAILED = 1  # exit code of a rank whose function raised


def on_ranks(count: int, timeout: float = 120.0) -> Callable[[Function], Function]:
    """A test whose body runs on ``count`` ranks; fixtures and parameters are pickled to them."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            call(count, function, *bound.args, timeout=timeout, **bound.kwargs)

        return test  # type: ignore[return-value]

    return decorate


def call(
    count: int,
    function: Callable[..., Any] | str,
    *args: Any,
    timeout: float = 120.0,
    **kwargs: Any,
) -> list[Any]:
    """What ``function(*args, **kwargs)`` returns on each of ``count`` ranks, in rank order.

    The function is found on the ranks by its module and qualified name; as a text,
    ``module:function``, it is not imported here.

    Raises:
        Exception: that of the rank that failed first, with its rank and traceback in a note.
        AssertionError: a rank was killed, or did not end within ``timeout`` seconds.
    """
    if isinstance(function, str):
        module, _, name = function.partition(":")
    else:
        module, name = function.__module__, function.__qualname__
    assert "<locals>" not in name, f"{name} cannot be found by name on another process"
    return _server().call(count, Request(module, name, args, kwargs), timeout)


class Request(NamedTuple):
    """What every rank runs."""

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Start(NamedTuple):
    """Asks the server for the ranks of one call."""

    request: bytes  # pickled Request: its arguments are read on the ranks alone
    module: str
    count: int
    folder: str  # for the outputs and results of the ranks
    port: int  # of the store
    prefix: str  # of this call's keys in the store
    timeout: float


class Failure(NamedTuple):
    """What a rank leaves when its function raises."""

    error: Exception
    traceback: str
    at: float  # time.time(), to tell the first from those that follow


@dataclass
class Ranks:
    """The running ranks of one call, as the server reports them."""

    pids: list[int]
    codes: dict[int, int]  # rank -> exit code

    @property
    def running(self) -> list[int]:
        return [rank for rank in range(len(self.pids)) if rank not in self.codes]

    def send(self, number: int) -> None:
        """A signal to every rank that runs."""
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def end(self) -> None:
        """Kills the ranks and whatever they started; each leads a process group."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


class RankServer:
    """The client side of tests/rank_server.py."""

    def __init__(self) -> None:
        # Not at the top: a session without such a test needs no torch.
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._calls = 0
        log, name = tempfile.mkstemp(prefix="rank_server.")
        self._log = Path(name)
        self._answers, theirs = Pipe()
        path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
        # A server of several processes is needed anyway; alone, vllm would be imported for nothing.
        python = warm.python() if warm.is_shared() else sys.executable
        self._process = subprocess.Popen(
            [str(python), "-m", "tests.rank_server"],
            stdin=theirs.fileno(),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            cwd=REPO,
            start_new_session=True,
        )
        theirs.close()
        os.close(log)
        assert self._answer(START_S) == "ready"

    def call(self, count: int, request: Request, timeout: float) -> list[Any]:
        self._calls += 1
        with tempfile.TemporaryDirectory(prefix="ranks.") as folder:
            start = Start(
                pickle.dumps(request),
                request.module,
                count,
                folder,
                self._store.port,
                f"call{self._calls}",
                timeout,
            )
            with self._running(start) as ranks:
                hanging = self._wait(ranks, timeout)
            return _values(Path(folder), f"{request.module}.{request.name}", ranks, hanging)

    @contextlib.contextmanager
    def _running(self, start: Start) -> Iterator[Ranks]:
        """The ranks of a call. All are dead afterwards, also after an error or a time-out here."""
        try:
            self._answers.send(start)
            ranks = Ranks(self._answer(START_S), {})
        except BaseException:
            self.close()  # a module whose import hangs
            raise
        try:
            yield ranks
        finally:
            ranks.end()
            while ranks.running:
                self._take(ranks, START_S)

    def _wait(self, ranks: Ranks, timeout: float) -> list[int]:
        """Returns when all ranks have ended; the ranks that were killed because they did not."""
        deadline = time.monotonic() + timeout
        while ranks.running:
            if not self._take(ranks, max(0.0, deadline - time.monotonic())):
                hanging = ranks.running
                ranks.send(signal.SIGUSR1)  # each writes where it stands
                time.sleep(0.5)
                return hanging
            if any(ranks.codes.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return []

    def _take(self, ranks: Ranks, timeout: float) -> bool:
        """Notes the next rank that ended; False when none does in time."""
        if not self._answers.poll(timeout):
            return False
        rank, code = self._answer(START_S)
        ranks.codes[rank] = code
        return True

    def _answer(self, timeout: float) -> Any:
        try:
            if self._answers.poll(timeout):
                answer = self._answers.recv()
                if not isinstance(answer, Failure):
                    return answer
                answer.error.add_note(f"in the server of the ranks:\n{answer.traceback}")
                raise answer.error
        except EOFError:
            pass
        tail = _tail(self._log)
        self.close()
        raise AssertionError(f"the server of the ranks ended or hangs:\n{tail}")

    @property
    def alive(self) -> bool:
        return not self._answers.closed and self._process.poll() is None

    def close(self) -> None:
        self._answers.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.unlink(missing_ok=True)


def _values(folder: Path, name: str, ranks: Ranks, hanging: Sequence[int]) -> list[Any]:
    """What the ranks returned; raises what went wrong first."""
    results = [_result(folder / f"{rank}.result") for rank in range(len(ranks.pids))]
    failed = [rank for rank, result in enumerate(results) if isinstance(result, Failure)]
    ended = {rank: code for rank, code in sorted(ranks.codes.items()) if rank not in hanging}
    for rank, code in ended.items():
        # Before the exceptions of the others, who lost their connection to it.
        output = _tail(folder / f"{rank}.output")
        assert code in (0, FAILED), f"rank {rank} in {name}: exit code {code}\n{output}"
    if failed:
        first = min(failed, key=lambda rank: results[rank].at)
        failure = results[first]
        failure.error.add_note(f"rank {first} of {len(results)} in {name}:\n{failure.traceback}")
        raise failure.error
    outputs = [f"rank {rank}:\n{_tail(folder / f'{rank}.output')}" for rank in hanging]
    assert not hanging, f"ranks {hanging} in {name} did not end in time\n" + "\n".join(outputs)
    for rank in range(len(results)):
        print(_tail(folder / f"{rank}.output"), end="")  # pytest shows it when the test fails
    return results


def _result(file: Path) -> Any:
    return pickle.loads(file.read_bytes()) if file.exists() else None


def _tail(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return "".join(f"{line}\n" for line in lines)


_servers: list[RankServer] = []


def _server() -> RankServer:
    if not _servers or not _servers[-1].alive:
        _servers.append(RankServer())
    return _servers[-1]


def close() -> None:
    """Ends what this session started."""
    for server in _servers:
        if server.alive:
            server.close()
    _servers.clear()
