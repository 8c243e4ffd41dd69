"""Weights written in megatron's distributed checkpoint format, for ``convert_checkpoint.py``: the
other direction of ``megatron_rl.checkpoints.megatron_format``, without megatron."""

import json
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.checkpoints.megatron_format import BEFORE_EXPERTS, LayerTensor, layer_tensors
from megatron_rl.checkpoints.part_writer import Memory, PartWriter, Settings, saved_bytes
from megatron_rl.checkpoints.safe_load import COMMON, INDEX
from megatron_rl.checkpoints.sealing import Receipt, index, receipt_path
from megatron_rl.models import Architecture
from megatron_rl.models.parameter_map import part_of, shards, tensor_slices

BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Modules that carry an (empty) state of Transformer Engine, which megatron's loader looks for;
# experts' names have no prefix.
_STATEFUL = (
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    *(f"self_attention.{one}_proj" for one in ("in", "out")),
    *(f"self_attention.linear_{one}_proj" for one in ("q", "q_down", "q_up", "kv_down", "kv_up")),
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "linear_fc1",
    "linear_fc2",
    "decoder.final_layernorm",
)


def _is_stateful(item: LayerTensor) -> bool:
    name = item.parameter.slot.megatron
    return name.removesuffix(".weight") in _STATEFUL or (item.both and name == BEFORE_EXPERTS)


def _state_key(item: LayerTensor) -> str:
    """Example: "decoder.layers.mlp.linear_fc1._extra_state/shard_3_28", of layer 3 of 28."""
    # What has no layers (the final norm) is shard 0 of 1.
    at = ".".join(map(str, item.place or (0,)))
    of = ".".join(map(str, item.extent or (1,)))
    return f"{item.key.removesuffix('.weight')}._extra_state/shard_{at}_{of}"


def to_megatron(item: LayerTensor, arch: Architecture, tensors: Mapping[str, Tensor]) -> Tensor:
    """The Megatron parameter made of its whole HF tensors: the inverse of ``to_hf``."""
    whole = torch.empty(item.shape, dtype=next(iter(tensors.values())).dtype)
    # Tensor rank 0 of 1 has all of it.
    for shard in shards(item.parameter, arch, arch.vocab_size, 0, 1):
        part_of(whole, shard).copy_(tensors[shard.name][tensor_slices(shard)])
    return whole


def write(
    path: Path,
    arch: Architecture,
    dtype: Callable[[LayerTensor], torch.dtype],
    produce: Callable[[LayerTensor], Tensor],
    prefix: str,
) -> None:
    """Writes a checkpoint of weights into the directory ``path``.

    ``produce(item)``, of ``dtype(item)``, is called in the order of the model. Every key begins
    with ``prefix``.
    """
    items = list(layer_tensors(arch, arch.vocab_size))
    num_bytes = sum(math.prod(item.shape) * dtype(item).itemsize for item in items)
    writer = PartWriter(path, 0, num_bytes, Settings(threads=1, pinned=False, blocks=2), Memory())
    try:
        for item in items:
            keys = (item.key, item.other_key) if item.both else (item.key,)
            places = [item.location(prefix + key, dtype(item)) for key in keys]
            writer.copy(produce(item).view(-1), 0, places)
            if _is_stateful(item):
                # The state of a module that has none: Transformer Engine keeps one for FP8 only.
                writer.add_object(prefix + _state_key(item), saved_bytes([None]))
    finally:
        writer.close()
        writer.join()
    if writer.error is not None:
        raise writer.error
    written = Receipt()
    written.add(receipt_path(path, 0).read_bytes())
    (path / INDEX).write_bytes(pickle.dumps(index(written.stored)))
    receipt_path(path, 0).unlink()
    torch.save({}, path / COMMON)
    (path / "metadata.json").write_text(json.dumps(BACKEND) + "\n", encoding="ascii")
