"""From HF safetensors to this rank's Megatron parameters, by the boxes of layout.py."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.utils import get_attr_wrapped_model
from safetensors import safe_open
from torch import Tensor

from megatron_rl.policy.families import Architecture
from megatron_rl.policy.layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    TIED_HEAD,
    Box,
    Parameter,
    axis_sizes,
    boxes,
    expert_parameters,
    hf_names,
    hf_shapes,
    layer_parameters,
    local_shape,
)  # fmt: skip
from megatron_rl.policy.parallel import Ranks
from megatron_rl.policy.precision import assign

# Transformer Engine fuses a norm into the linear layer behind it and calls its weight so.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")
IGNORED = re.compile(r".*rotary_emb\.inv_freq$")  # a table that old checkpoints store; it follows from the configuration


@dataclass(frozen=True)
class Held:
    """One parameter of this rank: its name in the chunk, the tensor, and the boxes of HF tensors inside it."""

    chunk: int
    name: str
    tensor: Tensor
    parameter: Parameter
    boxes: list[Box]


def held_parameters(chunks: Sequence[torch.nn.Module], arch: Architecture, ranks: Ranks, vocab_rows: int) -> list[Held]:
    """Every parameter of this rank's chunks with the boxes of HF-named tensors that it holds."""
    found = []
    for index, chunk in enumerate(chunks):
        model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, tensor in model.named_parameters():
            parameter = _identify(name, numbers, arch, ranks)
            rank, size = (ranks.tensor_rank, ranks.tensor) if parameter.expert is None else (ranks.expert_tensor_rank, ranks.expert_tensor)
            shape = local_shape(parameter, arch, vocab_rows, size)
            assert tuple(tensor.shape) == shape, f"{name} is {tuple(tensor.shape)} in the model, {shape} in the map"
            _mark(tensor, parameter, arch, vocab_rows)
            found.append(Held(index, name, tensor, parameter, boxes(parameter, arch, vocab_rows, rank, size)))
    return found


def _mark(tensor: Tensor, parameter: Parameter, arch: Architecture, vocab_rows: int) -> None:
    """Sets the attributes by which megatron knows a tensor-parallel parameter. Its layers set them only when they initialise
    weights at random; without them the gradient norm counts the shard of one rank."""
    axis = axis_sizes(parameter, arch, vocab_rows)[2]
    if axis != -1 and not hasattr(tensor, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(tensor, True, axis, 2 if parameter.slot.kind == "gate_up" else 1)


def _identify(name: str, numbers: list[int], arch: Architecture, ranks: Ranks) -> Parameter:
    if name == HEAD.megatron:
        slot = TIED_HEAD if arch.tied_embeddings else HEAD
        return Parameter(slot, slot.hf)
    for slot in (EMBEDDING, FINAL_NORM):
        if name == slot.megatron:
            return Parameter(slot, slot.hf)
    in_layer = LAYER.fullmatch(name)
    assert in_layer, f"no HF tensor is known for parameter {name}"
    layer, rest = numbers[int(in_layer[1])], in_layer[2]
    in_expert = EXPERT.fullmatch(rest)
    if in_expert:
        expert = ranks.expert_rank * (arch.num_experts // ranks.expert) + int(in_expert[1])
        candidates, rest = expert_parameters(arch, layer, expert), in_expert[2]
    else:
        candidates, rest = layer_parameters(arch, layer), FUSED_NORMS.get(rest, rest)
    matches = [parameter for parameter in candidates if parameter.slot.megatron == rest]
    assert len(matches) == 1, f"no HF tensor is known for parameter {name}"
    return matches[0]


def box_slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + length) for first, length in zip(start, shape, strict=True))


class Checkpoint:
    """The tensors of a HF directory, read slice by slice."""

    def __init__(self, path: Path) -> None:
        index = path / "model.safetensors.index.json"
        single = path / "model.safetensors"
        if index.is_file():
            self.files = {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        elif single.is_file():
            with safe_open(single, framework="pt") as file:
                self.files = dict.fromkeys(file.keys(), single)
        else:
            raise ValueError(f"model.path: {path} holds neither model.safetensors nor model.safetensors.index.json; save it as safetensors")
        self.path = path
        self._open: dict[Path, Any] = {}

    def check(self, arch: Architecture) -> None:
        """Raises ValueError unless the directory holds exactly the tensors of ``arch``."""
        wanted, present = set(hf_names(arch)), {name for name in self.files if not IGNORED.match(name)}
        if arch.tied_embeddings:
            present.discard("lm_head.weight")
        missing, extra = sorted(wanted - present), sorted(present - wanted)
        if missing or extra:
            raise ValueError(
                f"model.path: the tensors in {self.path} do not fit {arch.family} with {arch.num_layers} layers: "
                f"{len(missing)} missing {missing[:4]}, {len(extra)} unknown {extra[:4]}; check config.json against the weights"
            )

    def read(self, box: Box, whole: tuple[int, ...]) -> Tensor:
        """The box, and nothing more of its tensor. Raises ValueError unless the tensor has shape ``whole``."""
        file = self.files[box.name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        part = self._open[file].get_slice(box.name)
        if tuple(part.get_shape()) != whole:
            raise ValueError(
                f"model.path: {box.name} in {file} has shape {tuple(part.get_shape())}, but config.json needs {whole}; "
                "the weights belong to another model"
            )
        return part[box_slices(box.start, box.shape)]


def load(held: Sequence[Held], arch: Architecture, path: Path) -> None:
    """Fills this rank's parameters from the HF directory; rows of the padded vocabulary get 0.

    Raises:
        ValueError: tensors are missing, unknown or of the wrong shape.
    """
    checkpoint = Checkpoint(path)
    checkpoint.check(arch)
    with torch.no_grad():
        for item in held:
            values = torch.zeros(tuple(item.tensor.shape), dtype=item.tensor.dtype)
            shapes = hf_shapes(item.parameter, arch)
            for box in item.boxes:
                values[box_slices(box.local, box.shape)] = checkpoint.read(box, shapes[box.name]).to(values.dtype)
            assign(item.tensor, values)
