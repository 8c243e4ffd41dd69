"""The program that runs everything for a GPU: in order, nothing behind a failed probe; what
fails or hangs is a row, what it started is gone; all of it runs on a CPU when tiny."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.launch import REPO, run

SCRIPT = REPO / "tools/bench/gpu_all.py"
sys.path.append(str(SCRIPT.parent))  # a program finds what lies beside it
SPEC = importlib.util.spec_from_file_location("gpu_all", SCRIPT)
gpu_all = importlib.util.module_from_spec(SPEC)
sys.modules["gpu_all"] = gpu_all  # dataclasses look their module up
SPEC.loader.exec_module(gpu_all)

GOOD = """
import json, pathlib, sys
rows = [{"precision": "bf16", "seconds": 0.123456, "rows": 8}, {"precision": "x", "seconds": 2.0}]
pathlib.Path(sys.argv[1]).write_text(json.dumps(rows))
"""
# A child of its own, which would outlive its parent.
HANGS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1] + ".child").write_text(str(child.pid))
time.sleep(600)
"""


def outcome(tmp_path: Path, program: str, limit_s: float = 60.0) -> gpu_all.Outcome:
    results = tmp_path / "results.json"
    return gpu_all.run("it", [sys.executable, "-c", program, results], results, limit_s)


def test_results_become_rows(tmp_path):
    found = outcome(tmp_path, GOOD)
    assert found.failure is None
    lines = gpu_all.table([found]).splitlines()
    assert lines[2] == f"| it | bf16 | seconds 0.1235, rows 8 | {found.seconds:.0f} |"
    assert lines[3] == "| it | x | seconds 2 |  |"


@pytest.mark.parametrize(
    ("program", "failure"), [("raise SystemExit(3)", "exit code 3"), ("", "no results")]
)
def test_a_failure_is_a_row_and_old_results_do_not_count(tmp_path, program, failure):
    (tmp_path / "results.json").write_text('[{"seconds": 1.0}]')
    found = outcome(tmp_path, program)
    assert (found.failure, found.rows) == (failure, [])
    assert f"| it | FAILED | {failure} |" in gpu_all.table([found])


def test_what_does_not_end_is_ended_with_its_children(tmp_path):
    found = outcome(tmp_path, HANGS, limit_s=2.0)
    assert found.failure == "no end within 2 s"
    child = int((tmp_path / "results.json.child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_unknown_names_are_refused():
    assert [one.name for one in gpu_all.chosen("steps,policy", dry_run=True)] == ["steps", "policy"]
    with pytest.raises(
        ValueError,
        match=(
            "--only: polcy: no such part; there are probe, test_policy, test_engine, waits, policy,"
            " logprob,"
        ),
    ):
        gpu_all.chosen("polcy", dry_run=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--folder", tmp_path / "x"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "x").exists()
    assert (
        done.stderr
        == "error: no CUDA device on this machine; --dry-run runs everything with tiny models\n"
    )


ORDER = [
    "probe",
    "test_policy",
    "test_engine",
    "waits",
    "policy",
    "logprob",
    "refit",
    "refit_plan",
    "steps",
]


def test_what_decides_much_comes_first():
    names = [one.name for one in gpu_all.chosen(None, dry_run=False)]
    assert names[: len(ORDER)] == ORDER
    assert [one.name for one in gpu_all.chosen(None, dry_run=True)] == ORDER
    (probe,) = gpu_all.chosen("probe", dry_run=False)
    assert probe.limit_s == 240.0


@pytest.mark.parametrize("fails", ["probe", "waits"])
def test_only_a_failed_probe_ends_it(tmp_path, fails):
    names = ["probe", "waits", "policy"]
    programs = dict.fromkeys(names, GOOD) | {fails: "raise SystemExit(1)"}
    started = []

    def start(part):
        started.append(part.name)
        return outcome(tmp_path, programs[part.name])

    found = list(gpu_all.in_order(gpu_all.chosen(",".join(names), dry_run=False), start))
    table = gpu_all.table(found)
    assert table.count("| it | FAILED | exit code 1 |") == 1
    assert started == (names if fails == "waits" else ["probe"])
    not_run = [f"| {name} | NOT RUN | the probe failed | |" for name in names[len(started) :]]
    assert [line for line in table.splitlines() if "NOT RUN" in line] == not_run


@pytest.mark.full
def test_every_part_runs_with_a_tiny_model(tmp_path):
    run(
        [sys.executable, str(SCRIPT), "--folder", str(tmp_path), "--dry-run", "--limit-s", "120"],
        timeout=290,
    )
    rows = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ORDER}
    outcomes = {row["probe"]: row["outcome"] for row in rows["probe"]}
    if not torch.cuda.is_available():
        done = {name for name, outcome in outcomes.items() if outcome == "PASS"}
        assert done == {"head_gradient", "emptied_storage", "clipped_gradients"} and set(
            outcomes.values()
        ) == {"PASS", "SKIP"}
        assert all(
            row["outcome"].startswith("skipped: no CUDA device")
            for row in rows["test_policy"] + rows["test_engine"]
        )
        assert [row["waits"] for row in rows["waits"]] == ["not counted: no CUDA device"] * 2
    bf16, fp8, *kernels = rows["policy"]
    assert bf16["x bf16"] == 1.0 and bf16["share"] > 0 and len(kernels) >= 10
    assert min(bf16["update_s"], bf16["logprobs_s"]) > 0 and bf16["difference_max"] == 0
    assert "refused" in fp8 if not torch.cuda.is_available() else fp8["difference_max"] > 0
    logprobs = [row["mean_logprob"] for row in rows["logprob"]]
    assert len(logprobs) == 8 and max(logprobs) - min(logprobs) < 0.02, (
        "eight ways to the same numbers, in bfloat16"
    )
    assert rows["refit"][0]["weights_GB"] == rows["refit_plan"][0]["weights_GB"] > 0
    assert {row["memory of"] for row in rows["refit"][1:]} >= {
        "offload_host",
        "sync_host",
        "generate_host",
        "reload_host",
    }
    steps = rows["steps"][0]
    assert steps["step_s"] >= steps["update_s"] > 0 and steps["mismatch max"] < (
        1.0 if torch.cuda.is_available() else 1e-4
    )
    record = (tmp_path / "record.md").read_text()
    assert (
        record.startswith("# GPU benchmarks\n")
        and "FAILED" not in record
        and "| steps | defaults | steps 1, step_s" in record
    )
