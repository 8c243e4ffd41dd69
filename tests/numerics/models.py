"""Tiny HF models of every family with random weights, made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, num_hidden_layers=4, rms_norm_eps=1e-6,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", dict(vocab_size=128, tie_word_embeddings=False)),
    "qwen2_tied": ("Qwen2", dict(vocab_size=128, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(vocab_size=128, head_dim=24, tie_word_embeddings=True)),
    "llama": ("Llama", dict(vocab_size=123, tie_word_embeddings=False, rope_parameters=LLAMA3)),
    "mistral": ("Mistral", dict(vocab_size=128, head_dim=16, sliding_window=None, tie_word_embeddings=False)),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(vocab_size=128, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True,
             tie_word_embeddings=False, num_hidden_layers=2),
    ),
    "mixtral": (
        "Mixtral", dict(vocab_size=128, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, tie_word_embeddings=False,
                        num_hidden_layers=2),
    ),
}  # fmt: skip


def make(name: str, seed: int = 0, layers: int | None = None) -> transformers.PreTrainedModel:
    """The model in float32, evaluation mode; norms and biases away from their initial values."""
    kind, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(SMALL | more | ({"num_hidden_layers": layers} if layers else {})))
    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 + (1.0 if "norm" in key else 0.0) if parameter.dim() == 1 else noise * 0.05)
    return model


def save(name: str, path: Path, seed: int = 0, layers: int | None = None) -> Path:
    """Writes the HF directory of ``make(name, seed)``."""
    model = make(name, seed, layers)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(path)
    return path
