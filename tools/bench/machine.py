"""The machine during a measurement, and what repeats say: shared by all benchmarks.

A figure taken while other programs had the cores says little. So every benchmark states the load
average, and how many cores other programs kept busy before and meanwhile; where that was more than
a tenth of the machine, its output says MEASURED UNDER LOAD and is no record.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LISTEN_S = 2.0  # before the start, when nothing of the benchmark runs
# Share of all cores that other programs may keep busy.
ALLOWED_SHARE = 0.1
MARK = "MEASURED UNDER LOAD"
STAT = Path("/proc/stat")


def busy_seconds(stat: str) -> float:
    """Seconds that all cores together were busy since the start of the machine, from the text of
    ``/proc/stat``.

    Columns of its first line: user, nice, system, idle, iowait, irq, softirq, steal; guest time is
    in user time already.
    """
    columns = [int(word) for word in stat.splitlines()[0].split()[1:9]]
    idle = columns[3] + columns[4]
    return (sum(columns) - idle) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor seconds of this process and of its children that have ended."""
    parts = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in parts)


@dataclass(frozen=True)
class Load:
    """``average``: load averages of 1, 5 and 15 minutes at the start. ``before`` and ``meanwhile``:
    cores that other programs kept busy just before the start, and during the benchmark (None where
    the system does not tell).
    """

    cores: int
    average: tuple[float, float, float]
    before: float | None
    meanwhile: float | None

    @property
    def is_high(self) -> bool:
        known = [cores for cores in (self.before, self.meanwhile) if cores is not None]
        return max(known, default=0.0) > ALLOWED_SHARE * self.cores

    def __str__(self) -> str:
        average = " ".join(f"{value:.2f}" for value in self.average)
        text = (
            f"load average {average} at the start; other programs kept {_cores(self.before)} of"
            f" {self.cores} cores busy before, "
        )
        text += f"{_cores(self.meanwhile)} meanwhile"
        return f"{text}: {MARK}" if self.is_high else text


def _cores(value: float | None) -> str:
    return "an unknown number" if value is None else f"{value:.2f}"


class Watch:
    """Made before anything is measured; ``load`` is asked for when all is done.

    Example::

        watch = Watch()
        ...  # the measurement
        print(watch.load())
    """

    def __init__(self, listen_s: float = LISTEN_S) -> None:
        self.average = os.getloadavg()
        start = self._now()
        time.sleep(listen_s)
        self.start = self._now()
        self.before = _others(start, self.start, 0.0)
        self.own = own_seconds()

    def load(self) -> Load:
        """What the machine did, but for this process and its children."""
        meanwhile = _others(self.start, self._now(), own_seconds() - self.own)
        return Load(os.cpu_count() or 1, self.average, self.before, meanwhile)

    @staticmethod
    def _now() -> tuple[float, float] | None:
        """(wall-clock, busy) seconds, or None on a system without ``/proc/stat``."""
        if not STAT.is_file():
            return None
        return time.perf_counter(), busy_seconds(STAT.read_text(encoding="ascii"))


def _others(
    start: tuple[float, float] | None, end: tuple[float, float] | None, own: float
) -> float | None:
    """Cores that others kept busy between two readings."""
    if start is None or end is None:
        return None
    wall = end[0] - start[0]
    return max(0.0, end[1] - start[1] - own) / wall if wall > 0 else 0.0


def description() -> str:
    """Processor, cores, Python: the machine in one line."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}"
    )


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeats."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """As in ``1.25 (1.20-1.31)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value; quartiles by linear interpolation between the values.

    Example: ``spread([1, 2, 3, 4, 5])`` is ``Spread(3, 2, 4)``.
    """
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)
