"""Start-up checks: every impossible combination of sizes is refused with key, value and remedy."""

import json
from pathlib import Path

import pytest

from megatron_rl.config.checks import check
from megatron_rl.config.load import ConfigError, compose, validate
from megatron_rl.config.schema import Config

MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "max_position_embeddings": 512}
SMALL = (
    "rollout.max_prompt_tokens=64",
    "rollout.max_response_tokens=64",
    "batch.prompts_per_step=8",
    "batch.prompts_per_minibatch=4",
    "batch.tokens_per_microbatch=256",
)


@pytest.fixture
def run(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "data.jsonl").write_text("{}")
    paths = (f"model.path={tmp_path}", f"data.train={tmp_path}/data.jsonl", f"data.eval={tmp_path}/data.jsonl")

    def run(world_size: int, *overrides: str) -> list[str]:
        config = validate(Config, compose("config", [*paths, *SMALL, *overrides]), "the configuration")
        try:
            check(config, world_size)
        except ConfigError as error:
            return error.problems
        return []

    return run


def test_a_sound_configuration_passes(run):
    assert run(4, "parallel=tp2", "rollout.tensor=2") == []


@pytest.mark.parametrize(
    ("world_size", "overrides", "key"),
    [
        (
            3,
            ["parallel=tp2", "batch.prompts_per_minibatch=8"],
            "parallel: tensor 2 x pipeline 1 x context 1 = 2 does not divide the 3 processes",
        ),
        (2, ["rollout.tensor=4"], "rollout.tensor = 4"),
        (2, ["batch.prompts_per_minibatch=3"], "batch.prompts_per_minibatch = 3"),
        (4, ["batch.prompts_per_minibatch=1", "batch.responses_per_prompt=2"], "data-parallel ranks"),
        (8, ["batch.prompts_per_step=4", "batch.prompts_per_minibatch=4"], "rollout replicas"),
        (2, ["batch.tokens_per_microbatch=100"], "raise it to 128"),
        (4, ["parallel.tensor=4"], "2 key-value heads"),
        (3, ["parallel.pipeline=3"], "4 layers do not divide into 3 stages"),
        (2, ["parallel.sequence=true"], "parallel.sequence"),
        (2, ["parallel.virtual_pipeline=2"], "parallel.virtual_pipeline = 2"),
        (2, ["rollout.max_response_tokens=500", "batch.tokens_per_microbatch=1000"], "512 positions"),
        (2, ["evaluation.pass_at=[1,4]"], "evaluation.pass_at = 4"),
        (2, ["data.eval=/nowhere.jsonl"], "data.eval = /nowhere.jsonl"),
        (2, ["model.path=/nowhere"], "model.path = /nowhere"),
        (2, ["resume=/nowhere"], "resume = /nowhere"),
    ],
)
def test_each_clash_is_named(run, world_size, overrides, key):
    found = run(world_size, *overrides)
    assert len(found) == 1, found
    assert key in found[0]


def test_clashes_are_reported_together(run):
    assert len(run(2, "rollout.tensor=4", "batch.prompts_per_minibatch=3", "resume=/nowhere")) == 3
