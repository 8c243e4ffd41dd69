"""The loss, its gradient and its metrics are the same on one, two and four ranks, and when responses are cut over two ranks."""

from pathlib import Path

import pytest

from megatron_rl.config.load import conf_dir
from tests.launch import launch

NUM_METHODS = len(list((conf_dir() / "method").glob("*.yaml")))


@pytest.mark.parametrize(("ranks", "layouts"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.full)])
def test_every_method_on_ranks_equals_one_process(ranks: int, layouts: int) -> None:
    result = launch(Path(__file__).with_name("loss_layouts_worker.py"), nproc=ranks)
    assert result.stdout.count("OK ") == layouts * NUM_METHODS, result.stdout
