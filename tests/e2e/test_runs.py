"""Runs keep their word, on the real engines: one live run a folder, damage and a full disk said,
finished runs left alone."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_rl.checkpoints import directory, facts
from megatron_rl.policy.families import read_architecture
from tests import warm
from tests.e2e.toy import overrides
from tests.launch import REPO, end, launch, torchrun


@pytest.fixture(scope="module")
def trained(folder) -> Path:
    """Two steps with a checkpoint each."""
    launch(
        "megatron_rl.train",
        2,
        overrides(folder, folder / "run", "trainer.num_steps=2", "checkpoint.every_steps=1"),
        240,
    )
    return folder / "run"


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Room for one checkpoint and the export, not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def alone(folder: Path, run_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """One process, for what is refused before engines are built."""
    command = [str(warm.python()), "-m", "megatron_rl.train"]
    command += overrides(folder, run_dir, "parallel=single", "rollout.tensor=1", *more)
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=REPO, env=environment, timeout=120, check=False
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The message of a run that was refused before any engine was built."""
    assert done.returncode == 1, done.stderr
    assert "policy: layers of" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    message = done.stderr[done.stderr.index("error: ") :]
    assert len(message.splitlines()) <= 15
    return message


def test_what_cannot_go_on_is_refused_before_the_engines_are_built(folder, trained):
    _check_the_size_that_is_asked_for(folder, trained)
    more = "trainer.num_steps=3"
    assert "method.name = grpo there, dapo here" in refused(
        alone(folder, trained, more, "method=dapo")
    )
    assert "method.name = grpo there, dapo here" in refused(
        alone(folder, trained, "trainer.num_steps=2", "method=dapo")
    )
    assert "trainer.num_steps = 1: " in refused(alone(folder, trained, "trainer.num_steps=1"))
    assert "no such folder" in refused(alone(folder, trained, more, "resume=/nowhere"))
    assert "no manifest.json" in refused(
        alone(folder, folder / "new", more, f"resume={folder / 'model'}")
    )
    assert "cannot be written" in refused(alone(folder, folder / "data.jsonl" / "run"))
    (folder / "again").mkdir()
    (folder / "again" / "metrics.jsonl").write_text('\0\n{"step": 1}\n')
    assert "metrics.jsonl: line 1 is damaged" in refused(alone(folder, folder / "again"))


def _check_the_size_that_is_asked_for(folder: Path, trained: Path) -> None:
    """The tensors of a real checkpoint take what was planned for them."""
    written = (
        FileSystemReader(trained / "checkpoints" / "step_000002")
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


def test_a_finished_run_started_again_ends_at_once(folder, trained):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*") if path.is_file()}
    done = launch(
        "megatron_rl.train",
        2,
        overrides(folder, trained, "trainer.num_steps=2", "checkpoint.every_steps=1"),
        120,
    )
    assert "already finished at step 2" in done.stdout and "held-out accuracy" in done.stdout
    assert "policy: layers of" not in done.stdout
    assert {
        path: path.stat().st_mtime_ns for path in trained.rglob("*") if path.is_file()
    } == before


@pytest.mark.full  # in the core tier: test_lock, and the killed run of test_training
def test_a_second_run_in_the_folder_is_refused_while_the_first_lives_and_not_after_its_kill(folder):
    run_dir = folder / "shared"
    command = torchrun("megatron_rl.train")
    command += overrides(folder, run_dir, "trainer.num_steps=500", "checkpoint.every_steps=1")
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    with (folder / "first.log").open("w") as log:
        first = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=REPO, env=environment
        )
    try:
        deadline = time.monotonic() + 150
        while directory.newest(run_dir / "checkpoints") is None:
            assert first.poll() is None and time.monotonic() < deadline, (
                folder / "first.log"
            ).read_text()[-2000:]
            time.sleep(0.1)
        second = launch(
            "megatron_rl.train",
            2,
            overrides(folder, run_dir, "trainer.num_steps=500"),
            120,
            check=False,
        )
        holder = json.loads((run_dir / ".lock").read_text())
        assert second.returncode != 0
        assert (
            f"another run is using it (host {holder['host']}, process {holder['pid']}, launch"
            f" {holder['launch']}" in second.stdout
        )
        assert "policy: layers of" not in second.stdout
    finally:
        end(first)
    reached = directory.step_of(directory.newest_valid(run_dir / "checkpoints"))
    # One bit less in the newest checkpoint: the run goes on from the one before, as if it had been
    # killed a step earlier.
    shard = max(
        (run_dir / "checkpoints" / f"step_{reached:06d}").glob("*.distcp"),
        key=lambda file: file.stat().st_size,
    )
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 255
    shard.write_bytes(content)
    done = launch(
        "megatron_rl.train", 2, overrides(folder, run_dir, f"trainer.num_steps={reached + 1}"), 240
    )
    assert f"step_{reached:06d} is skipped: {shard.name} is not what was written" in done.stdout
    assert f"step_{reached - 1:06d} (step {reached - 1})" in done.stdout
    assert f"rows from step {reached} on were moved to" in done.stdout
    metrics = [
        json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert metrics == list(range(reached + 2))


@pytest.mark.full
def test_a_disk_that_fills_says_so_keeps_the_last_checkpoint_and_is_cleaned_at_the_next_start(
    folder, small_disk
):
    run_dir = small_disk / "run"
    args = overrides(
        folder, run_dir, "trainer.num_steps=3", "checkpoint.every_steps=1", "checkpoint.keep=1"
    )
    full = launch("megatron_rl.train", 2, args, 240, check=False)
    assert full.returncode != 0
    said = [line for line in full.stdout.splitlines() if "no space left on the disk of" in line]
    assert (
        said
        and "the checkpoint step_000002 takes" in said[-1]
        and "make room and start again" in said[-1]
    ), full.stdout[-3000:]
    assert (
        directory.newest_valid(run_dir / "checkpoints") == run_dir / "checkpoints" / "step_000001"
    )
    assert list((run_dir / "checkpoints").glob("*.tmp-partial"))
    assert "no space left for its checkpoints" in refused(
        alone(folder, run_dir, "trainer.num_steps=3")
    )
    assert not list((run_dir / "checkpoints").glob("*.tmp-partial"))
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    done = launch("megatron_rl.train", 2, args, 240)
    assert "step_000001 (step 1)" in done.stdout and "finished: run_dir" in done.stdout
