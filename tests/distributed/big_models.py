"""Shapes of models that no machine at hand holds, layouts for them, and the same models with narrow
layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from megatron_rl.config.load import compose
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.models import Architecture, read_architecture
from megatron_rl.models.parameter_map import hf_shapes, model_parameters
from tests.unit.weight_sync.training_tables import TrainLayout

CONFIGS = {
    "7b": transformers.Qwen2Config(  # Qwen2.5-7B
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
    ),
    "70b": transformers.LlamaConfig(  # Llama 3.1 70B
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ),
    "235b": transformers.Qwen3MoeConfig(  # Qwen3-235B-A22B
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    ),
}
# Heads and experts stay as many as they are, for the layouts divide them; widths shrink, each in
# its own proportion.
NARROW = {
    "7b": {"hidden_size": 224, "intermediate_size": 384, "head_dim": 8, "vocab_size": 1000},
    "70b": {"hidden_size": 128, "intermediate_size": 320, "head_dim": 4, "vocab_size": 800},
    "235b": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 16,
        "head_dim": 4,
        "vocab_size": 520,
    },
}


@dataclass(frozen=True)
class Case:
    """``model`` laid out as ``layout`` says on ``ranks`` processes; ``looked_at``: the ranks that a
    test plays. ``few_layers``: of the narrow model, with the layers of the end stages where the
    layout names them."""

    model: str
    ranks: int
    layout: Mapping[str, Any]
    looked_at: tuple[int, ...]
    few_layers: Mapping[str, int]
    microbatches: int = 3
    full: bool = False

    @property
    def name(self) -> str:
        layout = ",".join(f"{key}={value}" for key, value in self.layout.items())
        return f"{self.model} on {self.ranks}: {layout}"

    def parallel(self, *, narrow: bool) -> ParallelConfig:
        ends = {key: value for key, value in self.few_layers.items() if key != "num_hidden_layers"}
        return ParallelConfig(
            **(
                compose("parallel/single")
                | {"sequence": True, **self.layout}
                | (ends if narrow else {})
            )
        )


def train_layout(parallel: ParallelConfig, ranks: int, vocab_multiple: int = 128) -> TrainLayout:
    """The same layout as the tables of weight syncs have it."""
    return TrainLayout(
        tp=parallel.tensor,
        pp=parallel.pipeline,
        dp=ranks // (parallel.tensor * parallel.pipeline * parallel.context),
        cp=parallel.context,
        ep=parallel.expert,
        vpp=parallel.virtual_pipeline or 1,
        first_layers=parallel.first_stage_layers,
        last_layers=parallel.last_stage_layers,
        vocab_multiple=vocab_multiple,
    )


def laid_out(text: str) -> dict[str, Any]:
    """``"tensor=4 pipeline=2"`` as fields of a layout."""
    pairs = (word.split("=") for word in text.split())
    return {key: json.loads(value) for key, value in pairs}


def layers(count: int, **ends: int) -> dict[str, int]:
    return {"num_hidden_layers": count, **ends}


OVERLAPPED = "tensor=4 overlap_grad_reduce=true overlap_param_gather=true"
ENDS = {"first_stage_layers": 1, "last_stage_layers": 1}
OF_23 = "first_stage_layers=23 last_stage_layers=23"
OF_11 = "first_stage_layers=11 last_stage_layers=11"
CASES = (
    Case("7b", 8, laid_out("tensor=4"), (7,), layers(3)),
    # The layout of conf/experiment/qwen2_5_7b_8gpu.yaml.
    Case("7b", 8, laid_out(OVERLAPPED), (5,), layers(2)),
    Case("7b", 32, laid_out("tensor=4 pipeline=2 context=2"), (0, 13, 31), layers(4), full=True),
    Case("70b", 64, laid_out("tensor=8 pipeline=4"), (63,), layers(8)),
    Case("70b", 32, laid_out("tensor=8 pipeline=4"), (9, 31), layers(4), full=True),
    Case(
        "70b",
        256,
        laid_out("tensor=8 pipeline=4 context=2"),
        (0, 77, 130, 255),
        layers(4),
        full=True,
    ),
    Case(
        "70b",
        512,
        laid_out("tensor=8 pipeline=4 virtual_pipeline=5"),
        (0, 200, 300, 511),
        layers(40),
        4,
        True,
    ),
    Case(
        "235b", 64, laid_out(f"tensor=4 pipeline=4 expert=8 {OF_23}"), (40,), layers(6, **ENDS), 2
    ),
    Case(
        "235b",
        128,
        laid_out(f"tensor=4 pipeline=8 expert=16 {OF_11}"),
        (3, 64, 127),
        layers(8, **ENDS),
        full=True,
    ),
    Case(
        "235b",
        512,
        laid_out(f"tensor=4 context=2 pipeline=8 expert=32 {OF_11}"),
        (0, 100, 250, 511),
        layers(14, **ENDS),
        full=True,
    ),
)


def write_config(
    model: str, folder: Path, changes: Mapping[str, Any] | None = None
) -> Architecture:
    """``config.json`` of the model, with ``changes``, in ``folder``; its architecture as the policy
    reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    values = json.loads(CONFIGS[model].to_json_string(use_diff=False)) | dict(changes or {})
    values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(values), encoding="ascii")
    return read_architecture(folder)[0]


def write_narrow(case: Case, folder: Path) -> Architecture:
    """The narrow model with random weights in ``folder``."""
    changes = NARROW[case.model] | {"num_hidden_layers": case.few_layers["num_hidden_layers"]}
    arch = write_config(case.model, folder, changes)
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for parameter in model_parameters(arch):
        for name, shape in hf_shapes(parameter, arch).items():
            tensors[name] = (torch.randn(shape, generator=draw) * 0.1).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return arch
