"""A vision-language policy pushes its weights into a stock vLLM server; images that the server has
seen before are seen anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics.rollout_models import verdict
from tests.numerics.seeing import write_model
from tests.numerics.server import serving

HERE = Path(__file__).parent


@pytest.mark.full
def test_a_push_leaves_nothing_of_the_old_tower(tmp_path: Path) -> None:
    write_model(tmp_path / "before")
    write_model(tmp_path / "after", seed=1)
    with serving(tmp_path / "before", 1, tmp_path, has_text=True) as url:
        worker = HERE / "vision_server_worker.py"
        output = launch(worker, 2, [url, tmp_path], timeout=280).stdout
    name = "a_push_leaves_nothing_of_the_old_tower"
    assert not verdict(output, name, 2), output
