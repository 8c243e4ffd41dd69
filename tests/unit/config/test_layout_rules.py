"""Which layouts a model can have: each rule is broken once, and says key, value and remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.config.load import compose
from megatron_rl.config.model_config import ModelSizes, model_sizes
from megatron_rl.config.rules.layout_rules import layout_problems, rollout_problems, stage_layers
from megatron_rl.config.schema import ParallelConfig, RolloutConfig

DENSE = ModelSizes(
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=96,
    vocab_size=128,
)
EXPERTS = replace(DENSE, num_experts=4, expert_ffn_hidden_size=48)
ROWS = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text())


def sized(changes: dict[str, Any]) -> ModelSizes:
    """``of``: dense or experts; the rest are its sizes that differ."""
    others = {name: size for name, size in changes.items() if name != "of"}
    return replace(EXPERTS if changes["of"] == "experts" else DENSE, **others)


def parallel(**layout: Any) -> ParallelConfig:
    return ParallelConfig(
        **{**compose("parallel/single"), "distributed_optimizer": False, **layout}
    )


def problems(sizes: ModelSizes = DENSE, world: int = 8, **layout: Any) -> list[str]:
    return layout_problems(sizes, parallel(**layout), world)


def test_layouts_that_fit_have_no_problem() -> None:
    assert problems(tensor=2, pipeline=2, context=2, sequence=True) == []
    assert problems(EXPERTS, tensor=2, sequence=True, expert=4, pipeline=2) == []
    # Two ranks share each of the two key-value heads.
    assert problems(pipeline=2, first_stage_layers=1, last_stage_layers=3, tensor=4) == []


@pytest.mark.parametrize(
    ("sizes", "layout", "named"), ROWS["a_layout_that_does_not_fit_names_key_value_and_remedy"]
)
def test_a_layout_that_does_not_fit_names_key_value_and_remedy(
    sizes: dict[str, Any], layout: dict[str, Any], named: str
) -> None:
    assert named in "\n".join(problems(sized(sizes), **layout))


def test_all_problems_are_told_at_once() -> None:
    assert len(problems(tensor=3, virtual_pipeline=2, sequence=True, expert=2)) >= 4


@pytest.mark.parametrize(("sizes", "engine", "named"), ROWS["what_an_engine_can_be_cut_into"])
def test_what_an_engine_can_be_cut_into(
    sizes: dict[str, Any], engine: dict[str, Any], named: str | None
) -> None:
    rollout = RolloutConfig(**{**compose("rollout/vllm"), "stop": (), **engine})
    found = list(rollout_problems(sized(sizes), rollout))
    assert len(found) == (named is not None)
    assert named is None or named in found[0]


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (dict(), [28]),
        (dict(pipeline=4), [7, 7, 7, 7]),
        (dict(pipeline=4, first_stage_layers=4, last_stage_layers=6), [4, 9, 9, 6]),
        (dict(pipeline=2, first_stage_layers=12), [12, 16]),
        (dict(pipeline=2, first_stage_layers=12, last_stage_layers=16), [12, 16]),
    ],
)
def test_layers_of_the_stages(layout: dict[str, Any], layers: list[int]) -> None:
    assert stage_layers(replace(DENSE, num_layers=28), parallel(**layout)) == layers


def test_sizes_that_config_json_leaves_out() -> None:
    written = {"num_attention_heads": 28, "hidden_size": 3584, "intermediate_size": 18944}
    sizes = model_sizes({**written, "num_key_value_heads": None})
    assert (sizes.num_kv_heads, sizes.head_dim, sizes.num_experts) == (28, 128, 0)
    # Mixtral's experts have the width of the dense layer; Qwen3-MoE's a key of their own.
    assert model_sizes({**written, "num_local_experts": 8}).expert_ffn_hidden_size == 18944
    own = {**written, "num_experts": 128, "moe_intermediate_size": 768}
    assert model_sizes(own).expert_ffn_hidden_size == 768
    assert model_sizes({**own, "num_experts": 0}).expert_ffn_hidden_size == 0
    assert model_sizes({"hidden_size": 64}).head_dim == 0
