"""Sweeps through the command line, with real runs side by side: a run that fails, a sweep that is
killed and started again, equal runs, pairs, and the report of them in a browser."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.browser import CHROMIUM, seen
from tests.e2e.test_report_page import LOOK
from tests.e2e.toy import overrides, write_data, write_model
from tests.launch import REPO, end, run
from tools import report

# In the core tier with stand-ins for the runs: tests/unit/sweeping.
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
SWEEP = [sys.executable, "-m", "megatron_rl.sweep"]


def small(folder: Path, *more: str) -> list[str]:
    """The toy, without a folder for the run."""
    write_model(folder / "model")
    write_data(folder / "data.jsonl")
    words = overrides(folder, folder, *more)
    return [word for word in words if not word.startswith("run_dir=")]


def test_a_failed_run_is_named_the_others_are_done_and_are_not_done_again(tmp_path):
    words = small(tmp_path, "trainer.num_steps=1")
    shutil.copy(tmp_path / "data.jsonl", tmp_path / "second.jsonl")
    out = tmp_path / "runs of a=b, c"
    sweep = [*SWEEP, "--out", str(out), "--nproc", "2", "--parallel", "2", *words]
    files = [tmp_path / name for name in ("missing.jsonl", "data.jsonl", "second.jsonl")]
    choices = "data.eval=" + ",".join(map(str, files))
    done = run([*sweep, choices], 400, check=False)
    assert done.returncode == 1, done.stdout
    finished = [next(out.glob(f"*{file.name}*")) for file in files[1:]]
    assert all((folder / "curves.png").is_file() for folder in finished)
    reason, last = done.stdout.splitlines()[-2:]
    assert last.startswith("error: 1 of 3 runs failed: ") and "missing.jsonl" in last
    assert f"exit code 1: error: 1 problem in the configuration: data.eval = {files[0]}" in reason
    assert "console.log" in reason
    table = [line.split() for line in done.stdout.splitlines() if line.startswith("data.eval=")]
    assert [row[1] for row in table] == ["0,", "1", "1"], done.stdout  # "0, none finished"

    exports = [(folder / "export" / "model.safetensors").stat().st_mtime_ns for folder in finished]
    again = run([*sweep, "data.eval=" + ",".join(map(str, files[1:]))], 60)
    assert again.stdout.count(": finished before") == 2, again.stdout
    assert exports == [
        (folder / "export" / "model.safetensors").stat().st_mtime_ns for folder in finished
    ]


def test_a_killed_sweep_goes_on_and_its_runs_are_pairs(tmp_path):
    """Two methods, two seeds, and a number in two spellings: four runs. The first start is killed
    when a run has a checkpoint; the second goes on, and a report shows what came of it."""
    out = tmp_path / "runs"
    words = small(
        tmp_path,
        "parallel=single",
        "rollout.tensor=1",
        "trainer.num_steps=12",
        "checkpoint.every_steps=2",
        "checkpoint.export_at_end=false",
        "method=grpo,a_grae",
        "seed=1,2",
        "optim.clip_grad=1,1.0",
    )
    sweep = [*SWEEP, "--out", str(out), "--nproc", "1", "--parallel", "2", *words]
    kill_when_saved(sweep, out)
    assert not runs_below(out), "a run outlives its sweep"
    cut = [len(rows(folder)) for folder in out.glob("method*")]
    assert cut and min(cut) < 13, "nothing was left to do"

    done = run(sweep, 600)
    folders = sorted(folder.name for folder in out.iterdir() if folder.is_dir())
    assert folders == [
        f"method-{method}_seed-{seed}_optim.clip_grad-1"
        for method in ("a_grae", "grpo")
        for seed in (1, 2)
    ]
    for name in folders:
        assert [row["step"] for row in rows(out / name)] == list(range(13)), name
        assert f"{name.replace('grad-1', 'grad-1.0')}: the same run as {name}" in done.stdout
    logs = [(out / name / "console.log").read_text() for name in folders]
    assert any("resumed from" in log for log in logs)
    table = [line.split() for line in done.stdout.splitlines() if line.startswith("method=")]
    assert [row[2] for row in table] == ["2", "2"] and table[1][8] == "2", done.stdout
    check_pairs(out)
    check_report(out, tmp_path)


def check_report(out: Path, scratch: Path) -> None:
    """The report of a sweep that was killed and resumed: both methods, figures that a browser
    draws, and nothing that it complains of."""
    folder = scratch / "report"
    assert report.main([str(out), "--out", str(folder)]) == 0
    text = (folder / "report.md").read_text("utf-8")
    assert "grpo" in text and "a_grae" in text
    if CHROMIUM is None:
        pytest.skip("the report was written; no chromium to open it: apt-get install chromium")
    complaints, look = seen((folder / "index.html").as_uri(), scratch, 1400, LOOK)
    assert complaints == []
    assert len(look["figures"]) >= 5
    assert all(across > 300 and down > 150 for across, down, _ in look["figures"])


def check_pairs(out: Path) -> None:
    """The real engines: the same prompts in every step, and until the first update the same
    score and the same responses."""
    for seed in (1, 2):
        pair = [out / f"method-{name}_seed-{seed}_optim.clip_grad-1" for name in ("grpo", "a_grae")]
        first, second = (samples(folder) for folder in pair)
        assert [row["prompt"] for row in first] == [row["prompt"] for row in second]
        of_first_step = [row["response"] for row in first if row["step"] == 1]
        assert of_first_step == [row["response"] for row in second if row["step"] == 1] != []
        assert len({rows(folder)[0]["eval/accuracy"] for folder in pair}) == 1
    seeds = [samples(out / f"method-grpo_seed-{seed}_optim.clip_grad-1") for seed in (1, 2)]
    assert [row["prompt"] for row in seeds[0]] != [row["prompt"] for row in seeds[1]]


def rows(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def samples(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def kill_when_saved(command: list[str], out: Path) -> None:
    """Starts the sweep, and kills it when one of its runs has a checkpoint."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    try:
        deadline = time.monotonic() + 400
        while not list(out.glob("*/checkpoints/step_000002/manifest.json")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
        while runs_below(out) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        end(process)


def runs_below(out: Path) -> list[int]:
    """The live processes with a run folder there."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if any(f"run_dir={out}" in word for word in words):
            found.append(process.pid)
    return found
