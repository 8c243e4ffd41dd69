"""Adapters as peft keeps them: adapter_config.json and adapter_model.safetensors in one folder.

Source: the checkpoint format of peft 0.21, huggingface.co/docs/peft/developer_guides/checkpoint.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.checkpoints.hf import open_tensors
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.model_config import read_json
from megatron_rl.config.schema import ModelConfig
from megatron_rl.models import Architecture
from megatron_rl.models.parameter_map import adapter_parameters, tensor_slices
from megatron_rl.types import Shard

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of peft's wrappers, before the HF name
# What would make other adapters of the same tensors, and the values without that effect.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),  # others alter W
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}
MAX_NAMES_SHOWN = 4


def adapter_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """HF name and whole shape of every adapter of the model."""
    return {
        parameter.names[0]: parameter.slot.shape
        for layer in range(arch.num_layers)
        for parameter in adapter_parameters(arch, layer)
    }


def check(path: Path, arch: Architecture, lora: LoraConfig) -> None:
    """Reads all of the folder.

    Raises:
        ValueError: it holds other adapters than ``lora`` describes, or some are not finite.
    """
    where = f"model.lora.path: {path}"
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise ValueError(f"{where} holds no {name}; give a folder that peft has saved")
    config = read_json(path / CONFIG)
    wanted = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha}
    problems = [
        f"{key} is {config.get(key)!r}, not {value!r}"
        for key, value in wanted.items()
        if config.get(key) != value
    ]
    if bool(config.get("use_rslora")) != lora.rslora:
        problems.append(f"use_rslora is {config.get('use_rslora')!r}, not {lora.rslora!r}")
    for key, values in _PLAIN.items():
        if key in config and config[key] not in values:
            problems.append(f"{key} is {config[key]!r}, which is not implemented")
    if problems:
        raise ValueError(
            f"{where}/{CONFIG}: {'; '.join(problems)}; set model.lora to what the file says, or"
            " give other adapters"
        )
    shapes = {stored_name(name, arch): shape for name, shape in adapter_shapes(arch).items()}
    with open_tensors(path / WEIGHTS) as file:
        there = set(file.keys())
        missing = sorted(shapes.keys() - there)
        unknown = sorted(there - shapes.keys())
        if missing or unknown:
            raise ValueError(
                f"{where} does not fit model.lora.targets = {list(lora.targets)}: {len(missing)}"
                f" adapters are missing {missing[:MAX_NAMES_SHOWN]} and {len(unknown)} are unknown"
                f" {unknown[:MAX_NAMES_SHOWN]}; set the targets to those of the file"
            )
        for name, shape in shapes.items():
            values = file.get_tensor(name)
            if tuple(values.shape) != shape or not values.isfinite().all():
                raise ValueError(
                    f"{where}: {name} has shape {tuple(values.shape)} where the model needs"
                    f" {shape}, or numbers that are not finite; give adapters of this model"
                )


def stored_name(name: str, arch: Architecture) -> str:
    """Of an adapter in a file of peft, which calls modules as transformers' newest layout does."""
    for new, old in arch.prefixes:
        if name.startswith(old):
            return PREFIX + new + name.removeprefix(old)
    return PREFIX + name


def read_shard(path: Path, shard: Shard, arch: Architecture) -> Tensor:
    """A part of one adapter of a folder that was checked."""
    with open_tensors(path / WEIGHTS) as file:
        part: Tensor = file.get_slice(stored_name(shard.name, arch))[tensor_slices(shard)]
        return part


def write(
    tensors: Mapping[str, Tensor], arch: Architecture, model: ModelConfig, path: Path
) -> None:
    """Writes adapters of a ``model``, by HF name, into the new folder ``path``."""
    path.mkdir()
    modules = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors})
    # A tower may have modules of the same names: an expression names those of the language model.
    language = rf"model\.language_model\..*\.({'|'.join(modules)})"
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.path,
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": model.lora.rslora,
        "target_modules": modules if arch.vision is None else language,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    named = {
        stored_name(name, arch): tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    save_file(named, path / WEIGHTS, metadata={"format": "pt"})
