"""Errors of the real program on several ranks: one message, also when torchrun ends the others."""

from __future__ import annotations

import re

import pytest
from safetensors.torch import load_file, save_file

from tests.distributed.test_errors import own_lines
from tests.e2e.toy import overrides, write_data, write_model
from tests.launch import launch


def fail(nproc: int, args: list[str]) -> list[str]:
    """The lines of the run itself."""
    done = launch("megatron_rl.train", nproc, args, timeout=150, check=False, is_warm=False)
    assert done.returncode == 1, done.stdout
    return own_lines(done.stdout)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["experiment=quickstart_cpu", "model.path=m", "method=gpro"], "gpro"),
        pytest.param(
            ["--nonsense"],
            "error: unrecognized arguments: --nonsense; --help shows",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_typing_error_on_all_ranks_is_one_message(args, text):
    output = "\n".join(fail(2, args))
    assert output.count("error: ") == 1
    assert output.count(text) == 1
    assert len(output.splitlines()) <= 15
    assert "Traceback" not in output


@pytest.mark.full
def test_what_only_another_rank_meets_is_said_by_it(tmp_path):
    """The last layer is on the second pipeline stage: rank 0 never sees its shape."""
    model = write_model(tmp_path / "model")
    write_data(tmp_path / "data.jsonl")
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name][:, :-1].contiguous()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    layout = ["parallel=single", "parallel.pipeline=2"]
    lines = fail(2, overrides(tmp_path, tmp_path / "run", *layout))
    errors = [line for line in lines if "error: " in line]
    assert len(errors) == 1
    assert re.search(re.escape(name), "\n".join(lines))
    assert "Traceback" not in "\n".join(lines)
