"""What a launch left that was killed while its engine started is removed later; what a live one
uses, and what is not ours, is not."""

import os
import time
import uuid

import pytest

from megatron_rl.engine.side_effects import DIRECTORY, PREFIX, remove_old_segments


@pytest.fixture
def launch_id():
    name = uuid.uuid4().hex[:12]
    yield name
    for path in DIRECTORY.glob(f"*{name}*"):
        path.unlink()


@pytest.mark.parametrize(
    ("prefix", "hours", "stays"), [(PREFIX, 2, False), (PREFIX, 0.5, True), ("other-", 2, True)]
)
def test_old_segments_of_ours_are_removed(launch_id, prefix, hours, stays):
    path = DIRECTORY / f"{prefix}{launch_id}-tp:0-0_0"
    path.write_bytes(b"0")
    then = time.time() - 3600 * hours
    os.utime(path, (then, then))
    remove_old_segments()
    assert path.exists() == stays
