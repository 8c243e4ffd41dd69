"""The bandit's runs as a fixture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megatron_rl.trainer.trainer import Trainer
from tests.unit.trainer.runs import build_bandit


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Trainer]:
    """``build_bandit`` in a folder of the test."""
    return partial(build_bandit, tmp_path)
