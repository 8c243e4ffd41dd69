"""Memory of this process and of its device."""

import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

GIB = 2**30


def resident_gib() -> float:
    """Resident set size now, in GiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / GIB


def memory_in_use(engine_bytes: Callable[[], int]) -> dict[str, float]:
    """GiB in use now, by kind.

    ``host`` is the resident set. With a CUDA device there are ``allocated`` and ``reserved`` by
    torch, ``engine`` in the engine's own allocator, and ``used`` of the whole device, by contexts,
    libraries and other processes too.
    """
    values = {"host": resident_gib()}
    if torch.cuda.is_available():
        values["allocated"] = torch.cuda.memory_allocated() / GIB
        values["reserved"] = torch.cuda.memory_reserved() / GIB
        values["engine"] = engine_bytes() / GIB
        free, total = torch.cuda.mem_get_info()
        values["used"] = (total - free) / GIB
    return values


def available_gib(root: Path = Path("/")) -> float:
    """Host memory that can still be taken without swapping, in GiB.

    Less where the control groups of this process leave less. ``root``: where proc and sys are.
    """
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    table = dict(line.split(":") for line in lines)
    available_kib = int(table["MemAvailable"].split()[0])
    return min([available_kib * 1024, *_left_in_cgroups(root)]) / GIB


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Bytes left in each control group of this process that limits memory.

    Such groups come from Slurm's --mem, a systemd slice or a container. In a container /proc may
    name a folder that is not mounted there; the container's own limit is then at the top.
    """
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        # The memory controller's folder and files, in version 2 of control groups and in version 1.
        if controllers == "":
            top = "sys/fs/cgroup"
            files = ["memory.max", "memory.current", ""]
        elif "memory" in controllers.split(","):
            top = "sys/fs/cgroup/memory"
            files = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_"]
        else:
            continue
        # A group is limited by all that contain it: from the top down to its own folder.
        group = root / top
        yield from _left_in(group, *files)
        for name in path.strip("/").split("/"):
            group /= name
            yield from _left_in(group, *files)


def _left_in(group: Path, limit_file: str, usage_file: str, prefix: str) -> Iterator[int]:
    """Bytes left in one control group; nothing where it has no limit."""
    if not (group / limit_file).is_file():
        return
    limit = (group / limit_file).read_text(encoding="ascii").strip()
    if limit == "max":
        return
    usage = int((group / usage_file).read_text(encoding="ascii"))
    rows = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    stat = dict(row.split() for row in rows)
    # Pages of files count as free: the kernel drops them when memory is needed.
    file_pages = int(stat[f"{prefix}active_file"]) + int(stat[f"{prefix}inactive_file"])
    yield int(limit) - usage + file_pages


class Ledger:
    """Memory in use at the end of every phase of a step; ``measure``: GiB in use now, by kind."""

    def __init__(self, measure: Callable[[], Mapping[str, float]]) -> None:
        self._measure = measure
        self._step: dict[str, float] = {}

    def record(self, phase: str) -> None:
        """Records the memory in use at the end of ``phase``; the last record of a step counts."""
        for kind, value in self._measure().items():
            self._step[f"memory/{phase}_{kind}_gib"] = value

    def end_step(self) -> dict[str, float]:
        """The metrics of the step, by name."""
        finished = self._step
        self._step = {}
        return finished
