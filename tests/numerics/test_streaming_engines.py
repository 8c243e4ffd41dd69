"""Real engines, stepped: the same experience, bit for bit, from 1, 2 and 4 replicas, from one of
two tensor ranks, and whatever the timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch

WORKER = Path(__file__).parent / "streaming_worker.py"
TIMEOUT_S = 550
# Processes, tensor ranks of a replica, whether ranks are held up at random.
LAYOUTS = {"one": (1, 1, 0), "held up": (1, 1, 1), "two": (2, 1, 1), "four": (4, 1, 1)}
Found = dict[str, list[dict[str, Any]]]


def found_by(worker: Path, folder: Path, num_ranks: int, tensor: int, delays: int) -> Any:
    args = [folder, tensor, delays]
    output = launch(worker, nproc=num_ranks, args=args, timeout=TIMEOUT_S).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


@pytest.fixture(scope="module")
def by_layout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    folder = tmp_path_factory.mktemp("streaming")
    return {name: found_by(WORKER, folder, *layout) for name, layout in LAYOUTS.items()}


@pytest.mark.full
def test_the_same_bits_for_any_number_of_replicas_and_any_timing(
    by_layout: dict[str, Found],
) -> None:
    expected = by_layout["one"]
    lengths = [length for step in expected["grpo"] for length in step["lengths"]]
    assert len(set(lengths)) > 8, "responses of many lengths"
    assert sum(step["refused"] for step in expected["dapo"]) >= 3
    for name in LAYOUTS:
        for method, steps in expected.items():
            for exact, got in zip(steps, by_layout[name][method], strict=True):
                assert got == exact, (name, method)


@pytest.mark.full
def test_tensor_ranks_sample_the_same_tokens(by_layout: dict[str, Found], tmp_path: Path) -> None:
    """Their sums are in another order, so logprobs are rounded otherwise."""
    got = found_by(WORKER, tmp_path, 2, 2, 1)
    for method, steps in by_layout["one"].items():
        for exact, step in zip(steps, got[method], strict=True):
            exact = exact | {"sampler_logprobs": step["sampler_logprobs"]}
            assert step == exact
