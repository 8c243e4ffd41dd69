"""Memory of this process and of its device."""

from __future__ import annotations

import logging
import resource
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

GIB = 2**30
WINDOW_STEPS = 10
log = logging.getLogger(__name__)


def resident_gib() -> float:
    """Resident set size now, in GiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / GIB


def memory_in_use(engine_bytes: Callable[[], int]) -> dict[str, float]:
    """GiB in use now: ``host`` (resident set) and, with a CUDA device, ``allocated`` and ``reserved``
    by torch, ``engine``, what the engine holds in an allocator of its own, and ``used``, all that is
    taken of the device: by contexts, libraries and other processes, too."""
    values = {"host": resident_gib()}
    if torch.cuda.is_available():
        values["allocated"] = torch.cuda.memory_allocated() / GIB
        values["reserved"] = torch.cuda.memory_reserved() / GIB
        values["engine"] = engine_bytes() / GIB
        free, total = torch.cuda.mem_get_info()
        values["used"] = (total - free) / GIB
    return values


def available_gib(root: Path = Path("/")) -> float:
    """Host memory that can still be taken without swapping, or what the control groups of this process leave where that is less.
    ``root``: where proc and sys are."""
    table = dict(line.split(":") for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines())
    return min([int(table["MemAvailable"].split()[0]) * 1024, *_left_in_cgroups(root)]) / GIB


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Bytes left in each control group above this process that limits memory (Slurm's --mem, a systemd slice, a container).

    Pages of files do not count as used: they are dropped when memory is wanted. In a container /proc may name a folder that is not
    mounted there; the container's own limit is then at the top of what is.
    """
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top, limit_name, used_name, prefix = "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, limit_name, used_name, prefix = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        names = path.strip("/").split("/")
        for group in (root.joinpath(top, *names[:depth]) for depth in range(len(names) + 1)):
            if not (group / limit_name).is_file() or (limit := (group / limit_name).read_text(encoding="ascii").strip()) == "max":
                continue
            table = dict(row.split() for row in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            files = int(table[f"{prefix}active_file"]) + int(table[f"{prefix}inactive_file"])
            yield int(limit) - int((group / used_name).read_text(encoding="ascii")) + files


class Ledger:
    """Memory in use at the end of every phase of a step, and an alarm when the floor of a phase rises.

    The floor is the least value of ``WINDOW_STEPS`` steps: peaks come and go, what is leaked stays.
    """

    def __init__(self, measure: Callable[[], Mapping[str, float]], alarm_growth_gib: float | None) -> None:
        """``measure`` gives GiB by kind; ``alarm_growth_gib``: growth of a floor from one window to the next that gets a warning
        (None: no alarm)."""
        self._measure, self._alarm = measure, alarm_growth_gib
        self._step: dict[str, float] = {}
        self._history: dict[str, deque[float]] = {}

    def record(self, phase: str) -> None:
        """Takes down the memory in use under the name of the phase that ends here; the last record of a step counts."""
        self._step |= {f"memory/{phase}_{kind}_gib": value for kind, value in self._measure().items()}

    def end_step(self) -> dict[str, float]:
        """The metrics of the step, by name; warns about floors that rose."""
        finished, self._step = self._step, {}
        for key, value in finished.items():
            history = self._history.setdefault(key, deque(maxlen=2 * WINDOW_STEPS))
            history.append(value)
            if self._alarm is not None and len(history) == 2 * WINDOW_STEPS:
                values = list(history)
                before, now = min(values[:WINDOW_STEPS]), min(values[WINDOW_STEPS:])
                if now - before > self._alarm:
                    log.warning("%s: the floor rose from %.2f to %.2f in %d steps", key, before, now, WINDOW_STEPS)
                    history.clear()
        return finished
