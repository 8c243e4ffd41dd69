"""HF configurations of each family: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron_rl.policy.families import FAMILIES, architecture_from, read_architecture
from megatron_rl.policy.parallel import layout_problems
from tests.numerics.models import MODELS, SMALL
from tests.numerics.policy_cases import parallel


def config(kind: str, **more: Any) -> Any:
    name = {"Qwen3Moe": "qwen3_moe"}.get(kind, kind.lower())
    return getattr(transformers, f"{kind}Config")(**(SMALL | MODELS[name][1] | more))


def read(kind: str, **more: Any) -> Any:
    return architecture_from(config(kind, **more), f"{kind}ForCausalLM")


def test_options_of_each_family() -> None:
    assert read("Qwen2").qkv_bias
    assert not read("Llama").qkv_bias
    assert (read("Qwen3").qk_norm, read("Qwen3").head_dim) == (True, 24)
    assert (read("Llama").head_dim, read("Llama").rope_type) == (16, "llama3")
    assert (read("Qwen3Moe").num_experts, read("Qwen3Moe").expert_ffn_hidden_size) == (4, 48)
    assert (read("Mixtral").num_experts, read("Mixtral").expert_ffn_hidden_size) == (4, 96)
    assert len(FAMILIES) == 6


@pytest.mark.parametrize(
    ("kind", "option", "named"),
    [
        ("Qwen2", dict(use_sliding_window=True, sliding_window=16), "use_sliding_window is True"),
        ("Qwen3", dict(attention_bias=True), "attention_bias is True"),
        ("Llama", dict(attention_bias=True), "attention_bias is True"),
        ("Llama", dict(mlp_bias=True), "mlp_bias is True"),
        ("Llama", dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
        ("Mistral", dict(sliding_window=16), "sliding_window is 16"),
        ("Mixtral", dict(sliding_window=16), "sliding_window is 16"),
        ("Qwen3Moe", dict(norm_topk_prob=False), "norm_topk_prob is False"),
        ("Qwen3Moe", dict(mlp_only_layers=[0]), r"mlp_only_layers is \[0\]"),
        (
            "Llama",
            dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}),
            "rope type is 'yarn'",
        ),
    ],
)
def test_an_option_that_is_not_implemented_is_refused_by_name(kind: str, option: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read(kind, **option)


def test_directories_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path: .*missing is not a directory"):
        read_architecture(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLN"]}))
    with pytest.raises(ValueError, match=r"\['Qwen3ForCausalLN'\].*nearest: Qwen3ForCausalLM.*LlamaForCausalLM"):
        read_architecture(tmp_path)


def problems(kind: str = "Qwen2", world: int = 8, **layout: Any) -> str:
    return "\n".join(layout_problems(read(kind), parallel(**layout), world))


def test_layouts_that_fit_have_no_problem() -> None:
    assert problems(tensor=2, pipeline=2, context=2, sequence=True) == ""
    assert problems("Mixtral", tensor=2, sequence=True, expert=4, pipeline=2) == ""
    assert problems(pipeline=2, first_stage_layers=1, last_stage_layers=3, tensor=4) == ""


@pytest.mark.parametrize(
    ("kind", "layout", "named"),
    [
        ("Qwen2", dict(tensor=3), "tensor 3 x pipeline 1 x context 1 = 3 does not divide the world size 8"),
        ("Qwen2", dict(tensor=8), "parallel.tensor is 8, which does not divide the model's 4 attention heads"),
        ("Llama", dict(pipeline=8), "parallel.pipeline is 8: 4 layers"),
        ("Qwen2", dict(virtual_pipeline=2), "parallel.virtual_pipeline is 2 but parallel.pipeline is 1"),
        ("Qwen2", dict(pipeline=2, virtual_pipeline=4), "parallel.virtual_pipeline is 4, which does not divide"),
        ("Qwen2", dict(pipeline=2, first_stage_layers=1, last_stage_layers=2), "do not split evenly"),
        ("Qwen2", dict(first_stage_layers=1), "but parallel.pipeline is 1"),
        ("Qwen2", dict(sequence=True), "parallel.sequence is true but parallel.tensor is 1"),
        ("Qwen2", dict(expert=2), "parallel.expert is 2, but qwen2 has no experts"),
        ("Mixtral", dict(expert=8), "parallel.expert is 8, which does not divide the 4 experts"),
        ("Mixtral", dict(tensor=2), "needs parallel.sequence=true"),
        ("Qwen2", dict(overlap_param_gather=True), "needs parallel.distributed_optimizer=true"),
    ],
)
def test_a_layout_that_does_not_fit_names_key_value_and_remedy(kind: str, layout: dict[str, Any], named: str) -> None:
    assert named in problems(kind, **layout)


def test_all_problems_are_told_at_once() -> None:
    text = problems(tensor=3, virtual_pipeline=2, sequence=True, expert=2)
    assert len(text.splitlines()) >= 4
