"""What a launch sets before CUDA starts."""

from __future__ import annotations

import sys

import pytest

from tests.launch import run

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
# Prints the variable as it is when CUDA is asked for the first time.
PROGRAM = f"""
import os, torch
from megatron_rl.runtime import launch
seen = []
really = torch.cuda.is_available
torch.cuda.is_available = lambda: (seen.append(os.environ.get("{NAME}")), really())[1]
launch.start()
print("at first", seen[0])
launch.exit_process(0)
"""


@pytest.mark.parametrize(("env", "value"), [({}, "1"), ({NAME: "8"}, "8")])
def test_there_is_one_queue_of_work_unless_the_user_says_otherwise(env, value, monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    done = run([sys.executable, "-c", PROGRAM], 60, env=env)
    assert f"at first {value}" in done.stdout.splitlines(), done.stdout
