"""The presets of papers: each value is that of tests/papers.yaml, the run passes the start-up
checks, and it fits the hardware of its paper."""

from __future__ import annotations

import json
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
# The rows of the main tables: methods with the preset's other values.
ROWS = {
    "view_r1_3b": ("grpo", "apo_stcr", "apo_dads", "dr_grpo", "gspo"),
    "a_grae_math_7b": (
        "grpo dapo dr_grpo a_grae_dapo a_grae_dr_grpo a_grae_ass a_grae_ddas positive_dominant"
        " negative_dominant easy_focused hard_focused gspo w_reinforce"
    ).split(),
    "geo3k_3b": ("dapo", "dr_grpo"),
    "a_grae_geo3k_vl": ("a_grae_dapo", "a_grae_dr_grpo"),
    "durian_7b": ("grpo", "durian_perceptual", "durian_reasoning"),
    "durian_dapo_7b": ("dapo",),
    "mapo_geo3k_g12": ("grpo", "dapo", "mapo_apd"),
    "mapo_emotion_g8": ("grpo", "dapo", "mapo_apd"),
}


@pytest.fixture
def preset(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("{}")

    def preset(name: str, *more: str) -> tuple[dict[str, Any], Config]:
        size, model = TABLE[name]["model"], tmp_path / "model"
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


@pytest.mark.parametrize(("name", "method"), [(n, row) for n, rows in ROWS.items() for row in rows])
def test_rows_of_the_tables_pass_the_start_up_checks(name, method, preset):
    _, config = preset(name, f"method={method}")
    check(config, GPUS)


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
