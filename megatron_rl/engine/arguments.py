"""The arguments of ``vllm.LLM``, made from ``rollout.*``."""

from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.model_config import QUANTIZATION, read_json
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engine.requests import MultimodalConfig
from megatron_rl.engine.routed_experts import arguments_to_return
from megatron_rl.engine.weights.lazy_loading import WITHOUT_WEIGHTS
from megatron_rl.runtime.launch import NO_LIMIT

# rollout.quantization -> what vLLM calls it; its own "fp8" is an old name for the same.
VLLM_QUANTIZATION = {"fp8": "fp8_per_tensor"}

# Prompts of one prefill on a CPU, where a longer prompt does not raise it.
_BATCHED_TOKENS = 8192

# Else vLLM rounds the logits that it samples from to the type of the weights: bfloat16 has steps of
# 0.125 at 20, and the policy's head keeps float32. Its CPU build casts the head at every step, its
# CUDA build lets the product accumulate in float32.
_FLOAT32_HEAD = {"head_dtype": "float32"}

# Most logprobs of a token that a request may ask for, but for those of kept tokens.
_MOST_LOGPROBS = 257

# By name: its module needs vLLM, which is imported when the engine is built.
_CHANGED_LOGITS = "megatron_rl.engine.logits_processors:ChangedLogits"


def served_settings(config: RolloutConfig) -> dict[str, str]:
    """What the answers of a server depend on and no request says, by configuration key.

    A run compares its own with each server's. A server that can anneal serves one that does not.
    """
    settings = {
        "rollout.dtype": str(config.dtype),
        "rollout.quantization": config.quantization or "null",
    }
    if config.anneal.schedule is not None:
        settings["rollout.anneal.start"] = "set"
    if config.batch_invariant:
        settings["rollout.batch_invariant"] = "true"
    if config.is_truncated:
        settings["rollout.top_k"] = str(config.top_k)
    if config.router_replay == "rollout":
        settings["rollout.router_replay"] = config.router_replay
    return settings


def engine_arguments(
    model_path: str,
    config: RolloutConfig,
    seed: int,
    multimodal: MultimodalConfig | None = None,
    *,
    without_weights: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for one rank.

    ``seed``: of the engine's own generator; requests bring seeds of their own. ``multimodal``: None
    where no prompt has images. ``without_weights``: arbitrary numbers in place of those in the
    files, which are not read.
    """
    max_tokens = config.max_prompt_tokens + config.max_response_tokens
    arguments: dict[str, Any] = {
        "model": model_path,
        "tensor_parallel_size": config.tensor,
        "pipeline_parallel_size": config.pipeline,
        "enable_expert_parallel": config.expert_parallel,
        # For one rank a replica too: this executor takes the device of LOCAL_RANK.
        "distributed_executor_backend": "external_launcher",
        "worker_extension_cls": "megatron_rl.engine.weights.worker.WeightReceiver",
        "dtype": config.dtype,
        "hf_overrides": _overrides(Path(model_path) / "config.json", config, without_weights),
        "quantization": VLLM_QUANTIZATION[config.quantization] if config.quantization else None,
        "max_model_len": max_tokens,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(config.top_k, _MOST_LOGPROBS),
        "generation_config": "vllm",  # not the sampling defaults of the checkpoint
        "skip_tokenizer_init": not config.stop,
        "use_tqdm_on_load": False,
        "seed": seed,
        "distributed_timeout_seconds": int(NO_LIMIT.total_seconds()),
        "cpu_distributed_timeout_seconds": int(NO_LIMIT.total_seconds()),
    }
    if config.anneal.schedule is not None or config.is_truncated:
        arguments["logits_processors"] = [_CHANGED_LOGITS]
    if config.router_replay == "rollout":
        arguments |= arguments_to_return()
    if without_weights:
        arguments["load_format"] = WITHOUT_WEIGHTS
    if multimodal is not None:
        arguments["limit_mm_per_prompt"] = {"image": multimodal.max_images, "video": 0}
        # The limits of the policy; the model's own may allow images of 16 thousand tokens, for
        # which vLLM would keep memory.
        arguments["mm_processor_kwargs"] = {"size": dict(multimodal.processor.size_limits)}
        arguments["skip_tokenizer_init"] = False  # its processor of images needs one
    if config.max_num_seqs is not None:
        arguments["max_num_seqs"] = config.max_num_seqs
    if config.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
    return arguments | _of_the_device(config, max_tokens)


def _overrides(file: Path, config: RolloutConfig, without_weights: bool) -> dict[str, Any]:
    """Of the model's configuration. What the policy sends of a quantized one is dequantized."""
    head = {} if config.dtype == "float32" else _FLOAT32_HEAD
    if not file.is_file() or QUANTIZATION not in read_json(file):
        return head
    if not without_weights:
        raise ValueError(
            f"model.path: {file} has {QUANTIZATION}; this engine would read the files itself, and"
            " takes no quantized ones. Give the model before quantization, or an export"
        )
    return head | {QUANTIZATION: None}


def _of_the_device(config: RolloutConfig, max_tokens: int) -> dict[str, Any]:
    if torch.cuda.is_available():
        return {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_sleep_mode": config.sleep_level > 0,
        }
    # A chunked prefill draws a token, drops it, and rewinds the generator, which CPU generators
    # cannot do. So a whole prompt must fit into one batch.
    # The backend is that of latent attention alone: where a CPU has AMX tiles vLLM would take
    # another one, which gives away the weights that a later sync would load.
    return {
        "attention_config": {"backend": "CPU_MLA"},
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_tokens, _BATCHED_TOKENS),
    }
