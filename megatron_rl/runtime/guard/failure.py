"""How a launch ends when something goes wrong: the rank that fails first reports it, once.

The first rank to fail (``guard/first_failure.py``) prints its error as the last thing on the
screen, writes it into the file that torchrun reads (TORCHELASTIC_ERROR_FILE), and exits. The others
wait until torchrun ends them: if one of them exited earlier, torchrun would end the first one
before its message is out. Errors that only follow from another rank's end (a broken connection)
wait for that rank's message; where none comes, the ranks that are gone are named.
"""

import contextlib
import errno
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import chain, first_few, first_line
from megatron_rl.runtime.guard.first_failure import FirstFailure, alive, connect, note_failed_host

_MAX_LINES = 12
_CAUSE_S = 1.0  # how long a consequence waits for the message of its cause,
_GONE_S = 5.0  # and then for a rank that can be named as gone
_WINNER_S = 15.0  # how long the first rank may take to report
_ARRIVE_S = 4.0  # for the slowest rank of a loaded machine to import what it needs
_FOLLOW_ELSEWHERE_S = 3.0  # for the message on another machine to come out
_FOLLOW_S = 6.0  # torchrun sends SIGTERM within 0.1 s of the first exit

# The words of gloo, NCCL and the store when another rank is gone, or never came.
_BROKEN_CONNECTION = re.compile(
    r"gloo|GLHF|NCCL|nccl|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|"
    r"Socket Timeout|failed to recv|failed to send|TCPStore|process group has been aborted"
)
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|Cannot allocate memory|bad_alloc|failed to map segment"
)
# A thread needs room for its stack and a place among the user's processes; the text is the same.
_OUT_OF_THREADS = re.compile(r"Resource temporarily unavailable|can't start new thread")
_OUT_OF_FILES = re.compile(r"[Tt]oo many open files")


@dataclass(frozen=True)
class Peer:
    """A rank of the launch: the machine it runs on and its process there."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True)
class FailureMessage:
    """``text`` is shown and written into the error file, ``traceback`` is shown above it."""

    text: str
    traceback: str = ""


class State:
    """What this process knows of its launch. One instance, as signals belong to the process."""

    def __init__(self) -> None:
        self.rank = _number("RANK", 0)
        self.peers: list[Peer] = []
        self.saved_step: int | None = None
        self.first_failure = _first_failure_of_launch()
        self.reporting = threading.Lock()  # held from the first error on, never released
        self.terminated = threading.Event()
        self.console: int | None = None  # where stderr was before it went to a file of this rank
        # Of the heartbeat, once there is one: how other machines learn of a failure reported here
        # (None where there are none), and that this rank ends as it should.
        self.announce: Callable[[str], None] | None = None
        self.goodbye: Callable[[], None] | None = None
        self.failed_host: Path | None = None  # see ``first_failure.note_failed_host``


def _number(variable: str, default: int) -> int:
    """A variable of torchrun; the default where it is none: ``launch.start`` refuses it."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


def _first_failure_of_launch() -> FirstFailure:
    """The first_failure of the ranks that torchrun started with this one."""
    size = _number("WORLD_SIZE", 1)
    local_size = _number("LOCAL_WORLD_SIZE", 1)
    if size == 1:
        return FirstFailure(None, None, local_size)
    # torchrun gives each rank a file <folder of this start>/<local rank>/error.json.
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return FirstFailure(None, _first_of_all_machines, local_size)
    elsewhere = _first_of_all_machines if size > local_size else None
    return FirstFailure(Path(file).parent.parent, elsewhere, local_size)


def _first_of_all_machines() -> bool:
    """Whether this process fails first, by the store of torchrun on the first machine."""
    try:
        store = connect(timeout_s=2)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        me = f"{socket.gethostname()}:{os.getpid()}"
        return store.compare_set(f"megatron_rl/first_failure/{start}", "", me) == me.encode()
    except (RuntimeError, ValueError, KeyError):
        return True  # without a store no other process is known to be first


STATE = State()


def saved(step: int) -> None:
    """Notes that the state after ``step`` is on the disk, for the message of an interruption."""
    STATE.saved_step = step


def exit_process(code: int) -> None:
    """Ends the process now: normal teardown of engines can hang on dead ranks, hence os._exit."""
    if code == 0 and STATE.goodbye is not None and not STATE.reporting.locked():
        STATE.goodbye()
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Its reader may be gone, and a stream that was closed before the start is None.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def report(error: BaseException) -> int:
    """Prints the error if this rank is the first to fail, else waits for the one that is.

    A ``ValueError`` or ``FileNotFoundError`` is the user's: one message. Anything else is a fault
    and comes with its traceback.

    Returns:
        The exit code: 1; 0 for a rank that only followed and was then ended by torchrun, so that
        torchrun's summary lists the rank that failed and no other.
    """
    # From here on a signal is noted, and does not cut the message short.
    try:
        _hold_signals()
    except KeyboardInterrupt as interrupt:  # a Ctrl-C between the error and here
        error = interrupt
        _hold_signals()
    if not STATE.reporting.acquire(blocking=False):
        threading.Event().wait()  # for ever: the thread that answers SIGTERM ends the process
    if isinstance(error, KeyboardInterrupt):
        if STATE.first_failure.claim():
            say(FailureMessage(f"interrupted{unsaved()}"))
        return 1
    gone: list[Peer] = []
    message = describe(error)
    host: str | None = socket.gethostname()
    if is_consequence(error):
        gone = _wait_for_cause()
        if not gone:
            host = None
        else:
            message = FailureMessage(f"error: {without_word(gone)}{unsaved()}")
    return say_or_follow(message, by_others=bool(gone), host=host)


def _hold_signals() -> None:
    """Keeps SIGTERM and Ctrl-C from cutting a message short. For the main thread only."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: STATE.terminated.set())


def say_or_follow(
    message: FailureMessage, *, by_others: bool = False, host: str | None = None
) -> int:
    """Prints ``message`` or follows the first rank; returns the exit code.

    Args:
        by_others: ranks of this machine have failed before this one.
        host: the machine at fault; None where it is not known.
    """
    first_failure = STATE.first_failure
    while not first_failure.claim():
        if first_failure.lost_elsewhere:
            write_error_file("another machine of the launch failed first, and says why")
            return _follow(_FOLLOW_ELSEWHERE_S)
        heard = first_failure.wait(
            lambda: first_failure.decided() or not first_failure.pending(), _WINNER_S
        )
        if first_failure.decided():
            return _follow()
        if not heard:
            break  # the winner lives and stays silent: better two messages than none
    if host is not None:
        note_failed_host(STATE.failed_host, host)
    say(message)
    if by_others:
        return _follow()
    # A rank that torchrun ends before it has arrived appears as one more failure in the summary.
    first_failure.wait(first_failure.complete, _ARRIVE_S)
    return 1


def say_on_this_machine(message: FailureMessage) -> int:
    """As ``say_or_follow`` for a message that every machine of the launch says."""
    if not STATE.first_failure.claim_here():
        return _follow()
    say(message)
    return 1


def _follow(seconds: float = _FOLLOW_S) -> int:
    """Waits for torchrun's SIGTERM after another rank's failure; returns the exit code.

    torchrun sends none on other machines than that of the failed rank: there the first rank exits
    before the others.
    """
    ended = STATE.first_failure.wait(STATE.terminated.is_set, seconds)
    return 0 if ended and not STATE.first_failure.lost_elsewhere else 1


def say(message: FailureMessage) -> None:
    """Prints the message as the last on the screen, and writes it into torchrun's file."""
    text = message.traceback + message.text + "\n"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
    _flush()
    if STATE.console is not None:
        os.write(STATE.console, text.encode())
    write_error_file(message.text)
    STATE.first_failure.mark_reported()
    if STATE.announce is not None:
        STATE.announce(message.text)


def write_error_file(text: str) -> None:
    """Writes ``text`` for torchrun, in the form of torch.distributed.elastic's error handler."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    try:
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    except OSError as error:
        sys.stderr.write(f"(not written to {file}: {error.strerror})\n")


def describe(error: BaseException) -> FailureMessage:
    """The message of an exception, with a traceback if it is a fault of the program."""
    shortage = _out_of_memory(error) or _out_of_files(error)
    if shortage:
        return FailureMessage(f"error: {shortage}")
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return FailureMessage(
            f"error: {error.filename}: no such file or folder. If it was moved or deleted while the"
            " program ran, put it back and start again (resume=auto: from the last checkpoint)"
        )
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        where = f"{_place_of(error)}: {first_line(error)}"
        return FailureMessage(f"error: writing{where}; raise its limit (ulimit -f unlimited)")
    if isinstance(error, OSError) and error.filename is not None:
        remedy = "check the path, its permissions and its disk"
        return FailureMessage(f"error: {error.filename}: {error.strerror}; {remedy}")
    if isinstance(error, ValueError | FileNotFoundError) and not isinstance(error, UnicodeError):
        return FailureMessage(_first_lines(f"error: {error}"))
    text = f"[rank {STATE.rank}] error: {type(error).__name__}: {error}"
    return FailureMessage(_first_lines(text), "".join(traceback.format_exception(error)))


def _first_lines(text: str) -> str:
    """At most ``_MAX_LINES`` lines, the last of which counts those that were cut."""
    lines = text.splitlines()
    if len(lines) <= _MAX_LINES:
        return text
    num_cut = len(lines) - _MAX_LINES + 1
    return "\n".join([*lines[: _MAX_LINES - 1], f"  ... and {num_cut} more lines"])


def _out_of_memory(error: BaseException) -> str | None:
    """The message of an error that means "no memory left", with its place; else None."""
    text = str(error)
    threads = isinstance(error, RuntimeError) and _OUT_OF_THREADS.search(text)
    libraries = isinstance(error, RuntimeError | OSError | ImportError)
    by_text = libraries and _OUT_OF_MEMORY.search(text)
    if not (isinstance(error, MemoryError) or by_text or threads):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    limited = ""
    if limit != resource.RLIM_INFINITY:
        limited = f" This process may use {limit / 2**30:.1f} GiB (ulimit -v): raise that."
    details = f"{_place_of(error)}: {first_line(error)}.{limited}"
    if threads:
        return (
            f"rank {STATE.rank} is out of memory or of threads{details}\n"
            "Raise the limit on processes (ulimit -u, pids of the container), or start fewer ranks."
        )
    return (
        f"rank {STATE.rank} is out of memory{details}\n"
        "Lower batch.tokens_per_microbatch, rollout.kv_cache_gib or rollout.max_num_seqs, spread"
        " the model over more ranks\n"
        "(parallel, precision), or use a smaller model; tools/plan_memory.py computes what a rank"
        " needs."
    )


def _out_of_files(error: BaseException) -> str | None:
    """The message of an error that means "no more files or sockets can be opened"; else None."""
    if not isinstance(error, RuntimeError | OSError) or not _OUT_OF_FILES.search(str(error)):
        return None
    limit, largest = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"rank {STATE.rank} cannot open more files or connections{_place_of(error)}:"
        f" {first_line(error)}.\n"
        f"The limit is {limit} open files (ulimit -n): raise it, to 65536 for instance; without a"
        f" new login at most to {largest} (ulimit -Hn)."
    )


def _place_of(error: BaseException) -> str:
    """The innermost line of this package, e.g. `` in model.py:120 (forward)``; else empty."""
    frames = traceback.extract_tb(error.__traceback__)
    # Without the first frame, which is that of the entry point.
    own = [frame for frame in frames[1:] if "megatron_rl" in Path(frame.filename).parts]
    if not own:
        return ""
    innermost = own[-1]
    return f" in {Path(innermost.filename).name}:{innermost.lineno} ({innermost.name})"


def is_consequence(error: BaseException) -> bool:
    """Whether another rank's end, or its absence, can have caused this error."""
    if _out_of_files(error):
        return False
    for link in chain(error):  # a broken connection is often wrapped
        # By name: importing torch.distributed takes seconds, and it may not be loaded yet.
        from_torch = any(base.__name__ == "DistError" for base in type(link).__mro__)
        if from_torch or (isinstance(link, RuntimeError) and _BROKEN_CONNECTION.search(str(link))):
            return True
    return False


def _wait_for_cause() -> list[Peer]:
    """Waits until another rank reports; returns the ranks of this machine that died silently: none
    where a rank has reported, or all live."""
    first_failure = STATE.first_failure

    def heard() -> bool:
        return first_failure.decided() or first_failure.pending()

    if len(STATE.peers) > 1 and not first_failure.wait(heard, _CAUSE_S):
        first_failure.wait(lambda: heard() or bool(gone_ranks()), _GONE_S)
    return [] if heard() else gone_ranks()


def gone_ranks() -> list[Peer]:
    """The ranks of this machine whose processes do not run any more."""
    here = socket.gethostname()
    return [peer for peer in STATE.peers if peer.host == here and not alive(peer.pid)]


def without_word(gone: Sequence[Peer]) -> str:
    """Example: ``rank 1 (process 4711) ended without a message (killed? out of memory? ...)``"""
    return f"{named(gone)} ended without a message (killed? out of memory? `dmesg` may tell)"


def named(peers: Sequence[Peer]) -> str:
    """Example: ``rank 1 (process 4711) and rank 2 (process 4712)``; of many the first eight."""
    ranks = [f"rank {peer.rank} (process {peer.pid})" for peer in peers]
    return " and ".join(first_few(ranks, rest="{} more"))


def unsaved() -> str:
    """The end of a message that says what was saved; empty where no run is in progress."""
    if STATE.saved_step is None:
        return ""
    if STATE.saved_step == 0:
        return "; nothing was saved"
    return f"; nothing was saved since step {STATE.saved_step}"
