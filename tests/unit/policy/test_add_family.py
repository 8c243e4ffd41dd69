"""tools/add_family.py: the nearest family of an unknown architecture, and a skeleton that reads
it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Llama4TextConfig, Olmo2Config, Phi3Config, SeedOssConfig

from megatron_rl.models.parameter_map import hf_names
from tests.launch import REPO
from tests.zoo import save_tiny_model

pytestmark = [pytest.mark.full, pytest.mark.timeout(200)]  # transformers makes models of them
SIZES = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(num_hidden_layers=2, intermediate_size=96, vocab_size=128, eos_token_id=1)


def ask(folder: Path) -> str:
    command = [sys.executable, REPO / "tools/add_family.py", folder]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_an_unknown_architecture_gets_a_file_that_reads_it(tmp_path: Path) -> None:
    """Seed-OSS has the tensors of Qwen2, and options of its own."""
    config = SeedOssConfig(**SIZES, head_dim=24, architectures=["SeedOssForCausalLM"])
    config.save_pretrained(tmp_path)
    said, skeleton = ask(tmp_path).split("to begin with:\n\n")
    lines = said.splitlines()
    assert lines[0].startswith("SeedOssForCausalLM is not a known family.")
    assert lines[1] == "  Qwen2ForCausalLM: has the same tensors"
    assert "  Glm4MoeForCausalLM: refuses: there is no use_qk_norm" in lines
    assert "'attention_out_bias': False" in lines[-3]
    written: dict[str, Any] = {}
    exec(skeleton, written)
    arch = written["FAMILY"].read(config)
    assert (arch.head_dim, arch.qkv_bias) == (24, True)
    assert "model.layers.1.self_attn.q_proj.bias" in hf_names(arch)
    config.attention_out_bias = True
    with pytest.raises(ValueError, match="attention_out_bias is True"):
        written["FAMILY"].read(config)


def test_what_no_family_has_is_named(tmp_path: Path) -> None:
    """A model with the norms of OLMo 2: behind attention and feed-forward part."""
    Olmo2Config(**SIZES, architectures=["NewForCausalLM"]).save_pretrained(tmp_path)
    (nearest,) = [line for line in ask(tmp_path).splitlines() if line.startswith("  Qwen3For")]
    assert nearest.split(": ", 1)[1] == (
        "lacks model.layers.*.input_layernorm.weight; does not know"
        " model.layers.*.post_feedforward_layernorm.weight"
    )


def test_the_skeleton_begins_with_the_reader_of_the_nearest(tmp_path: Path) -> None:
    """Three families stand in one file."""
    Phi3Config(**SIZES, pad_token_id=0, architectures=["NewForCausalLM"]).save_pretrained(tmp_path)
    assert "from megatron_rl.models.llama import read_phi as nearest\n" in ask(tmp_path)


def test_what_all_refuse_gets_no_skeleton(tmp_path: Path) -> None:
    """Llama 4 has layers whose tokens see those of a chunk."""
    more = dict(num_local_experts=4, head_dim=16, architectures=["Llama4ForCausalLM"])
    Llama4TextConfig(**SIZES, **more, intermediate_size_mlp=96).save_pretrained(tmp_path)
    said = ask(tmp_path)
    assert "  MistralForCausalLM: refuses: config.json of llama4_text: layer_types is" in said
    assert said.endswith(
        "Each of them refuses it: begin with the guide, .github/guides/family.md\n"
    )


def test_a_known_family_is_no_news(tmp_path: Path) -> None:
    path = save_tiny_model("qwen3", tmp_path / "model")
    assert ask(path) == f"Qwen3ForCausalLM is a known family; a run reads {path}\n"
