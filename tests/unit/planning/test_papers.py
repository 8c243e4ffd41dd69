"""The presets of papers: each value is that of tests/papers.yaml, the run passes the start-up
checks, and it fits the hardware of its paper."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.config.load import compose, conf_dir, validate
from megatron_rl.config.rules.checks import check, num_optimizer_steps
from megatron_rl.config.schema import Config
from megatron_rl.planning.at_start import plan
from megatron_rl.planning.phases import MemoryBudget, problems
from tests.launch import REPO
from tests.unit.qwen2_5_vl import write_config

TABLE = yaml.safe_load((REPO / "tests/papers.yaml").read_text(encoding="utf-8"))
STEPS = TABLE.pop("steps")
GPUS = 8
HOST_GIB = 128.0  # of a GPU, of a host with 1 TiB
MATH_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 4096,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
PAGE = (REPO / "tools/docs/pages/papers.md").read_text(encoding="utf-8")
# The rows of the papers' tables, as the page has them: what follows the preset on a command line.
ROWS = {
    name: [words for words in re.findall("`([^`]+)`", rows) if "=" in words]
    for name, rows in re.findall(r"(?m)^\| `(\w+)` \| (\d.*) \|$", PAGE)
}


@pytest.fixture
def preset(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("{}")

    def preset(name: str, *more: str) -> tuple[dict[str, Any], Config]:
        size, model = TABLE[name]["model"], tmp_path / "model"
        if model.exists():
            shutil.rmtree(model)
        if size in ("3B", "7B"):
            write_config(model, size)
        else:
            model.mkdir()
            (model / "config.json").write_text(json.dumps(MATH_7B))
        rows = tmp_path / "rows.jsonl"
        given = [f"model.path={model}", f"data.train={rows}", f"data.eval={rows}"]
        values = compose("config", [f"experiment=papers/{name}", *given, *more])
        return values, validate(Config, values, name)

    return preset


def test_every_preset_is_in_the_table():
    names = {path.stem for path in (conf_dir() / "experiment/papers").glob("*.yaml")}
    assert names == set(TABLE) == set(ROWS)


@pytest.mark.parametrize("name", TABLE)
def test_values_are_those_of_the_paper(name, preset):
    values, _ = preset(name)
    for key, (printed, _) in TABLE[name]["values"].items():
        found: Any = values
        for part in key.split("."):
            found = found[part]
        assert found == printed, key


@pytest.mark.parametrize("name", TABLE)
def test_presets_start_and_fit_the_hardware_of_their_paper(name, preset):
    _, config = preset(name)
    check(config, GPUS)
    budget = MemoryBudget("cuda", TABLE[name]["gpu_gib"], HOST_GIB)
    assert problems(plan(config, GPUS, budget, fused=True), config, budget) == []


@pytest.mark.parametrize(("name", "row"), [(n, row) for n, rows in ROWS.items() for row in rows])
def test_rows_of_the_tables_pass_the_start_up_checks(name, row, preset):
    _, config = preset(name, *row.split())
    check(config, GPUS)


def test_baselines_have_the_settings_of_their_framework(preset):
    """Of EasyR1 clip, dual clip, aggregate and KL, whatever conf/method/ has; of verl no KL."""
    for name in ("durian_7b", "mapo_geo3k_g12"):
        _, config = preset(name, "method=grpo")
        method = config.method
        assert (method.policy_loss.high, method.policy_loss.dual_c) == (0.3, 3.0)
        assert (method.aggregate.name, method.kl.coef) == ("token_mean", 0.01)
    dapo = [row for row in ROWS["mapo_geo3k_g12"] if "method=dapo" in row]
    for name, row in (("mapo_geo3k_g12", dapo[0]), ("durian_dapo_7b", "method=dapo")):
        _, config = preset(name, *row.split())
        method = config.method
        assert (method.policy_loss.high, method.policy_loss.dual_c) == (0.28, 3.0)
        assert (method.kl.coef, method.filters.dynamic_sampling.max_tries) == (0.0, 20)
    _, config = preset("a_grae_math_7b", "method=grpo")
    assert config.method.kl.coef == 0


@pytest.mark.parametrize("name", STEPS)
def test_epochs_are_the_steps_that_the_paper_prints(name, preset):
    _, config = preset(name)
    of_epoch = STEPS[name]["prompts"] // config.batch.prompts_per_step
    assert config.trainer.num_epochs * of_epoch == STEPS[name]["steps"]


def test_the_warm_up_of_view_r1_is_three_percent(preset):
    _, config = preset("view_r1_3b")
    trainer = config.trainer.model_copy(update={"num_steps": STEPS["view_r1_3b"]["steps"]})
    updates = num_optimizer_steps(config.model_copy(update={"trainer": trainer}))
    assert config.optim.warmup_steps == pytest.approx(0.03 * updates, rel=0.01)
