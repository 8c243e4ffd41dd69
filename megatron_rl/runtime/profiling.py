"""Traces of chosen steps, a file a rank."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd.profiler import emit_nvtx
from torch.profiler import ProfilerActivity, profile, supported_activities

_NUM_OPERATORS = 40  # lines of the table of a trace


@dataclass(frozen=True)
class Profiler:
    """Writes what a rank does in chosen steps to ``folder``, created by the first of them.

    ``torch``: a trace (``step_S_rank_R.json.gz``, for Perfetto) and a table of the operators that
    take longest (``.txt``). ``memory``: every allocation on the GPU (``.pickle``, for
    torch's page ``memory_viz``). ``nsys``: nothing by itself; ``nsys profile
    --capture-range=cudaProfilerApi`` records these steps, with operators and phases as ranges.
    """

    steps: Sequence[int]  # counted from 1
    kind: str  # ``torch``, ``memory`` or ``nsys``; the last two need a GPU
    folder: Path
    rank: int

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Records what runs inside, if ``step`` was chosen."""
        if step not in self.steps:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step}_rank_{self.rank}"
        record = {"torch": _trace, "memory": _allocations, "nsys": _captured_by_nsys}[self.kind]
        with record(path):
            yield


@contextmanager
def _trace(path: Path) -> Iterator[None]:
    activities = supported_activities()
    on_gpu = ProfilerActivity.CUDA in activities
    sort_by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    with profile(activities=activities) as recorded:
        yield
    recorded.export_chrome_trace(str(path.with_suffix(".json.gz")))
    table = recorded.key_averages().table(sort_by=sort_by, row_limit=_NUM_OPERATORS)
    path.with_suffix(".txt").write_text(table)


@contextmanager
def _allocations(path: Path) -> Iterator[None]:
    torch.cuda.memory._record_memory_history()
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def _captured_by_nsys(path: Path) -> Iterator[None]:
    with torch.cuda.profiler.profile(), emit_nvtx():
        yield
