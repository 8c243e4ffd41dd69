"""Small random models on disk, an engine for them, and what transformers says about their
responses."""

from __future__ import annotations

import ast
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_rl.annealing import AnnealConfig
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.models.moe.deepseek_v3 import ROUTER
from megatron_rl.types import Completion, Prompt, Sampling
from tests import zoo
from tests.tiny_options import TWO_BASES, YARN, YARN2, YARN_OR_PLAIN
from tests.zoo import transformer

VOCAB, EOS = 96, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
# vLLM's latent attention for CPUs takes 512 + 64 numbers of a token alone.
LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    **ROUTER,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# vLLM's delta rule for CPUs takes heads of 64 and 128.
DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "tie_word_embeddings": False,
}
FAMILIES = {
    "qwen3": {"head_dim": 32, "tie_word_embeddings": False},
    "qwen3_yarn": {"head_dim": 32, "tie_word_embeddings": False, "rope_parameters": YARN2},
    "qwen2_tied": {"tie_word_embeddings": True},  # with qkv bias
    "llama": {"tie_word_embeddings": False},
    "phi3": {"tie_word_embeddings": False},
    "olmo2": {"tie_word_embeddings": False},
    "olmo3": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": YARN_OR_PLAIN,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "head_dim": 32,
        **EXPERTS,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "glm4_moe": {
        "head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "rope_parameters": YARN,
        "n_group": 4,
        "topk_group": 2,
        **LATENT,
    },
    "moonlight": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        **LATENT,
    },
    "gemma3": {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": TWO_BASES,
    },
    "gemma3_yarn": {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": YARN_OR_PLAIN,
    },
    "mistral_window": {"head_dim": 32, "sliding_window": 6, "tie_word_embeddings": False},
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "intermediate_size": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": YARN2 | {"truncate": False},
        "tie_word_embeddings": False,
    },
    "qwen3_next": DELTA | EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_5": DELTA | {"tie_word_embeddings": True},
    "qwen3_5_moe": DELTA | EXPERTS | {"shared_expert_intermediate_size": 64},
    "mixtral": {
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "intermediate_size": 128,
        "tie_word_embeddings": False,
    },
}

# vLLM has no code of its own for these: it runs that of transformers, whose classes it changes.
# Their models have to be made before an engine is.
BY_TRANSFORMERS = ("olmo2", "olmo3")


def build(arch: str, seed: int) -> PreTrainedModel:
    """A model of one of FAMILIES, large enough for the kernels of vLLM."""
    torch.manual_seed(seed)
    model = transformer(arch, SIZES | FAMILIES[arch])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                centered = arch.startswith("gemma3") or arch in zoo.LINEAR
                centered &= "linear_attn" not in name
                parameter.normal_(0.0 if centered else 1.0, 0.1)
            else:
                parameter.normal_(0.0, 0.12)
    return model.float().eval()


def write(arch: str, seed: int, directory: Path) -> Path:
    path = directory / f"{arch}_{seed}"
    build(arch, seed).save_pretrained(path)
    return path


ANNEAL = {
    "start": 1.2,
    "end": 0.3,
    "decay_tokens": 20.0,
    "decay_growth": 0.0,
    "decay_limit": 20.0,
    "plain_tokens": 3,
    "policy": "annealed",
}


# What vLLM's kernels for CPUs take.
LINEAR: dict[str, Any] = {"dtype": "bfloat16", "enable_prefix_caching": False}


def number_format(arch: str) -> str:
    return LINEAR["dtype"] if arch in zoo.LINEAR else "float32"


def engine_config(arch: str = "", **changes: object) -> RolloutConfig:
    values = (LINEAR if arch in zoo.LINEAR else {}) | changes
    return _engine_config(**values)


def _engine_config(**changes: object) -> RolloutConfig:
    values = {
        "tensor": 1,
        "pipeline": 1,
        "expert_parallel": False,
        "dtype": "float32",
        "quantization": None,
        "temperature": 1.0,
        "anneal": AnnealConfig(**(ANNEAL | {"start": None})),
        "top_p": 1.0,
        "top_k": -1,
        "router_replay": "none",
        "max_prompt_tokens": 300,
        "max_response_tokens": 64,
        "response_stages": None,
        "stop": (),
        "max_num_seqs": 64,
        "kv_cache_gib": 0.03125,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "batch_invariant": False,
        "sleep_level": 0,
    }
    return RolloutConfig(**{**values, **changes})


def make_prompts(count: int, length: int = 6, seed: int = 0) -> list[Prompt]:
    """``count`` prompts of ``length``, ``length + 1``, ... random tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randint(3, VOCAB, (length + index,), generator=generator).tolist()
        for index in range(count)
    ]
    return [
        Prompt(uid=f"p{index}", token_ids=tuple(row), answer="", data_source="")
        for index, row in enumerate(rows)
    ]


def sampling(**changes: object) -> Sampling:
    return Sampling(**{"num_responses": 4, "max_response_tokens": 24, "seed": 11, **changes})


@torch.no_grad()
def reference_logits(model: PreTrainedModel, prompt: Prompt, completion: Completion) -> Tensor:
    """Logits of transformers at every response token, [response tokens, vocabulary]."""
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
    return model(ids).logits[0, len(prompt.token_ids) - 1 : -1].double()


def logprob_gap(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Completion]],
    change: Callable[[Tensor], Tensor],
) -> float:
    """Largest distance between the engine's logprobs and log softmax(change(logits)) of
    transformers."""
    gap = 0.0
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            logprobs = change(reference_logits(model, prompt, completion)).log_softmax(-1)
            want = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            gap = max(
                gap,
                (torch.tensor(completion.sampler_logprobs, dtype=torch.float64) - want)
                .abs()
                .max()
                .item(),
            )
    return gap


def tokens(groups: Sequence[Sequence[Completion]]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in group] for group in groups]


def logprobs(groups: Sequence[Sequence[Completion]]) -> Tensor:
    return torch.tensor(
        [
            value
            for group in groups
            for completion in group
            for value in completion.sampler_logprobs
        ],
        dtype=torch.float64,
    )


def run_cases(cases: Mapping[str, Callable[[], None]] | Sequence[Callable[[], None]]) -> None:
    """Runs every case and prints ``OK name`` or ``FAILED name`` with the traceback; a failed case
    does not stop the others."""
    named = cases if isinstance(cases, Mapping) else {case.__name__: case for case in cases}
    for name, case in named.items():
        try:
            case()
        except Exception:  # noqa: BLE001 - reported, and the test of this case fails
            say(f"FAILED {name}\n{traceback.format_exc()}")
        else:
            say(f"OK {name}")
    os._exit(0)  # engines are not taken down in order: they would wait for each other


def say(text: str) -> None:
    """A line of its own also when several processes write at once."""
    sys.stdout.flush()
    os.write(1, f"\n{text}\n".encode())


def cases_of(worker: Path) -> list[str]:
    """The names of the functions in ``CASES`` of a program, which is not imported."""
    for node in ast.parse(worker.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES":
            assert isinstance(node.value, ast.Tuple)
            return [ast.unparse(name) for name in node.value.elts]
    raise AssertionError(f"{worker} has no CASES")


def verdict(output: str, name: str, ranks: int = 1) -> str:
    """Empty when every rank printed ``OK name``, else the output."""
    return "" if output.splitlines().count(f"OK {name}") == ranks else f"{name} failed:\n{output}"
