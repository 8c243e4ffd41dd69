"""The weights of a vision-language policy reach real vLLM, its tower's too, by both methods."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics.rollout_models import verdict

HERE = Path(__file__).parent
CASES = ("gather pipeline", "reshard tensor", "reshard data")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("vision_sync")
    return launch(HERE / "vision_sync_worker.py", args=[folder], timeout=280).stdout


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_the_engine_sees_with_the_tower_of_the_policy(output: str, name: str) -> None:
    assert not verdict(output, name, ranks=2), verdict(output, name, ranks=2)
