"""Which layouts a model can have: each rule is broken once, and says key, value and remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

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
    ("sizes", "layout", "named"),
    [
        (
            DENSE,
            dict(tensor=3),
            "tensor 3 x pipeline 1 x context 1 = 3 does not divide the 8 processes",
        ),
        (
            DENSE,
            dict(tensor=8),
            "parallel.tensor = 8: does not divide the model's 4 attention heads",
        ),
        (
            replace(DENSE, num_heads=12, num_kv_heads=3),
            dict(tensor=2),
            "parallel.tensor = 2: neither a divisor nor a multiple of the model's 3 key-value",
        ),
        (
            replace(DENSE, num_heads=8, num_kv_heads=1, head_dim=1),
            dict(tensor=4),
            "parallel.tensor = 4: does not divide the model's 10 query, key and value rows",
        ),
        (
            replace(DENSE, ffn_hidden_size=97),
            dict(tensor=2),
            "parallel.tensor = 2: does not divide the model's 97 feed-forward rows",
        ),
        (DENSE, dict(pipeline=8), "parallel.pipeline = 8: 4 of 4 layers do not divide into 8"),
        (
            DENSE,
            dict(virtual_pipeline=2),
            "parallel.virtual_pipeline = 2: needs parallel.pipeline > 1",
        ),
        (
            DENSE,
            dict(pipeline=2, virtual_pipeline=4),
            "parallel.virtual_pipeline = 4: does not divide the layers of each stage (2, 2)",
        ),
        (
            DENSE,
            dict(pipeline=2, first_stage_layers=1, last_stage_layers=2),
            "1 of 4 layers do not divide into 0 stages; change it, parallel.first_stage_layers",
        ),
        (
            DENSE,
            dict(first_stage_layers=1),
            "parallel.first_stage_layers = 1: needs parallel.pipeline > 1",
        ),
        (DENSE, dict(sequence=True), "parallel.sequence = True: splits sequences over"),
        (DENSE, dict(expert=2), "parallel.expert = 2: the model has no experts"),
        (DENSE, dict(expert_tensor=2), "parallel.expert_tensor = 2: the model has no experts"),
        (EXPERTS, dict(expert=8), "parallel.expert = 8: does not divide the model's 4 experts"),
        (
            EXPERTS,
            dict(expert=3),
            "expert_tensor 1 x expert 3 x pipeline 1 = 3 does not divide the 8 processes",
        ),
        (
            replace(EXPERTS, expert_ffn_hidden_size=49),
            dict(expert_tensor=2),
            "parallel.expert_tensor = 2: does not divide the 49 feed-forward rows of an expert",
        ),
        (EXPERTS, dict(tensor=2), "set parallel.sequence=true"),
        (DENSE, dict(overlap_param_gather=True), "needs parallel.distributed_optimizer=true"),
    ],
)
def test_a_layout_that_does_not_fit_names_key_value_and_remedy(
    sizes: ModelSizes, layout: dict[str, Any], named: str
) -> None:
    assert named in "\n".join(problems(sizes, **layout))


def test_all_problems_are_told_at_once() -> None:
    assert len(problems(tensor=3, virtual_pipeline=2, sequence=True, expert=2)) >= 4


@pytest.mark.parametrize(
    ("sizes", "engine", "named"),
    [
        (DENSE, dict(tensor=1), None),
        (DENSE, dict(tensor=4), None),  # each key-value head on two ranks
        (DENSE, dict(tensor=2, pipeline=4), None),
        (EXPERTS, dict(tensor=2, expert_parallel=True), None),
        (replace(EXPERTS, expert_ffn_hidden_size=49), dict(tensor=2, expert_parallel=True), None),
        (
            DENSE,
            dict(tensor=3),
            "rollout.tensor = 3: does not divide the model's 4 attention heads",
        ),
        (
            replace(DENSE, num_heads=12, num_kv_heads=4),
            dict(tensor=6),
            "rollout.tensor = 6: neither a divisor nor a multiple of the model's 4 key-value heads",
        ),
        (replace(DENSE, ffn_hidden_size=97), dict(tensor=2), "the model's 97 feed-forward rows"),
        (
            replace(EXPERTS, expert_ffn_hidden_size=49),
            dict(tensor=2),
            "the model's 49 feed-forward rows",
        ),
        (DENSE, dict(pipeline=5), "rollout.pipeline = 5: the model has 4 layers"),
        (
            DENSE,
            dict(tensor=2, expert_parallel=True),
            "rollout.expert_parallel = True: the model has no experts",
        ),
        (EXPERTS, dict(expert_parallel=True), "and rollout.tensor = 1; raise that"),
        (
            replace(EXPERTS, num_heads=8, num_kv_heads=8),
            dict(tensor=8, expert_parallel=True),
            "the model has 4 experts for rollout.tensor = 8 ranks",
        ),
    ],
)
def test_what_an_engine_can_be_cut_into(
    sizes: ModelSizes, engine: dict[str, Any], named: str | None
) -> None:
    rollout = RolloutConfig(**{**compose("rollout/vllm"), "stop": (), **engine})
    found = list(rollout_problems(sizes, rollout))
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
