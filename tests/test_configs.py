"""Every file of conf/ composes, validates and passes the start-up checks of the machine it is made
for."""

import json
from pathlib import Path

import pytest

from megatron_rl.config.load import compose, conf_dir, validate
from megatron_rl.config.rules.checks import check
from megatron_rl.config.schema import Config

QWEN2_5_7B = {
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "max_position_embeddings": 32768,
}
# The published file has the sizes of its language model at the top.
QWEN2_5_VL_7B = QWEN2_5_7B | {"max_position_embeddings": 128000, "vision_config": {"depth": 32}}
TOY = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
}
EXPERIMENTS = {  # name -> (processes, shape of the model it is for)
    "qwen2_5_7b_8gpu": (8, QWEN2_5_7B),
    "qwen2_5_vl_7b_8gpu": (8, QWEN2_5_VL_7B),
    "geo3k_durian": (8, QWEN2_5_VL_7B),
    "game_cpu": (2, TOY),
    "quickstart_cpu": (2, TOY),
    "servers_cpu": (2, TOY),
    "tools_cpu": (2, TOY),
    "vision_cpu": (2, TOY),
    "warm_start": (8, QWEN2_5_7B),
}


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    (tmp_path / "rows.jsonl").write_text("{}")
    return [
        f"model.path={tmp_path}",
        f"data.train={tmp_path}/rows.jsonl",
        f"data.eval={tmp_path}/rows.jsonl",
    ]


def test_every_experiment_is_listed_here():
    assert {path.stem for path in (conf_dir() / "experiment").glob("*.yaml")} == set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_pass_the_start_up_checks(name, paths, tmp_path):
    processes, shape = EXPERIMENTS[name]
    if name == "warm_start":
        paths = [paths[0], f"warm_start.data={tmp_path}/rows.jsonl", paths[2]]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = validate(Config, compose("config", [f"experiment={name}", *paths]), name)
    check(config, processes)


@pytest.mark.parametrize(
    "option",
    [
        f"{path.parent.name}={path.stem}"
        for path in sorted(conf_dir().glob("*/*.yaml"))
        # Methods: tests/unit/loss/test_methods.py reads each.
        if path.parent.name not in ("experiment", "method")
    ],
)
def test_every_option_of_every_group_validates(option, paths):
    if option in ("reward=judge", "reward=model"):
        paths += ["reward.server.url=http://127.0.0.1:1", "reward.server.model=m"]
    validate(Config, compose("config", [option, *paths]), option)


def test_no_value_of_the_root_is_overridden_by_its_own_group():
    """Each default has one home: a key of config.yaml is not a group as well."""
    root = {
        line.split(":")[0]
        for line in (conf_dir() / "config.yaml").read_text().splitlines()
        if line[:1].isalpha()
    }
    groups = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    assert not root & groups
