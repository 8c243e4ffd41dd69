"""What is known of a checkpoint before anything is built: does it fit a run, how large is it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.model_config import ITEM_BYTES
from megatron_rl.config.schema import ModelConfig, ParallelConfig, PrecisionConfig
from megatron_rl.models import Architecture
from megatron_rl.models.parameter_map import (
    adapter_parameters,
    local_shape,
    model_parameters,
    padded_vocab,
)

FORMAT = 1  # of the state as a whole; another number is not read, see ``refuse_other``
SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "vocab_size",
    "num_experts",
)


def describe(
    arch: Architecture,
    model: ModelConfig,
    precision: PrecisionConfig,
    parallel: ParallelConfig,
    *,
    reference: bool,
    base_digest: str | None = None,
) -> dict[str, Any]:
    """What must agree between the run that writes a checkpoint and the run that reads it.

    Args:
        reference: whether the weights of the start are kept for a KL term.
        base_digest: of the weights that adapters are trained beside; None: there are no adapters,
            or it is not known yet.
    """
    lora = None
    if model.lora.rank is not None:
        lora = model.lora.model_dump(mode="json", exclude={"path"})
    sizes = {name: getattr(arch, name) for name in SIZES}
    return {
        "format": FORMAT,
        "model": {"family": arch.family, "tied_embeddings": arch.tied_embeddings, **sizes},
        "precision.params": precision.params,
        "parallel.distributed_optimizer": parallel.distributed_optimizer,
        "model.freeze_vision": model.freeze_vision,
        "model.lora": lora,
        "digest of the base": base_digest,
        "reference": reference,
    }


def refuse_other(path: Path, written: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compares two descriptions made by ``describe``; the layout may differ.

    Raises:
        ValueError: they differ; names each difference.
    """
    plain = [key for key in wanted if key not in ("model", "reference", "layout")]
    if wanted["digest of the base"] is None and wanted["model.lora"] is not None:
        plain.remove("digest of the base")  # before the model is read
    # What was written before there were adapters says nothing of them.
    pairs = [(key, written.get(key), wanted[key]) for key in plain]
    for key, value in wanted["model"].items():
        pairs.append((f"the model's {key}", written["model"][key], value))
    problems = [
        f"{key} is {there!r} there and {here!r} here" for key, there, here in pairs if there != here
    ]
    if wanted["reference"] and not written["reference"]:
        problems.append("it holds no reference weights, which the method needs")
    if problems:
        raise ValueError(
            f"checkpoint {path} does not fit this run: {'; '.join(problems)}. Use the same"
            " settings, or start from an exported model"
        )


def num_parameters(arch: Architecture, divisible_by: int) -> int:
    """Parameters of the whole model, its vocabulary padded to a multiple of ``divisible_by``."""
    rows = padded_vocab(arch.vocab_size, divisible_by, 1)
    shapes = (local_shape(parameter, arch, rows, 1) for parameter in model_parameters(arch))
    return sum(math.prod(shape) for shape in shapes)


def num_saved(arch: Architecture, divisible_by: int) -> int:
    """Parameters that a checkpoint holds: with adapters these alone."""
    if not arch.adapter_slots:
        return num_parameters(arch, divisible_by)
    every = (each for n in range(arch.num_layers) for each in adapter_parameters(arch, n))
    return sum(math.prod(each.slot.shape) for each in every)


def checkpoint_bytes(
    parameters: int, params: str, moments: str, *, distributed_optimizer: bool, reference: bool
) -> int:
    """Bytes of a training checkpoint: weights, two moments, float32 masters, reference weights.

    Masters are saved for bfloat16 weights, and by the distributed optimizer always.

    Args:
        parameters: see ``num_parameters``.
        params: number format of the weights; ``moments``: that of Adam's moments.
        reference: whether reference weights are kept.

    Example: 7.6e9 parameters in bfloat16 with float32 moments take 2 + 4 + 8 bytes each, 106 GB.
    """
    element = ITEM_BYTES[params]
    bytes_each = element + 2 * ITEM_BYTES[moments]
    if element == 2 or distributed_optimizer:
        bytes_each += ITEM_BYTES["float32"]  # masters
    if reference:
        bytes_each += element
    return parameters * bytes_each


def export_bytes(parameters: int, params: str) -> int:
    """Bytes of the weights of an exported model."""
    return parameters * ITEM_BYTES[params]
