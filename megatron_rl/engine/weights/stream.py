"""What the engine expects in a weight update, and a stream that refuses anything else."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.checkpoints.hf import HfDirectory
from megatron_rl.config.model_config import unread_layers
from megatron_rl.errors import WeightSyncError, first_few


def expected_tensors(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight in a HF directory, without reading the weights; of quantized
    ones as dequantized.

    The output head of a tied model is left out even when the file holds a copy: it is the
    embedding. So are layers behind the last one, which predict further tokens.

    Raises:
        ValueError: the directory holds no safetensors file.
    """
    directory = HfDirectory(model_path)
    shapes = {name: directory.shape(name) for name in directory.files}
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    config = {**(config.get("text_config") or {}), **config}
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    more = config.get("num_nextn_predict_layers") or 0
    linear = "linear_num_key_heads" in config
    unread = unread_layers(config.get("num_hidden_layers") or 0, more, linear)
    return {
        name: shape
        for name, shape in shapes.items()
        if not name.endswith("rotary_emb.inv_freq") and not name.startswith(unread)
    }


def checked_stream(
    weights: Iterator[tuple[str, Tensor]],
    expected: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Passes (name, tensor) on after comparing it with what is expected. A tensor has the engine's
    ``dtype``, or float32, which the loader rounds once.

    Raises, while it is read:
        WeightSyncError: unknown, repeated or (at the end) missing name, other shape, other dtype.
    """
    dtypes = {dtype, torch.float32}
    left = dict.fromkeys(sorted(expected))
    for name, tensor in weights:
        shape = expected.get(name)
        if shape is None:
            missing = ", ".join(first_few(list(left)))
            problem = f"but the model has no such tensor; still missing: {missing}"
        elif name not in left:
            problem = "twice"
        elif tuple(tensor.shape) != shape:
            problem = f"with shape {list(tensor.shape)}, the model has {list(shape)}"
        elif tensor.dtype not in dtypes:
            allowed = " or ".join(sorted(map(str, dtypes)))
            problem = f"as {tensor.dtype}, the engine takes {allowed}"
        else:
            del left[name]
            yield name, tensor
            continue
        raise WeightSyncError(f"weight sync: {name} was sent {problem}")
    if left:
        raise WeightSyncError(
            f"weight sync: {len(left)} of {len(expected)} tensors were not sent:"
            f" {', '.join(first_few(list(left)))}"
        )
