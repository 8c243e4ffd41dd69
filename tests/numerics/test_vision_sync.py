"""The weights of a vision-language policy reach real vLLM, its tower's too, by both methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics.rollout_models import verdict

HERE = Path(__file__).parent
CASES = ("gather pipeline", "reshard tensor", "reshard data")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What the worker prints of a family."""

    @cache
    def run(family: str) -> str:
        args = [tmp_path_factory.mktemp(family), family]
        return launch(HERE / "vision_sync_worker.py", args=args, timeout=280).stdout

    return run


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_vl", "qwen3_5_moe_vl"]
)
def test_the_engine_sees_with_the_tower_of_the_policy(
    output: Callable[[str], str], family: str, name: str
) -> None:
    assert not verdict(output(family), name, ranks=2), verdict(output(family), name, ranks=2)
