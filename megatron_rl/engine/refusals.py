"""What vLLM says when it cannot be built, in the words of this configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.errors import first_line

_CACHE_TOO_SMALL = re.compile(r"memory for the cache blocks|KV cache is needed")
_NEEDED = re.compile(r"\(([\d.]+) GiB KV cache is needed")
# Only this half of vLLM's message: the sentence after it names options of vLLM.
_SHARED_MEMORY = re.compile(r"(Insufficient space in /dev/shm.*? free)")


@contextmanager
def building(model_path: str, config: RolloutConfig) -> Iterator[None]:
    """Around the construction of the engine.

    Raises:
        ValueError: vLLM refused; names the key and what to do. Other errors pass as they are.
    """
    try:
        yield
    except (ValueError, RuntimeError, NotImplementedError) as error:
        refusal = _explained(error, model_path, config)
        if refusal is None:
            raise
        raise ValueError(refusal) from error


def _explained(error: Exception, model_path: str, config: RolloutConfig) -> str | None:
    """The message for the user; None where vLLM did not refuse but failed.

    Example: a cache that holds no block gives ``rollout.kv_cache_gib = 1e-05: leaves no room for
    the keys and values of one sequence of 1280 tokens; raise it, ...``
    """
    text = str(error)
    if _CACHE_TOO_SMALL.search(text):
        return _cache_too_small(text, config)
    shared_memory = _SHARED_MEMORY.search(text)
    if shared_memory:
        return (
            f"rollout.tensor = {config.tensor}: the ranks of an engine talk through shared memory:"
            f" {shared_memory[1]}; enlarge it (containers: --shm-size or --ipc=host)"
        )
    if isinstance(error, ValidationError):
        reason = "; ".join(first_line(ValueError(problem["msg"])) for problem in error.errors())
    elif isinstance(error, ValueError | NotImplementedError):
        reason = first_line(error)
    else:
        return None
    reason = reason.removeprefix("Value error, ").rstrip(".")
    return (
        f"model.path = {model_path}: vLLM cannot serve this model with the settings of rollout.*:"
        f" {reason}; correct the setting, or use another model"
    )


def _cache_too_small(text: str, config: RolloutConfig) -> str:
    # Where kv_cache_gib is null, the cache takes what gpu_memory_utilization leaves of the GPU.
    if config.kv_cache_gib is None:
        key = f"rollout.gpu_memory_utilization = {config.gpu_memory_utilization}"
    else:
        key = f"rollout.kv_cache_gib = {config.kv_cache_gib}"
    tokens = config.max_prompt_tokens + config.max_response_tokens
    needed = _NEEDED.search(text)
    size = f" ({needed[1]} GiB are needed)" if needed else ""
    return (
        f"{key}: leaves no room for the keys and values of one sequence of {tokens} tokens{size};"
        " raise it, or lower rollout.max_prompt_tokens or rollout.max_response_tokens"
    )
