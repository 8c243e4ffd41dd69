"""Runs keep their word, on the real engines: one live run a folder, damage and a full disk said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time

import pytest

from megatron_rl.checkpoints import directory
from tests.e2e.toy import alone, overrides, refused
from tests.launch import REPO, end, launch, torchrun

DISK_SIZE = "3m"  # room for one checkpoint and the export, not for two


@pytest.mark.full  # in the core tier: test_lock, and the killed run of test_resume
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
@pytest.mark.parametrize(
    ("background", "what"),
    [
        ("false", "the checkpoint step_000002"),
        ("true", "(the checkpoint step_000002|a line of metrics)"),  # whichever writes first
    ],
    ids=["in the step", "in the background"],
)
def test_a_disk_that_fills_says_so_keeps_the_last_checkpoint_and_is_cleaned_at_the_next_start(
    folder, small_disk, background, what
):
    run_dir = small_disk / "run"
    args = overrides(
        folder,
        run_dir,
        "trainer.num_steps=3",
        "checkpoint.every_steps=1",
        "checkpoint.keep=1",
        f"checkpoint.background={background}",
    )
    full = launch("megatron_rl.train", 2, args, 240, check=False)
    assert full.returncode != 0
    said = f"no space left on the disk of .*: {what} takes .*; make room and start again"
    assert re.search(said, full.stdout), full.stdout[-3000:]
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
