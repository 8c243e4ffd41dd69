"""Which rank of a launch reports the failure: the first that claims it, and no other.

The ranks of a machine decide it by a file in the folder that torchrun made for this start: it is
there before any rank joins the others, needs no memory, network or thread, and goes with the start.
Machines decide it among themselves by the store of the launch, as far as that still answers.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

FAILED_HOST = "failed_host"  # in the folder of a run
_POLL_S = 0.02
STORE_S = 3.0  # a store whose machine is gone may never answer


@dataclass
class FirstFailure:
    """One per process."""

    # Private to this start of the launch on this machine; None where the ranks have none in common.
    # Then, without ``elsewhere``, every rank wins: better twice than not at all.
    folder: Path | None
    # Whether this process is the first of all machines, too.
    elsewhere: Callable[[], bool] | None = None
    size: int = 1  # number of ranks on this machine
    # The first here, and not the first of all machines.
    lost_elsewhere: bool = field(default=False, init=False)

    def arrive(self) -> None:
        """Notes that this process runs and handles its own failures."""
        if self.folder is not None:
            create(self.folder / f"arrived_{os.getpid()}", "")

    def complete(self) -> bool:
        """Whether all ranks of this machine have arrived."""
        return self.folder is None or len(list(self.folder.glob("arrived_*"))) >= self.size

    def claim(self) -> bool:
        """True for one process of the launch, which has to report its error and then to call
        ``mark_reported``.

        When that process dies before it has reported, the next one that claims it succeeds.
        """
        if not self.claim_here():
            return False
        if self.elsewhere is None or bounded(self.elsewhere):
            return True
        self.lost_elsewhere = True
        self.mark_reported()  # on another machine
        return False

    def claim_here(self) -> bool:
        """As ``claim``, among the processes of this machine."""
        if self.folder is None:
            return True
        for turn in itertools.count():
            claim = self.folder / f"first_failure_{turn}"
            if create(claim, str(os.getpid())):
                return True
            # In this order: a winner that is dead by now has reported before it ended, or never.
            if alive(int(claim.read_text())) or self.decided():
                return False
        raise AssertionError("unreachable")

    def mark_reported(self) -> None:
        """Notes that the winner has reported."""
        if self.folder is not None:
            create(self.folder / "failure_reported", str(os.getpid()))

    def decided(self) -> bool:
        """Whether a process of this machine has reported its error."""
        return self.folder is not None and (self.folder / "failure_reported").exists()

    def pending(self) -> bool:
        """Whether a living process has won and not reported yet."""
        if self.folder is None or self.decided():
            return False
        claims = self.folder.glob("first_failure_[0-9]*")
        return any(alive(int(claim.read_text())) for claim in claims)

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Whether the condition ``until`` comes true within ``seconds``."""
        end = time.monotonic() + seconds
        while not until():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True


def create(path: Path, text: str) -> bool:
    """Makes a file with this content atomically; False when it exists already.

    True also where the disk takes no file: nothing can be decided then, and a message that comes
    twice is better than none.
    """
    # A second name for a file that is whole: no process reads half of it, and of two processes that
    # give the same name one fails, on a network file system too.
    draft = path.with_name(f"draft_{os.getpid()}_{threading.get_ident()}")
    try:
        draft.write_text(text)
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:
        return True
    finally:
        draft.unlink(missing_ok=True)
    return True


def note_failed_host(file: Path | None, host: str) -> None:
    """Writes the machine on which the launch failed, for the batch script that starts it again on
    others: srun can only tell which task ended first. The first note stays.

    ``file``: None where it is not read. ``host``: empty where no machine is known to be at fault.
    """
    if file is not None:
        bounded(lambda: create(file, host + "\n"))  # a disk that does not answer is not waited for


def alive(pid: int) -> bool:
    """Whether the process runs on this machine; False for a zombie."""
    try:
        os.kill(pid, 0)  # signal 0: only checks
    except PermissionError:  # it exists and belongs to another user
        return True
    except OSError:
        return False
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    """The letter of the kernel for what the process does, see proc(5); "" where there is none."""
    try:
        # The state follows the name, which stands in brackets and may itself contain some.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def bounded(action: Callable[[], bool]) -> bool:
    """What ``action`` returns; True when it raises or does not answer within ``STORE_S``."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(action()), daemon=True)
    thread.start()
    thread.join(STORE_S)
    return answers[0] if answers else True


def connect(timeout_s: float = 30.0) -> Any:
    """Another connection to the launch's store: that of the group is the main thread's."""
    import torch.distributed as dist  # here: a rank may fail before it has loaded it

    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
