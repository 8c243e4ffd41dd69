"""Qwen3-VL from its configuration: shapes, names, what is refused. No weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Qwen3VLForConditionalGeneration

from megatron_rl.checkpoints.facts import num_parameters
from megatron_rl.config.load import compose
from megatron_rl.config.schema import ParallelConfig, PrecisionConfig
from megatron_rl.models import FAMILIES, read_architecture
from megatron_rl.models.base import family_problems
from megatron_rl.models.parameter_map import hf_shapes, model_parameters
from tests.zoo import model_config

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


def write(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_published_model_has_the_tensors_of_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path / "8B", CONFIG)
    arch, hf = read_architecture(folder)
    assert num_parameters(arch, 1) == 8_767_123_696
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(folder))
        tower = FAMILIES[NAME].tower(hf)
    found = {}
    for parameter in model_parameters(arch):
        found.update(hf_shapes(parameter, arch))
    assert found == {name: tuple(t.shape) for name, t in model.named_parameters()}
    in_module = [(f"visual.{name}", tuple(t.shape)) for name, t in tower.named_parameters()]
    assert in_module == list(arch.vision.tensors)
    assert (arch.mrope_section, arch.rope_theta, arch.vision.num_deep) == ((24, 20, 20), 5e6, 3)


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("text_config", "attention_bias", True, "attention_bias is True"),
        ("vision_config", "hidden_act", "silu", "hidden_act is 'silu'"),
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
    values = copy.deepcopy(CONFIG)
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
