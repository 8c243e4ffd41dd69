"""Router replay with the experts of the rollout: what a real engine returns, and what a policy that
takes it computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics.rollout_models import cases_of, verdict

pytestmark = pytest.mark.full
WORKER = Path(__file__).with_name("routed_experts_worker.py")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    return launch(WORKER, nproc=1, args=[tmp_path_factory.mktemp("model")], timeout=280).stdout


@pytest.mark.parametrize("case", cases_of(WORKER))
def test_routed_experts(said: str, case: str) -> None:
    assert not verdict(said, case), verdict(said, case)
