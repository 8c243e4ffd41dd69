"""Every named method through the real trainer, policy and engine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_rl.config.load import conf_dir
from megatron_rl.config.method import load_method
from megatron_rl.reporting.metrics import metric
from tests.e2e.toy import overrides, write_data, write_model
from tests.launch import launch

NAMES = sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml"))
# Those that mask images are run by test_vision.
ALL = [name for name in NAMES if load_method(name).config.perception is None]
# Of a vocabulary that is smaller than what they read by default.
OF_FEW_TOKENS = dict.fromkeys(("opd_top_k", "score_centered"), " method.policy_loss.top_k=6")
CORE = ["dapo", "a_grae", "apo", "durian", "archer"]


def run(tmp_path: Path, names: list[str]) -> list[dict]:
    write_model(tmp_path / "model")
    write_model(tmp_path / "teacher", seed=1)
    write_data(tmp_path / "data.jsonl", given=True)
    settings = overrides(
        tmp_path,
        tmp_path / "run",
        "logging.console=false",
        "method=apo",
        f"model.teacher={tmp_path / 'teacher'}",
        "optim.learning_rate=1e-3",
    )
    methods = [f"method={name}{OF_FEW_TOKENS.get(name, '')}" for name in names]
    return two_steps_each(tmp_path / "out.jsonl", methods, settings)


def two_steps_each(out: Path, methods: list[str], settings: list[str]) -> list[dict]:
    """A row of each method, see methods_worker.py."""
    launch("tests/e2e/methods_worker.py", 2, [out, json.dumps(methods), *settings], 600)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["method"] for row in rows] == methods
    return rows


@pytest.mark.full
@pytest.mark.timeout(650)
def test_a_run_trains_on_responses_that_prompts_carry(tmp_path: Path) -> None:
    """One of sixteen in each group is right from the start, and seen with all others."""
    write_model(tmp_path / "model")
    write_data(tmp_path / "data.jsonl", given=True)
    more = ("method=rl_plus", "trainer.num_steps=2", "logging.log_samples=16")
    settings = overrides(tmp_path, tmp_path / "run", *more)
    launch("megatron_rl.train", 2, settings, 600)
    lines = (tmp_path / "run/samples.jsonl").read_text().splitlines()
    shown = [json.loads(line) for line in lines]
    first = [row for row in shown if row["step"] == 1][:8]
    assert len(first) == 8 and all(row["correct"] for row in first)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"]]
    assert len(steps) == 2 and all(row["reward/accuracy"] < 0.9 for row in steps)


def check(rows: list[dict]) -> None:
    for row in rows:
        for step in row["steps"]:
            wrong = {key: value for key, value in step.items() if not math.isfinite(value)}
            assert not wrong, (row["method"], wrong)
            assert [key for key in step if metric(key) is None] == []
            assert step["mismatch/logprob_abs_diff_max"] < 1e-4, row["method"]
            assert step["optim/skipped"] == 0
        assert row["moved"], f"{row['method']} left the weights alone"


@pytest.mark.full
@pytest.mark.timeout(650)
def test_five_methods_take_two_steps(tmp_path):
    check(run(tmp_path, CORE))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_all_methods_take_two_steps(tmp_path):
    assert len(ALL) >= 30
    check(run(tmp_path, ALL))
