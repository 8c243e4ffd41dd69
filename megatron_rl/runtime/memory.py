"""Memory of this process."""

from __future__ import annotations

import resource
from pathlib import Path


def resident_gib() -> float:
    """Resident set size now, in GiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**30
