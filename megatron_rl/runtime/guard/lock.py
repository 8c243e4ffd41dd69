"""A folder belongs to one live process: a lock that the process holds until it ends.

POSIX record locks (``fcntl.lockf``) on ``folder/.lock``. The kernel frees them with the process,
however it ends, and children do not inherit them: neither a dead holder nor an orphan blocks.

Network file systems: NFSv4 has these locks in its protocol, NFSv3 through lockd; both then hold
between hosts. Not covered: mounts with ``nolock`` or ``local_lock`` (the lock is seen on its own
host only), file systems without locks such as Lustre mounted without ``flock`` (logged as a
warning), a server that loses the lock in a restart, and a folder removed under a live run.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import struct
import time
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = ".lock"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# struct flock of Linux on 64-bit processors: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi4x")
# Open for the life of the process: a record lock is lost when ANY descriptor of its file is closed,
# so a folder that is held already must not be opened a second time.
_held: dict[Path, int] = {}


def hold(folder: Path, launch_id: str) -> None:
    """Makes this process the only holder of ``folder`` until it ends; no-op the second time.

    Raises:
        ValueError: another process holds it; the message says which, on which host, since when.
        OSError: the lock file cannot be made.
    """
    path = folder.resolve() / NAME
    if path in _held:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            holder = _holder(descriptor)
            os.close(descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise ValueError(
                f"run_dir = {folder}: another run is using it ({holder}); wait until it ends, stop"
                " it, or give another run_dir"
            ) from None
        logger.warning(
            "run_dir = %s: its file system has no locks (%s); a second run would not be noticed",
            folder,
            error.strerror,
        )
    _held[path] = descriptor
    _sign(descriptor, launch_id)


def _sign(descriptor: int, launch_id: str) -> None:
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "launch": launch_id,
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)
    os.fsync(descriptor)


def _holder(descriptor: int) -> str:
    """The process that signed last, as text."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return "host {host}, process {pid}, launch {launch}, since {since}".format(**holder)
    except (ValueError, KeyError, TypeError):
        return "a process that has not signed yet"  # read between its lock and its signature


def holder(folder: Path) -> str | None:
    """The other process that holds ``folder``, as text; None where none does.

    Also None where the file system has no locks. Takes no lock, so that it blocks no other process;
    not for a process that holds ``folder`` itself, which would lose it.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else _holder(descriptor)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return None
    finally:
        os.close(descriptor)
