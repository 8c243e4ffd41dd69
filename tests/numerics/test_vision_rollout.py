"""A real engine with images, beside transformers: tests/numerics/seeing_engine_worker.py."""

from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics.rollout_models import cases_of, verdict

WORKER = Path(__file__).parent / "seeing_engine_worker.py"


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    return launch(WORKER, nproc=1, args=[folder], timeout=280).stdout


@pytest.mark.full  # in the core tier: the policy alone (test_vision_parity.py)
@pytest.mark.parametrize("case", cases_of(WORKER))
def test_images_in_the_engine(output, case):
    assert not verdict(output, case)
