"""The bandit's runs, as fixtures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megatron_rl.run import run_folder
from megatron_rl.trainer.trainer import Trainer
from tests.unit.trainer.runs import build_bandit


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Trainer]:
    """``build_bandit`` in a folder of the test."""
    return partial(build_bandit, tmp_path)


@pytest.fixture
def figure() -> None:
    """For a test that wants the real figure at the end of its run."""


@pytest.fixture(autouse=True)
def plain_figure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes half a second, half of a run. That it is done, ``figure`` shows, and what is
    drawn, the tests of reporting do."""
    if "figure" not in request.fixturenames:
        monkeypatch.setattr(run_folder, "draw_curves", lambda metrics, out: out.touch())
