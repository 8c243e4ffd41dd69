"""Room on a disk: how much is free, and whether a failed write failed for want of it."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.errors import first_line

FULL = (errno.ENOSPC, errno.EDQUOT)
# What libraries that are not Python say, without an error number.
FULL_TEXTS = ("No space left on device", "Disk quota exceeded")
# Less than this is as good as nothing: no write of a tensor fits.
NOTHING_BYTES = 1 << 20
GB = 10**9


def free_bytes(folder: Path) -> int:
    """Free bytes where ``folder`` is or, if it does not exist yet, where it would be made."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def used_bytes(folder: Path) -> int:
    """Sum of the sizes of the files below ``folder``; 0 where there is none."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def as_text(size: int) -> str:
    """Decimal units, as disks are sold.

    Example: 1_230_000_000 is "1.23 GB", 5_000 is "0.005 MB".
    """
    return f"{size / GB:.2f} GB" if size >= GB // 10 else f"{size / 10**6:.3f} MB"


@contextlib.contextmanager
def room_for(folder: Path, needed: int, what: str) -> Iterator[None]:
    """Around writing ``what`` below ``folder``: failing for want of room becomes the user's error.

    Args:
        needed: bytes that ``what`` takes in all. Writers of archives say odd things when a disk is
            full ("unexpected pos"): their failure counts as that where what is still to be written
            is more than what is free.

    Raises:
        ValueError: no space left: names the folder, what was needed and what is free.
    """
    try:
        yield
    except Exception as error:
        still_needed = max(needed - used_bytes(folder), NOTHING_BYTES)
        if not (says_full(error) or free_bytes(folder) < still_needed):
            raise
        raise ValueError(
            f"no space left on the disk of {folder}: {what} takes {as_text(needed)}, "
            f"{as_text(free_bytes(folder))} are free ({first_line(error)}); make room and start "
            "again: the run goes on from its last whole checkpoint, what was half written is removed"
        ) from error


def says_full(error: BaseException | None) -> bool:
    """Whether the error, one that it was raised from, or one that it collects from other ranks
    (torch's CheckpointException) is that of a full disk or an exhausted quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if any(text in str(error) for text in FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False
