"""Qwen3.5 without an engine: orders of its four matrices, published files, sizes as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from megatron_rl.checkpoints.facts import num_parameters
from megatron_rl.checkpoints.hf import HfDirectory
from megatron_rl.config.load import compose
from megatron_rl.config.model_config import model_sizes, read_model_config
from megatron_rl.config.rules.engine_checks import state_bytes, token_bytes
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engine.weights.stream import expected_tensors
from megatron_rl.models import FAMILIES, read_architecture
from megatron_rl.models.parameter_map import (
    expert_parameters,
    hf_shapes,
    layer_parameters,
    model_parameters,
    part_of,
    shards,
    tensor_slices,
)
from megatron_rl.planning.parameter_counts import stage_counts
from tests.numerics.policy_cases import parallel
from tests.unit.policy.test_families import read
from tests.zoo import save_tiny_model
from tools.plan_sync import architecture

# Of the published 35B-A3B, whose other sizes are the ones that transformers begins with.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "text_config": {
        "attn_output_gate": True,
        "hidden_size": 2048,
        "linear_num_key_heads": 16,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_hidden_layers": 40,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
    "vision_config": {"out_hidden_size": 2048},
}
HIDDEN = 2048
DELTA = HIDDEN * (2 * 2048 + 2 * 4096 + 64) + 4 * 8192 + 2 * 32 + 128 + 4096 * HIDDEN
ATTENTION = HIDDEN * (2 * 4096 + 2 * 512) + 2 * 256 + 4096 * HIDDEN
EXPERTS = 257 * 3 * HIDDEN * 512 + 256 * HIDDEN + HIDDEN
LANGUAGE = 30 * DELTA + 10 * ATTENTION + 40 * (EXPERTS + 2 * HIDDEN) + 2 * 248320 * HIDDEN + HIDDEN


def write(folder: Path, changes: dict[str, Any], **of_text: Any) -> Path:
    folder.mkdir(exist_ok=True)
    text = CONFIG["text_config"] | of_text
    (folder / "config.json").write_text(json.dumps(CONFIG | {"text_config": text} | changes))
    return folder


@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_four_matrices_are_where_megatron_splits_them(size: int) -> None:
    """A tensor rank has its queries, keys, values, gates, rates, decays, of which HF has all
    queries first, then all keys, and so on. Every row carries its number."""
    arch = read("Qwen3_5")  # 2 key heads of 16, 4 value heads of 24
    (matrix,) = (p for p in layer_parameters(arch, 0) if p.slot.megatron.endswith("in_proj.weight"))
    names = [f"model.layers.0.linear_attn.in_proj_{x}.weight" for x in ("qkv", "z", "b", "a")]
    assert list(matrix.names) == names
    sizes = (32 + 32 + 96, 96, 4, 4)
    whole = {name: 1000 * i + torch.arange(n) for i, (name, n) in enumerate(zip(names, sizes))}
    q, k, v = whole[names[0]].split([32, 32, 96])
    kinds = (q, k, v, *(whole[name] for name in names[1:]))
    for rank in range(size):
        local = torch.full((264 // size, 64), -1)
        for shard in shards(matrix, arch, 128, rank, size):
            rows = whole[shard.name].view(-1, 1).expand(shard.full)
            part_of(local, shard).copy_(rows[tensor_slices(shard)])
        wanted = torch.cat([kind.chunk(size)[rank] for kind in kinds])
        assert torch.equal(local, wanted[:, None].expand(-1, 64))


def test_dense_and_with_experts() -> None:
    dense, sparse = read("Qwen3_5"), read("Qwen3_5Moe")
    assert (dense.num_experts, dense.shared_ffn_hidden_size, dense.ffn_hidden_size) == (0, 0, 96)
    assert (sparse.num_experts, sparse.shared_ffn_hidden_size) == (4, 56)
    assert dense.gated_outputs and dense.centered_norms and dense.rotary_share == 0.25
    assert [dense.kind(n) for n in (0, 1)] == [(False, True), (False, False)]
    assert [sparse.kind(n) for n in (0, 1)] == [(True, True), (True, False)]


def test_sizes_of_published_models() -> None:
    """By hand. 9B: 32 layers, hidden 4096, a feed-forward part of 12,288. 35B: see above."""
    hidden = 4096
    delta = hidden * (2 * 2048 + 2 * 4096 + 64) + 4 * 8192 + 2 * 32 + 128 + 4096 * hidden
    attention = hidden * (2 * 4096 + 2 * 1024) + 2 * 256 + 4096 * hidden
    layers = 24 * delta + 8 * attention + 32 * (3 * hidden * 12288 + 2 * hidden)
    (counts,) = stage_counts(architecture("qwen3.5-9b"), parallel(), 1)
    assert counts.total == layers + 2 * 248320 * hidden + hidden == 8_953_803_264
    arch = architecture("qwen3.5-35b")
    (counts,) = stage_counts(arch, parallel(), 1)
    assert counts.total == LANGUAGE == 34_660_610_688
    rollout = RolloutConfig(**{**compose("rollout/vllm"), "dtype": "bfloat16", "stop": ()})
    assert token_bytes(rollout, arch) == 10 * 2 * 2 * 256 * 2
    assert state_bytes(rollout, arch) == 30 * (32 * 128 * 128 + 3 * 8192) * 4


def test_a_published_model_has_the_tensors_of_transformers(tmp_path: Path) -> None:
    """Also its tower: 27 blocks of 1152, with a feed-forward part of 4304."""
    folder = write(tmp_path / "model", {})
    arch, _ = read_architecture(folder)
    width, wide, four = 1152, 4304, 4 * 1152
    block = 4 * width * width + 4 * width + 2 * width * wide + wide + width + 4 * width
    ends = (3 * 2 * 16 * 16 + 1) * width + 2304 * width
    merger = 2 * width + four * four + four + four * HIDDEN + HIDDEN
    assert num_parameters(arch, 1) == LANGUAGE + 27 * block + ends + merger
    with torch.device("meta"):
        model = getattr(transformers, CONFIG["architectures"][0])(
            AutoConfig.from_pretrained(folder)
        )
    found: dict[str, tuple[int, ...]] = {}
    for parameter in model_parameters(arch):
        found |= hf_shapes(parameter, arch)
    assert found == {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert (arch.mrope_section, arch.rope_theta, arch.rotary_share) == ((11, 11, 10), 1e7, 0.25)
    sizes = model_sizes(read_model_config(folder / "config.json", FAMILIES))
    assert (sizes.linear_layers, sizes.expert_ffn_hidden_size) == (30, 512)


def test_an_expert_is_a_part_of_its_layers_tensor_as_it_stands(tmp_path: Path) -> None:
    """Expert 5 on the second of two ranks: the last half of the rows of gate, then those of up."""
    small = dict(hidden_size=6, moe_intermediate_size=4, num_experts=8)
    path = write(tmp_path / "small", {"vision_config": {"out_hidden_size": 6}}, **small)
    arch, _ = read_architecture(path)
    first, second = expert_parameters(arch, 3, 5)
    gate_up, down = torch.randn(8, 8, 6), torch.randn(8, 6, 4)
    for parameter, whole, wanted in (
        (first, gate_up, gate_up[5, [2, 3, 6, 7]]),
        (second, down, down[5, :, 2:]),
    ):
        values = torch.zeros_like(wanted, memory_format=torch.contiguous_format)
        for shard in shards(parameter, arch, 128, 1, 2):
            assert shard.full == tuple(whole.shape)
            part_of(values, shard).copy_(whole[tensor_slices(shard)])
        assert torch.equal(values, wanted)


def test_tensors_for_further_tokens_are_left_unread(tmp_path: Path) -> None:
    path = save_tiny_model("qwen3_5_moe_vl", tmp_path / "model")
    arch, _ = read_architecture(path)
    file = path / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(2)}, file)
    HfDirectory(path).check(arch)
    assert not [name for name in expected_tensors(path) if name.startswith("mtp.")]


@pytest.mark.parametrize(
    ("changes", "of_text", "words"),
    [
        (
            {"tie_word_embeddings": True},
            {},
            "tie_word_embeddings is True, and False in text_config",
        ),
        ({}, {"rope_parameters": {"mrope_section": [24, 20, 20]}}, "rotated part of a head, of 64"),
        ({}, {"rope_parameters": {"mrope_interleaved": False}}, "no mrope_interleaved = true"),
        (
            {"vision_config": {"out_hidden_size": 2048, "deepstack_visual_indexes": [8]}},
            {},
            r"deepstack_visual_indexes is \[8\]",
        ),
        ({"architectures": ["Qwen3_5MoeForCausalLM"]}, {}, "has a text_config, but .* without a"),
        ({"model_type": "qwen3_5_moe_text"}, {}, "has no text_config, but .* with a tower"),
        ({"vision_config": {"out_hidden_size": 8}}, {}, "out_hidden_size is 8, but hidden_size"),
    ],
)
def test_what_an_engine_would_read_otherwise_is_refused(
    tmp_path: Path, changes: dict[str, Any], of_text: dict[str, Any], words: str
) -> None:
    rope = CONFIG["text_config"]["rope_parameters"] | of_text.get("rope_parameters", {})
    with pytest.raises(ValueError, match=words):
        read_architecture(write(tmp_path / "model", changes, rope_parameters=rope))
