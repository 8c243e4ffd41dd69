"""A real engine with images, beside transformers: tests/numerics/seeing_engine_worker.py."""

from functools import cache
from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics.rollout_models import cases_of, verdict

WORKER = Path(__file__).parent / "seeing_engine_worker.py"


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """What the worker prints of a family."""

    @cache
    def run(family: str) -> str:
        folder = tmp_path_factory.mktemp(family)
        return launch(WORKER, nproc=1, args=[folder, family], timeout=280).stdout

    return run


@pytest.mark.full  # in the core tier: the policy alone (test_vision_parity.py)
@pytest.mark.parametrize("case", cases_of(WORKER))
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_images_in_the_engine(output, family, case):
    assert not verdict(output(family), case)
