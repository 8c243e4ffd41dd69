"""Disk space: how much is free, and whether a write failed because there was none."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.errors import chain, first_line

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Messages of libraries that are not Python, which come without an error number.
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded")
_USELESS_BYTES = 1 << 20  # less than this holds no tensor
GB = 10**9


def free_bytes(folder: Path) -> int:
    """Free bytes where ``folder`` is or, if it does not exist yet, where it would be made."""
    return shutil.disk_usage(_there(folder)).free


def _there(folder: Path) -> Path:
    places = (folder.absolute(), *folder.absolute().parents)
    return next(place for place in places if place.exists())


def used_bytes(folder: Path) -> int:
    """Sum of the sizes of the files below ``folder``; 0 where there is none."""
    total = 0
    for file in folder.rglob("*"):
        # Other processes write there: a file may be renamed or removed while it is looked at.
        with contextlib.suppress(FileNotFoundError):
            if file.is_file():
                total += file.stat().st_size
    return total


def as_text(size: int) -> str:
    """Decimal units, as disks are sold.

    Example: 1_230_000_000 is "1.23 GB", 5_000 is "0.005 MB", 820 is "820 bytes".
    """
    if size >= GB // 10:
        return f"{size / GB:.2f} GB"
    return f"{size} bytes" if size < 10**3 else f"{size / 10**6:.3f} MB"


@contextlib.contextmanager
def room_for(folder: Path, needed: int, what: str) -> Iterator[None]:
    """Around writing ``what`` below ``folder``: turns a full disk into an error of the user's.

    Args:
        needed: bytes that ``what`` takes in all. Writers of archives fail with unrelated messages
            on a full disk ("unexpected pos"): that counts as a full disk where less is free than
            is still to be written.

    Raises:
        ValueError: no space left; names the folder, what was needed and what is free.
    """
    try:
        yield
    except Exception as error:
        still_needed = max(needed - used_bytes(folder), _USELESS_BYTES)
        if not (says_full(error) or free_bytes(folder) < still_needed):
            raise
        num_files = os.statvfs(_there(folder)).f_favail  # a disk may be out of these alone
        raise ValueError(
            f"no space left on the disk of {folder}: {what} takes {as_text(needed)},"
            f" {as_text(free_bytes(folder))} and {num_files} files are free ({first_line(error)});"
            " make room and start again: the run resumes from its last whole checkpoint, what was"
            " half written is removed"
        ) from error


def says_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, means a full disk or an exhausted quota."""
    for link in chain(error):
        if isinstance(link, OSError) and link.errno in _FULL:
            return True
        # torch's CheckpointException holds the errors of other ranks as text.
        if any(text in str(link) for text in _FULL_TEXTS):
            return True
    return False
