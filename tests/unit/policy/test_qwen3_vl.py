"""Qwen3-VL from its configuration: shapes, names, what is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from megatron_rl.checkpoints.facts import num_parameters
from megatron_rl.checkpoints.hf import HfDirectory
from megatron_rl.config.load import compose
from megatron_rl.config.schema import ParallelConfig, PrecisionConfig
from megatron_rl.models import read_architecture
from megatron_rl.models.parameter_map import (
    expert_parameters,
    hf_shapes,
    model_parameters,
    part_of,
    shards,
    tensor_slices,
)
from megatron_rl.models.problems import family_problems
from tests.zoo import model_config, save_tiny_model

NAME = "Qwen3VLForConditionalGeneration"
# Of the published 8B model, as far as sizes go.
CONFIG: dict[str, Any] = {
    "architectures": [NAME],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
    },
}
# Of the published 30B-A3B model.
EXPERTS = {
    "model_type": "qwen3_vl_moe_text",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}
MOE_CONFIG = CONFIG | {
    "architectures": [NAME.replace("VL", "VLMoe")],
    "model_type": "qwen3_vl_moe",
    "text_config": CONFIG["text_config"] | EXPERTS,
    "vision_config": CONFIG["vision_config"]
    | {"model_type": "qwen3_vl_moe", "out_hidden_size": 2048},
}


def write(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


# By hand, 30B-A3B: 48 layers of 128 * 3 * 2048 * 768 (experts), 128 * 2048 (router), 2 * 2048 *
# 4096 + 2 * 2048 * 512 (attention) and 4,352 (norms), 2 * 151,936 * 2048 + 2048 around them:
# 30,532,122,624; and a tower of 538,631,408.
@pytest.mark.parametrize(
    ("config", "count"), [(CONFIG, 8_767_123_696), (MOE_CONFIG, 30_532_122_624 + 538_631_408)]
)
def test_a_published_model_has_the_tensors_of_transformers(
    tmp_path: Path, config: dict[str, Any], count: int
) -> None:
    folder = write(tmp_path / "model", config)
    arch, _ = read_architecture(folder)
    assert num_parameters(arch, 1) == count
    (name,) = config["architectures"]
    with torch.device("meta"):
        model = getattr(transformers, name)(AutoConfig.from_pretrained(folder))
    found = {}
    for parameter in model_parameters(arch):
        found.update(hf_shapes(parameter, arch))
    # Published files have experts as [experts, in, out]: transformers turns what it reads.
    theirs = {
        name: tuple(t.transpose(1, 2).shape if ".experts." in name else t.shape)
        for name, t in model.named_parameters()
    }
    assert found == theirs
    assert (arch.mrope_section, arch.rope_theta, arch.vision.num_deep) == ((24, 20, 20), 5e6, 3)


def test_an_expert_is_a_turned_part_of_its_layers_tensor(tmp_path: Path) -> None:
    """Expert 5 on the second of two ranks: the last half of the rows of gate, then those of up."""
    sizes = dict(hidden_size=6, moe_intermediate_size=4, num_experts=8)
    text = MOE_CONFIG["text_config"] | sizes
    tower = MOE_CONFIG["vision_config"] | {"out_hidden_size": 6}
    values = MOE_CONFIG | {"text_config": text, "vision_config": tower}
    arch, _ = read_architecture(write(tmp_path / "small", values))
    first, second = expert_parameters(arch, 3, 5)
    prefix = "model.language_model.layers.3.mlp.experts"
    gate_up, down = torch.randn(8, 6, 8), torch.randn(8, 4, 6)
    for parameter, name, whole, wanted in (
        (first, "gate_up_proj", gate_up, gate_up[5].T[[2, 3, 6, 7]]),
        (second, "down_proj", down, down[5, 2:].T),
    ):
        values = torch.zeros_like(wanted, memory_format=torch.contiguous_format)
        for shard in shards(parameter, arch, 128, 1, 2):
            assert (shard.name, shard.full) == (f"{prefix}.{name}", tuple(whole.shape))
            part_of(values, shard).copy_(whole[tensor_slices(shard)])
        assert torch.equal(values, wanted)


def test_files_in_the_order_of_transformers_are_refused(tmp_path: Path) -> None:
    """vLLM would not read them."""
    save_tiny_model("qwen3_vl_moe", tmp_path)
    arch, _ = read_architecture(tmp_path)
    files = HfDirectory(tmp_path)
    (shard, _) = shards(expert_parameters(arch, 0, 1)[0], arch, 128, 0, 1)
    assert files.read_shard(shard).shape == (1, 64, 48)
    turned = replace(shard, full=(4, 96, 64))
    with pytest.raises(ValueError, match="transformers 5 saves experts so, and vLLM cannot"):
        files.read_shard(turned)


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("text_config", "attention_bias", True, "attention_bias is True"),
        ("vision_config", "hidden_act", "silu", "hidden_act is 'silu'"),
        ("text_config", "mlp_only_layers", [0], r"mlp_only_layers is \[0\]"),
        ("text_config", "decoder_sparse_step", 2, "decoder_sparse_step is 2"),
        ("text_config", "norm_topk_prob", False, "text_config has no norm_topk_prob = true; vLLM"),
        (
            "text_config",
            "rope_scaling",
            {"mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_scaling has no mrope_interleaved = true; vLLM would take other angles",
        ),
    ],
)
def test_what_the_policy_lacks_is_refused_by_name(
    tmp_path: Path, section: str, key: str, value: Any, named: str
) -> None:
    values = copy.deepcopy(MOE_CONFIG)
    values[section][key] = value
    with pytest.raises(ValueError, match=named):
        read_architecture(write(tmp_path / "model", values))


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (dict(pipeline=4), None),
        (dict(pipeline=4, virtual_pipeline=3), None),
        (dict(recompute="full"), "parallel.recompute = full: a layer that is run again"),
        (dict(pipeline=18), "parallel.pipeline = 18: the first stage begins with 2 layers, and"),
        (dict(pipeline=4, virtual_pipeline=9), "the first stage begins with 1 layers, and"),
        (dict(pipeline=3, first_stage_layers=2), "the first stage begins with 2 layers, and"),
        (dict(pipeline=2, last_stage_layers=34), "the first stage begins with 2 layers, and"),
    ],
)
def test_features_come_into_layers_that_are_beside_the_tower(
    tmp_path: Path, layout: dict[str, Any], named: str | None
) -> None:
    arch, _ = read_architecture(write(tmp_path / "8B", CONFIG))
    parallel = ParallelConfig(**(compose("parallel/single") | layout))
    precision = PrecisionConfig(**compose("precision/bf16"))
    problems = family_problems(arch, model_config(Path("m")), parallel, precision)
    assert (named is None) == (problems == [])
    assert named is None or named in problems[0]
