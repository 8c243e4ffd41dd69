"""What a launch sets before CUDA starts."""

from __future__ import annotations

import sys

import pytest

from megatron_rl import train
from megatron_rl.config.command_line import arguments
from megatron_rl.runtime import launch
from tests.launch import run

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
# Prints the variable as it is when CUDA is asked for the first time.
PROGRAM = f"""
import os, sys, torch
from megatron_rl.runtime import launch
seen = []
really = torch.cuda.is_available
torch.cuda.is_available = lambda: (seen.append(os.environ.get("{NAME}")), really())[1]
launch.order_device_work(int(sys.argv[1]))
launch.start()
print("at first", seen[0])
"""


@pytest.mark.parametrize(
    ("tensor", "env", "value"), [(1, {}, None), (2, {}, "1"), (2, {NAME: "8"}, "8")]
)
def test_cut_layers_have_one_queue_of_work_unless_the_user_says_otherwise(
    tensor, env, value, monkeypatch
):
    monkeypatch.delenv(NAME, raising=False)
    done = run([sys.executable, "-c", PROGRAM, str(tensor)], 60, env=env)
    assert f"at first {value}" in done.stdout.splitlines(), done.stdout


class Joined(Exception):
    pass


@pytest.mark.parametrize(("layout", "tensor"), [("single", 1), ("tp4", 4)])
def test_the_program_knows_the_layout_before_it_touches_the_device(layout, tensor, monkeypatch):
    known = []

    def start():
        raise Joined

    monkeypatch.setattr(launch, "order_device_work", known.append)
    monkeypatch.setattr(launch, "start", start)
    given = ["model.path=m", "data.train=t", "data.eval=e", f"parallel={layout}"]
    with pytest.raises(Joined):
        train.run(arguments(given))
    assert known == [tensor]
