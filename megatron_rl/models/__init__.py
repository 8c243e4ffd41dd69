"""Model families, one declarative file each."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from megatron_rl.config.model_config import read_model_config
from megatron_rl.errors import RegistrationError, concerning
from megatron_rl.models import gemma3, llama, olmo, qwen2, qwen3
from megatron_rl.models.base import Architecture, Family, Slot
from megatron_rl.models.hybrid import qwen3_5, qwen3_next
from megatron_rl.models.moe import deepseek_v3, glm4_moe, gpt_oss, mixtral, qwen3_moe
from megatron_rl.models.vision import qwen2_5_vl, qwen3_vl, qwen3_vl_moe

_DENSE = (gemma3, qwen2, qwen3)
_OF_EXPERTS = (deepseek_v3, glm4_moe, gpt_oss, mixtral, qwen3_moe, qwen3_next)
_SEEING = (qwen2_5_vl, qwen3_vl, qwen3_vl_moe)
# Of these files each has several.
_SEVERAL = (*llama.FAMILIES, *olmo.FAMILIES, *qwen3_5.FAMILIES)
_ONE_EACH = [module.FAMILY for module in (*_DENSE, *_OF_EXPERTS, *_SEEING)]
FAMILIES = {family.architecture: family for family in (*_ONE_EACH, *_SEVERAL)}

__all__ = [
    "FAMILIES",
    "Architecture",
    "Family",
    "Slot",
    "architecture_from",
    "read_architecture",
    "register_family",
]


def register_family(family: Family) -> None:
    """Makes the policy read directories whose config.json names ``family.architecture``.

    Called while a plug-in is imported. The engine knows nothing of it: vLLM has its own registry.

    Example: ``register_family(Family("MyQwen2ForCausalLM", qwen2.read))``.

    Raises:
        RegistrationError: the architecture is known already.
    """
    if family.architecture in FAMILIES:
        raise RegistrationError(
            f"model family {family.architecture!r} is known already; a checkpoint with another "
            "layout needs an entry of its own in the architectures of its config.json"
        )
    FAMILIES[family.architecture] = family


def read_architecture(path: Path) -> tuple[Architecture, Any]:
    """The architecture of a HF model directory, and its transformers configuration.

    Raises:
        ValueError: no such directory, no config.json, one that cannot be read, an architecture or
        an option the policy does not implement.
    """
    for there, what in (
        (path.is_dir(), "is not a directory"),
        ((path / "config.json").is_file(), "holds no config.json"),
    ):
        if not there:
            raise ValueError(
                f"model.path: {path} {what}; give a local HF model directory (config.json and"
                " safetensors)"
            )
    values = read_model_config(path / "config.json", FAMILIES)
    # transformers checks the types of some keys, by errors of its own that do not name the file.
    with concerning(
        f"model.path: {path / 'config.json'}",
        "correct the key, or copy the file again from the model",
    ):
        hf = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return architecture_from(hf, values["architectures"][0]), hf


def architecture_from(hf: Any, name: str) -> Architecture:
    """The architecture ``name`` with the sizes of the transformers configuration ``hf``.

    Raises:
        ValueError: an option the policy does not implement.
    """
    return FAMILIES[name].read(hf)
