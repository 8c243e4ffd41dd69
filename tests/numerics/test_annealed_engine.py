"""Real vLLM with a temperature that falls within a response: every token has the logprob that
transformers gives it at the temperature of its position."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics.rollout_models import cases_of, verdict

WORKER = Path(__file__).with_name("annealed_worker.py")


# In the core tier: the processor alone (unit/engine/test_annealed.py), and the policy's side.
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("annealed")
    return launch(WORKER, nproc=1, args=[folder], timeout=280).stdout


@pytest.mark.parametrize("name", cases_of(WORKER))
def test_annealed_engine(output: str, name: str) -> None:
    assert not verdict(output, name), verdict(output, name)
