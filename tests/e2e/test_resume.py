"""Runs that end and go on, on the real engines: bit for bit from a checkpoint, after a kill or a
preemption; what cannot go on is refused, and what is finished is left alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_rl.checkpoints import facts
from megatron_rl.models import read_architecture
from tests import warm
from tests.e2e.toy import PHASES, alone, overrides, refused, rows, timeless
from tests.launch import REPO, end, launch, torchrun


@pytest.fixture
def start(folder) -> Iterator[Callable[..., subprocess.Popen]]:
    """The same command, left running; ended with all its processes when the test is over."""
    processes: list[subprocess.Popen] = []

    def start(run_dir: Path, *more: str, is_warm: bool = False) -> subprocess.Popen:
        command = torchrun("megatron_rl.train")
        command += overrides(folder, run_dir, *more)
        environment = {**os.environ, "PYTHONPATH": str(REPO)}
        if is_warm:
            environment["PYTHON_EXEC"] = str(warm.python())
        with (folder / f"{run_dir.name}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, cwd=REPO, env=environment
                )
            )
        return processes[-1]

    yield start
    for process in processes:
        end(process)


def wait_for_step(
    process: subprocess.Popen, run_dir: Path, step: int, limit_s: float = 150
) -> None:
    deadline = time.monotonic() + limit_s
    while not (run_dir / "checkpoints" / f"step_{step:06d}" / "manifest.json").exists():
        assert process.poll() is None, (run_dir.parent / f"{run_dir.name}.log").read_text()[-3000:]
        assert time.monotonic() < deadline, f"no step {step} within {limit_s} s"
        time.sleep(0.1)


def ranks(agent: subprocess.Popen) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(agent.pid).children()
        if "megatron_rl.train" in " ".join(child.cmdline())
    ]


@pytest.fixture(scope="module")
def four_steps(folder) -> Path:
    """With a checkpoint at steps 2 and 4; to be read only."""
    launch(
        "megatron_rl.train",
        2,
        overrides(folder, folder / "four", "trainer.num_steps=4", "checkpoint.every_steps=2"),
        240,
    )
    return folder / "four"


def test_two_steps_a_checkpoint_new_processes_and_two_steps_are_four_steps_bit_for_bit(
    folder, four_steps
):
    """As after a kill in the fourth step."""
    run_dir = folder / "twice"
    shutil.copytree(four_steps, run_dir)
    for what in ("checkpoints/step_000004", "export"):
        shutil.rmtree(run_dir / what)
    (run_dir / "curves.png").unlink()
    goes_on_to_four_steps(folder, run_dir, four_steps)


@pytest.mark.full
def test_a_finished_run_of_two_steps_is_made_longer_bit_for_bit(folder, four_steps):
    run_dir = folder / "longer"
    settings = ["trainer.num_steps=2", "checkpoint.every_steps=1"]
    launch("megatron_rl.train", 2, overrides(folder, run_dir, *settings), 240)
    goes_on_to_four_steps(folder, run_dir, four_steps)


def goes_on_to_four_steps(folder: Path, run_dir: Path, four_steps: Path) -> None:
    done = launch(
        "megatron_rl.train",
        2,
        overrides(folder, run_dir, "trainer.num_steps=4", "checkpoint.every_steps=4"),
        240,
    )
    assert f"resumed from {run_dir}/checkpoints/step_000002" in done.stdout
    assert "the weights are those of the checkpoint, the model is not read" in done.stdout
    assert [timeless(row) for row in rows(run_dir)] == [timeless(row) for row in rows(four_steps)]
    whole, resumed = (
        load_file(path / "export" / "model.safetensors") for path in (four_steps, run_dir)
    )
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.full
def test_a_sample_of_a_run_answers_as_its_last_evaluation_did(folder, four_steps):
    """The newest checkpoint is read, and one engine over both processes answers greedily."""
    done = launch("megatron_rl.sample", 2, [four_steps, "--num-prompts", "8"], 200)
    accuracy = rows(four_steps)[-1]["eval/accuracy"]
    assert f"{round(accuracy * 8)} of 8 answers are correct" in done.stdout, done.stdout
    asked = [line for line in done.stdout.splitlines() if line.startswith("prompt:")]
    assert asked == [f"prompt:    {letter}?" for letter in "abcdefgh"]


def test_what_cannot_go_on_is_refused_before_the_engines_are_built(folder, four_steps):
    _check_the_size_that_is_asked_for(folder, four_steps)
    more = "trainer.num_steps=5"
    assert "method.name = grpo there, dapo here" in refused(
        alone(folder, four_steps, more, "method=dapo")
    )
    assert "method.name = grpo there, dapo here" in refused(
        alone(folder, four_steps, "trainer.num_steps=4", "method=dapo")
    )
    assert "trainer.num_steps = 1: " in refused(alone(folder, four_steps, "trainer.num_steps=1"))
    assert "no such folder" in refused(alone(folder, four_steps, more, "resume=/nowhere"))
    assert "no manifest.json" in refused(
        alone(folder, folder / "new", more, f"resume={folder / 'model'}")
    )
    assert "cannot be written" in refused(alone(folder, folder / "data.jsonl" / "run"))
    (folder / "again").mkdir()
    (folder / "again" / "metrics.jsonl").write_text('\0\n{"step": 1}\n')
    assert "metrics.jsonl: line 1 is damaged" in refused(alone(folder, folder / "again"))


def _check_the_size_that_is_asked_for(folder: Path, four_steps: Path) -> None:
    """The tensors of a real checkpoint take what was planned for them."""
    written = (
        FileSystemReader(four_steps / "checkpoints" / "step_000004")
        .read_metadata()
        .state_dict_metadata.values()
    )
    tensors = [entry for entry in written if isinstance(entry, TensorStorageMetadata)]
    size = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)
    parameters = facts.num_parameters(read_architecture(folder / "model")[0], 4)
    expected = facts.checkpoint_bytes(
        parameters, "float32", "float32", distributed_optimizer=True, reference=True
    )
    assert size == pytest.approx(expected, rel=0.01)


@pytest.mark.full  # in the core tier: unit/run/test_run_folder.py
def test_a_finished_run_started_again_ends_at_once(folder, four_steps):
    before = {path: path.stat().st_mtime_ns for path in four_steps.rglob("*") if path.is_file()}
    done = launch(
        "megatron_rl.train",
        2,
        overrides(folder, four_steps, "trainer.num_steps=4", "checkpoint.every_steps=2"),
        120,
    )
    assert "already finished at step 4" in done.stdout and "held-out accuracy" in done.stdout
    assert "policy: layers of" not in done.stdout
    assert {
        path: path.stat().st_mtime_ns for path in four_steps.rglob("*") if path.is_file()
    } == before


@pytest.mark.full  # in the core tier: the policy alone, in five layouts (numerics/test_offload.py)
def test_offloading_at_every_hand_over_and_around_checkpoints_changes_no_number(folder, four_steps):
    run_dir = folder / "lean"
    lean = [
        "trainer.num_steps=4",
        "checkpoint.every_steps=2",
        "memory.offload=[optimizer,gradients,weights]",
    ]
    launch("megatron_rl.train", 2, overrides(folder, run_dir, *lean), 240)
    assert [timeless(row) for row in rows(run_dir)] == [timeless(row) for row in rows(four_steps)]
    whole, handed = (
        load_file(path / "export" / "model.safetensors") for path in (four_steps, run_dir)
    )
    assert all(torch.equal(whole[name], handed[name]) for name in whole)
    assert all(row[f"memory/{phase}_host_gib"] > 0 for row in rows(run_dir)[1:] for phase in PHASES)


@pytest.mark.full  # in the core tier: test_errors of tests/distributed
def test_a_killed_rank_ends_the_job_and_the_run_goes_on_from_the_newest_whole_checkpoint(
    folder, four_steps, start
):
    run_dir = folder / "killed"
    agent = start(run_dir, "trainer.num_steps=500", "checkpoint.every_steps=1", "checkpoint.keep=3")
    wait_for_step(agent, run_dir, 3)
    ranks(agent)[1].send_signal(signal.SIGKILL)
    assert agent.wait(30) != 0
    assert (
        "SIGKILL" in (folder / "killed.log").read_text()
        or "Signal 9" in (folder / "killed.log").read_text()
    )
    newest = max(
        path
        for path in (run_dir / "checkpoints").iterdir()
        if path.name.startswith("step_") and path.suffix == ""
    )
    shard = max(newest.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-8])
    before = int(newest.name.removeprefix("step_")) - 1
    done = launch(
        "megatron_rl.train", 2, overrides(folder, run_dir, f"trainer.num_steps={before + 1}"), 240
    )
    assert done.stdout.count(f"{newest} is skipped: ") == 1, done.stdout[-3000:]
    assert f"resumed from {run_dir}/checkpoints/step_{before:06d}" in done.stdout
    assert [row["step"] for row in rows(run_dir)] == list(range(before + 2))
    common = min(5, before + 2)
    expected = [timeless(row) for row in rows(four_steps)[:common]]
    assert [
        {key: row[key] for key in reference} for row, reference in zip(rows(run_dir), expected)
    ] == expected


@pytest.mark.full
def test_preemption_leaves_a_checkpoint_and_a_marker(folder, start):
    run_dir = folder / "preempted"
    settings = ["trainer.num_steps=500", "checkpoint.every_steps=2"]
    agent = start(run_dir, *settings, is_warm=True)
    wait_for_step(agent, run_dir, 2)
    for rank in ranks(agent):
        rank.send_signal(signal.SIGUSR1)
    assert agent.wait(60) == 0, (folder / "preempted.log").read_text()[-3000:]
    step = int((run_dir / "requeue").read_text())
    assert (run_dir / "checkpoints" / f"step_{step:06d}" / "manifest.json").exists()
    assert rows(run_dir)[-1]["step"] == step
