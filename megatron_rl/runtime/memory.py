"""Memory of this process and of its device."""

from __future__ import annotations

import logging
import resource
from collections import deque
from collections.abc import Callable, Mapping
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
    """GiB in use now: ``host`` (resident set) and, with a CUDA device, ``allocated`` and ``reserved`` by torch and ``engine``, what
    the engine holds in an allocator of its own."""
    values = {"host": resident_gib()}
    if torch.cuda.is_available():
        values["allocated"] = torch.cuda.memory_allocated() / GIB
        values["reserved"] = torch.cuda.memory_reserved() / GIB
        values["engine"] = engine_bytes() / GIB
    return values


def available_gib() -> float:
    """Host memory that can still be taken without swapping, or the limit of this process's container where that is less."""
    table = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    limits = [int(table["MemAvailable"].split()[0]) * 1024]
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        limits.append(int(text))
    return min(limits) / GIB


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
