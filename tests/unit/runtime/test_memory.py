"""Memory of the process, of its phases, and what control groups leave of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.runtime.memory import GIB, Ledger, available_gib, memory_in_use, resident_gib


def test_the_last_record_of_a_phase_counts_and_a_step_starts_empty():
    values = iter([1.0, 2.0, 5.0])
    ledger = Ledger(lambda: {"host": next(values)})
    for phase in ("sync", "generate", "generate"):
        ledger.record(phase)
    assert ledger.end_step() == {"memory/sync_host_gib": 1.0, "memory/generate_host_gib": 5.0}
    assert ledger.end_step() == {}


def test_resident_memory_follows_an_allocation():
    before = resident_gib()
    kept = torch.ones(2**26)  # a quarter of a GiB
    assert 0.2 < resident_gib() - before < 0.4
    assert kept.numel()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_without_a_device_only_the_host_is_measured():
    assert list(memory_in_use(lambda: 7)) == ["host"]


def test_memory_in_use_with_a_device(monkeypatch):
    """Of 80 GiB 30 are free; torch has 20 of them, the engine 7; what is left is contexts and
    libraries."""
    answers = {"is_available": True, "memory_allocated": 18 * GIB, "memory_reserved": 20 * GIB}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 * GIB, 80 * GIB))
    found = memory_in_use(lambda: 7 * GIB)
    found.pop("host")
    assert found == {"allocated": 18.0, "reserved": 20.0, "engine": 7.0, "used": 50.0}


def write_machine(root: Path, cgroup: str, **groups: tuple[object, int]) -> Path:
    """A made-up machine with 64 GiB available. ``groups``: folder below /sys/fs/cgroup, / written
    as __: its limit and use in GiB."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 * 2**20} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, (limit, used) in groups.items():
        first = name.startswith("memory")
        folder = root / "sys/fs/cgroup" / name.replace("top", "").replace("__", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(
            f"{limit if limit == 'max' else limit * GIB}\n"
        )
        (folder / ("memory.usage_in_bytes" if first else "memory.current")).write_text(
            f"{used * GIB}\n"
        )
        total = "total_" if first else ""
        (folder / "memory.stat").write_text(
            f"anon 5\n{total}inactive_file {GIB}\n{total}active_file {2 * GIB}\n"
        )
    return root


SLURM = "0::/slurm/job_7/step_0\n"
FIRST = "9:name=systemd:/\n4:cpu,memory:/slurm/job_7\n0::/\n"


@pytest.mark.parametrize(
    ("cgroup", "groups", "left"),
    [
        ("0::/\n", {}, 64),
        (
            SLURM,
            {"slurm": ("max", 50), "slurm__job_7": (20, 13), "slurm__job_7__step_0": ("max", 13)},
            20 - 13 + 3,
        ),
        (SLURM, {"slurm__job_7": (20, 13), "slurm__job_7__step_0": (12, 4)}, 10),
        (
            SLURM,
            {"slurm__job_7": (20, 3), "slurm__job_7__step_0": (12, 4), "slurm__job_8": (5, 4)},
            11,
        ),
        (SLURM, {"slurm__job_7": (90, 5)}, 64),
        ("0::/docker/3f\n", {"top": (30, 10)}, 23),  # a container sees its own group at the top
        (FIRST, {"memory": (2**30, 60), "memory__slurm__job_7": (20, 13)}, 10),
        (FIRST, {"memory": (25, 13)}, 15),
    ],
)
def test_what_control_groups_leave_is_available(tmp_path, cgroup, groups, left):
    assert available_gib(write_machine(tmp_path, cgroup, **groups)) == left


def test_this_machine_has_memory_left():
    assert 0 < available_gib() < 1e5
