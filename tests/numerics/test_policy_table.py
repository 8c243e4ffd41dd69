"""Loss and gradient of real methods do not depend on the layout: layouts x aggregations x methods x cuts, float32."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch
from tests.numerics.policy_cases import AGGREGATIONS, METHOD_NAMES, TABLE

WORKER = Path(__file__).parent / "policy_table_worker.py"


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("table")

    @cache
    def run(processes: int, full: bool) -> dict[str, Any]:
        if processes > 1:
            run(1, False)  # leaves the one-rank answers in the folder
        out = folder / f"figures_{processes}_{full}.json"
        names = [name for name, (size, _, nightly) in TABLE.items() if (size, nightly) == (processes, full)]
        launch(WORKER, nproc=processes, args=[folder, out, *names], timeout=900)
        return json.loads(out.read_text())

    return lambda name: run(TABLE[name][0], TABLE[name][2])[name]


def marks(name: str) -> Any:
    return pytest.mark.full if TABLE[name][2] else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in TABLE])
def test_a_layout_changes_neither_loss_nor_gradient(name: str, figures: Any) -> None:
    ranks = figures(name)
    assert len(ranks) == TABLE[name][0]
    for rank in ranks:
        assert len(rank) == 2 * len(METHOD_NAMES) * len(AGGREGATIONS)
        wrong = {key: value for key, value in rank.items() if not (value["loss"] <= 1e-6 and value["gradient"] <= 2e-6)}
        assert not wrong


def test_the_variants_differ(figures: Any) -> None:
    """Twelve different losses, so that an axis that is ignored would show."""
    values = sorted(value["value"] for key, value in figures("dense")[0].items() if key.endswith("/few"))
    assert len(values) == len(METHOD_NAMES) * len(AGGREGATIONS)
    # apo's loss has grpo's value where the lengths do not trigger its two factors; these responses do.
    assert all(b - a > 1e-6 for a, b in zip(values, values[1:], strict=False))
