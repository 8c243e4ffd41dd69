"""A sweep through the command line, with real runs: folders, table, a run that fails, and the same
command once more."""

import shutil
import sys

import pytest

from tests.e2e.toy import overrides, write_data, write_model
from tests.launch import run

SWEEP = [sys.executable, "-m", "megatron_rl.sweep", "--nproc", "2"]


def without_run_dir(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith("run_dir=")]


@pytest.mark.full  # in the core tier with stand-ins for the runs: tests/unit/sweeping
def test_a_failed_run_is_named_the_others_are_done_and_are_not_done_again(tmp_path):
    write_model(tmp_path / "model")
    write_data(tmp_path / "data.jsonl")
    shutil.copy(tmp_path / "data.jsonl", tmp_path / "second.jsonl")
    out = tmp_path / "runs of a=b, c"
    small = without_run_dir(overrides(tmp_path, tmp_path, "trainer.num_steps=1"))
    files = [tmp_path / name for name in ("missing.jsonl", "data.jsonl", "second.jsonl")]
    choices = "data.eval=" + ",".join(map(str, files))
    done = run([*SWEEP, "--out", str(out), *small, choices], 280, check=False)
    assert done.returncode == 1, done.stdout
    finished = [next(out.glob(f"*{file.name}*")) for file in files[1:]]
    assert all((folder / "curves.png").is_file() for folder in finished)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("error: 1 of 3 runs failed: ") and "missing.jsonl" in last
    table = [line.split() for line in done.stdout.splitlines() if line.startswith("data.eval=")]
    assert [row[1] for row in table] == ["0", "1", "1"], done.stdout

    exports = [(folder / "export" / "model.safetensors").stat().st_mtime_ns for folder in finished]
    again = run(
        [*SWEEP, "--out", str(out), *small, "data.eval=" + ",".join(map(str, files[1:]))], 60
    )
    assert again.stdout.count(": finished before") == 2, again.stdout
    assert exports == [
        (folder / "export" / "model.safetensors").stat().st_mtime_ns for folder in finished
    ]
