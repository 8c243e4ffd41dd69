"""How a launch ends when something goes wrong: whichever rank fails first says it, once.

The first rank to fail (``runtime/ballot.py``) prints its error as the last thing on the screen and
writes it into the file that torchrun reads (TORCHELASTIC_ERROR_FILE), then leaves. The others keep
still until torchrun ends them: a rank that left earlier would make torchrun end the first one, too.
Errors that only follow from another rank's end (a connection that breaks) wait for its message;
where none comes, the ranks that are gone are named.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

from megatron_rl.errors import first_line
from megatron_rl.runtime.ballot import Ballot, alive

MAX_LINES = 12
CAUSE_S = 1.0  # an error that follows from another one waits so long for its message
GONE_S = 5.0  # then so long until the rank that is gone can be named
WINNER_S = 15.0  # the first rank may take so long to say its message
ARRIVE_S = 4.0  # the slowest rank of a loaded machine to import what it needs
FOLLOW_ELSEWHERE_S = 3.0  # for the message on another machine to come out
FOLLOW_S = 6.0  # torchrun sends SIGTERM within 0.1 s of the first exit

# What gloo, NCCL and the store say when another rank has gone, or never came.
BROKEN_CONNECTION = re.compile(
    r"gloo|GLHF|NCCL|nccl|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|"
    r"Socket Timeout|failed to recv|failed to send|TCPStore|process group has been aborted"
)
OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|Cannot allocate memory|bad_alloc|failed to map segment"
)
# A thread needs room for its stack and a place among the user's processes; the text is the same.
OUT_OF_THREADS = re.compile(r"Resource temporarily unavailable|can't start new thread")
OUT_OF_FILES = re.compile(r"[Tt]oo many open files")


@dataclass(frozen=True)
class Peer:
    """A rank of the launch: the machine it runs on and its process there."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True)
class Message:
    """``text`` is shown and written into the error file, ``traceback`` is shown above it."""

    text: str
    traceback: str = ""


class State:
    """Of this process. Signals and exceptions belong to the process, so there is one of it."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.peers: list[Peer] = []
        self.saved_step: int | None = None
        self.ballot = ballot_of_launch()
        self.reporting = threading.Lock()  # held from the first error on, never released
        self.terminated = threading.Event()


def ballot_of_launch() -> Ballot:
    """torchrun gives each rank a file ``<folder of this start>/<local rank>/error.json``."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    folder = Path(file).parent.parent if file and size > 1 else None
    several_machines = size > local_size
    unknown = folder is None and size > 1
    elsewhere = first_of_all_machines if several_machines or unknown else None
    return Ballot(folder, elsewhere, local_size)


def first_of_all_machines() -> bool:
    """Asks the store of the launch, which is that of torchrun on the first machine."""
    import torch.distributed as dist

    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=2),
            wait_for_workers=False,
        )
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        me = f"{socket.gethostname()}:{os.getpid()}"
        return store.compare_set(f"megatron_rl/first_failure/{start}", "", me) == me.encode()
    except (RuntimeError, ValueError, KeyError):  # no store, no answer: nobody else is known to be first
        return True


STATE = State()


def joined(rank: int, peers: list[Peer]) -> None:
    """This rank has met all others."""
    STATE.rank, STATE.peers = rank, peers


def saved(step: int) -> None:
    """The state after ``step`` is on the disk: said when the run is interrupted."""
    STATE.saved_step = step


def leave(code: int) -> None:
    """Ends the process now. Engines hold threads and groups whose orderly teardown can wait for ranks
    that are already gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report(error: BaseException, rank: int | None = None) -> int:
    """Says the error if this rank is the first to fail, else waits for the one that is.

    A ``ValueError`` or ``FileNotFoundError`` is the user's: one message. Anything else is a fault and
    comes with its traceback.

    Returns:
        The exit code: 1; 0 for a rank that only followed and was then ended by torchrun, so that
        torchrun's summary lists the rank that failed and no other.
    """
    if rank is not None:
        STATE.rank = rank
    try:
        hold_signals()
    except KeyboardInterrupt as interrupt:  # between the error and here
        error = interrupt
        hold_signals()
    if not STATE.reporting.acquire(blocking=False):
        threading.Event().wait()  # the thread that answers SIGTERM ends the process
    if isinstance(error, KeyboardInterrupt):
        if STATE.ballot.win():
            say(Message(f"interrupted{unsaved()}"))
        return 1
    gone: list[Peer] = []
    message = describe(error)
    if is_consequence(error):
        gone = wait_for_cause()
        message = Message(f"error: {without_word(gone)}{unsaved()}") if gone else message
    return say_or_follow(message, by_others=bool(gone))


def hold_signals() -> None:
    """SIGTERM and Ctrl-C no longer cut a message short. Only the main thread may do this."""

    def note(number: int, frame: FrameType | None) -> None:
        STATE.terminated.set()

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, note)


def say_or_follow(message: Message, *, by_others: bool = False) -> int:
    """Returns the exit code. ``by_others``: ranks of this machine have failed before this one."""
    ballot = STATE.ballot
    while not ballot.win():
        if ballot.lost_elsewhere:
            write_error_file("another machine of the launch failed first, and says why")
            return follow(FOLLOW_ELSEWHERE_S)
        heard = ballot.wait(lambda: ballot.decided() or not ballot.pending(), WINNER_S)
        if ballot.decided():
            return follow()
        if not heard:  # it lives and says nothing: better twice than not at all
            break
    say(message)
    if by_others:
        return follow()
    # A rank that torchrun ends before it has arrived appears as one more failure in the summary.
    ballot.wait(ballot.complete, ARRIVE_S)
    return 1


def follow(seconds: float = FOLLOW_S) -> int:
    """Another rank has failed: wait for torchrun's SIGTERM. The torchrun of another machine than that
    of the failed rank sends none; there the first rank leaves before the others."""
    ended = STATE.ballot.wait(STATE.terminated.is_set, seconds)
    return 0 if ended and not STATE.ballot.lost_elsewhere else 1


def say(message: Message) -> None:
    """On the screen, last, and into torchrun's file."""
    sys.stdout.flush()
    sys.stderr.write(message.traceback + message.text + "\n")
    sys.stderr.flush()
    write_error_file(message.text)
    STATE.ballot.said()


def write_error_file(text: str) -> None:
    """In the form of torch.distributed.elastic.multiprocessing.errors, whose reader is torchrun."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    try:
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    except OSError as error:
        sys.stderr.write(f"(not written to {file}: {error.strerror})\n")


def describe(error: BaseException) -> Message:
    """The message of an exception."""
    shortage = out_of_memory(error) or out_of_files(error)
    if shortage:
        return Message(f"error: {shortage}")
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return Message(
            f"error: {error.filename}: no such file or folder. If it was moved or deleted while the "
            "program ran, put it back and start again (resume=auto: from the last checkpoint)"
        )
    known = isinstance(error, ValueError | FileNotFoundError)
    if known and not isinstance(error, UnicodeError):
        return Message(shortened(f"error: {error}"))
    text = f"[rank {STATE.rank}] error: {type(error).__name__}: {error}"
    return Message(shortened(text), "".join(traceback.format_exception(error)))


def shortened(text: str) -> str:
    """At most MAX_LINES lines; says how many more there were."""
    lines = text.splitlines()
    if len(lines) <= MAX_LINES:
        return text
    rest = len(lines) - MAX_LINES + 1
    return "\n".join([*lines[: MAX_LINES - 1], f"  ... and {rest} more lines"])


def out_of_memory(error: BaseException) -> str | None:
    """What to say of an error that means "no memory left", with the place in this package; else None."""
    text = str(error)
    threads = isinstance(error, RuntimeError) and OUT_OF_THREADS.search(text)
    by_text = isinstance(error, RuntimeError | OSError | ImportError) and OUT_OF_MEMORY.search(text)
    if not (isinstance(error, MemoryError) or by_text or threads):
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    limited = ""
    if limit != resource.RLIM_INFINITY:
        limited = f" This process may use {limit / 2**30:.1f} GiB (ulimit -v): raise that."
    said = f"{place_of(error)}: {first_line(error)}.{limited}"
    if threads:
        return (
            f"rank {STATE.rank} is out of memory or of threads{said}\n"
            "Raise the limit on processes (ulimit -u, pids of the container), or start fewer ranks."
        )
    return (
        f"rank {STATE.rank} is out of memory{said}\n"
        "Lower batch.tokens_per_microbatch, rollout.kv_cache_gib or rollout.max_num_seqs, spread the "
        "model over more ranks\n(parallel, precision), or use a smaller model; tools/plan_memory.py "
        "computes what a rank needs."
    )


def out_of_files(error: BaseException) -> str | None:
    """What to say of an error that means "no more files and sockets can be opened"; else None."""
    if not isinstance(error, RuntimeError | OSError) or not OUT_OF_FILES.search(str(error)):
        return None
    import resource

    limit, largest = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"rank {STATE.rank} cannot open more files or connections{place_of(error)}: {first_line(error)}.\n"
        f"The limit is {limit} open files (ulimit -n): raise it, to 65536 for instance; without a new "
        f"login at most to {largest} (ulimit -Hn)."
    )


def place_of(error: BaseException) -> str:
    """The innermost line of this package, e.g. `` in model.py:120 (forward)``; empty where unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames[1:] if "megatron_rl" in Path(frame.filename).parts]
    return f" in {Path(own[-1].filename).name}:{own[-1].lineno} ({own[-1].name})" if own else ""


def is_consequence(error: BaseException) -> bool:
    """Whether another rank's end, or its absence, can have caused this. Looked for in the whole chain:
    a broken connection is often wrapped."""
    if out_of_files(error):
        return False
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        from_torch = any(kind.__name__ == "DistError" for kind in type(link).__mro__)
        if from_torch or (isinstance(link, RuntimeError) and BROKEN_CONNECTION.search(str(link))):
            return True
        link = link.__cause__ or link.__context__
    return False


def wait_for_cause() -> list[Peer]:
    """Waits until another rank says why it ended. Returns the ranks of this machine that are gone
    without a word; none when there is a word, or when all live."""
    ballot = STATE.ballot

    def heard() -> bool:
        return ballot.decided() or ballot.pending()

    if len(STATE.peers) > 1 and not ballot.wait(heard, CAUSE_S):
        ballot.wait(lambda: heard() or bool(gone_ranks()), GONE_S)
    return [] if heard() else gone_ranks()


def gone_ranks() -> list[Peer]:
    here = socket.gethostname()
    return [peer for peer in STATE.peers if peer.host == here and not alive(peer.pid)]


def without_word(gone: list[Peer]) -> str:
    """Example: ``rank 1 (process 4711) ended without a message (killed? out of memory? ...)``"""
    named = " and ".join(f"rank {peer.rank} (process {peer.pid})" for peer in gone[:8])
    more = f" and {len(gone) - 8} more" if len(gone) > 8 else ""
    return f"{named}{more} ended without a message (killed? out of memory? `dmesg` may tell)"


def unsaved() -> str:
    """For the end of a message. Nothing where no run is in progress."""
    if STATE.saved_step is None:
        return ""
    return f"; nothing was saved since step {STATE.saved_step}" if STATE.saved_step else "; nothing was saved"
