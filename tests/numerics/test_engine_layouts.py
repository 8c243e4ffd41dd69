"""Pipeline stages and whole experts in real engines: samples are those of transformers, and both
methods of weight sync leave the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics.rollout_models import verdict

WORKER = Path(__file__).parent / "engine_layouts_worker.py"
# The first engine of a process decides about its groups: equal cuts, and experts first.
STAGES = ("stages of experts", "stages", "stages of a tied model")


@pytest.mark.full
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, STAGES), (2, ("whole experts",)), (4, ("stages of tensor ranks",))]
)
def test_an_engine_that_is_cut_otherwise_follows_the_policy(tmp_path, ranks, cases) -> None:
    output = launch(WORKER, ranks, [tmp_path, *cases], timeout=600).stdout
    failed = [verdict(output, name, ranks) for name in cases]
    assert not any(failed), "\n".join(failed)
