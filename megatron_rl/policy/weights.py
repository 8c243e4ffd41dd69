"""From HF safetensors to this rank's Megatron parameters, by the boxes of layout.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_rl.policy.families import Architecture
from megatron_rl.policy.hf_files import check_headers, open_tensors, tensor_files
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
from megatron_rl.policy.not_finite import not_finite
from megatron_rl.policy.parallel import Ranks
from megatron_rl.policy.precision import assign

# Transformer Engine fuses a norm into the linear layer behind it and calls its weight so.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
BoxKey = tuple[str, tuple[int, ...], tuple[int, ...]]  # tensor, start and shape of a part of it
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
# The experts of a rank are modules of their own, or, grouped, numbered weights of one module.
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<number>\d+)\.(?P<name>.*)")
GROUPED_EXPERT = re.compile(r"mlp\.experts\.(?P<name>linear_fc[12]\.weight)(?P<number>\d+)")
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
    in_expert = EXPERT.fullmatch(rest) or GROUPED_EXPERT.fullmatch(rest)
    if in_expert:
        expert = ranks.expert_rank * (arch.num_experts // ranks.expert) + int(in_expert["number"])
        candidates, rest = expert_parameters(arch, layer, expert), in_expert["name"]
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
        self.path, self.files = path, tensor_files(path)
        check_headers(self.files)
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
            self._open[file] = open_tensors(file)
        part = self._open[file].get_slice(box.name)
        if tuple(part.get_shape()) != whole:
            raise ValueError(
                f"model.path: {box.name} in {file} has shape {tuple(part.get_shape())}, but config.json needs {whole}; "
                "the weights belong to another model"
            )
        return part[box_slices(box.start, box.shape)]


def load(held: Sequence[Held], arch: Architecture, path: Path, *, require_finite: bool = True) -> None:
    """Collective: fills this rank's parameters from the HF directory; rows of the padded vocabulary get 0.

    Raises:
        ValueError: on every rank, when a rank finds tensors that are missing, unknown, of the wrong shape, not finite (unless
            ``require_finite`` is False), or a stored head that differs from the embedding it is tied to.
    """
    counts: dict[BoxKey, int] = {}
    problem = None
    try:
        counts = _fill(held, arch, path)
    except ValueError as error:
        problem = str(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (problem, counts))
    problems = [said for said, _ in everyone if said is not None]
    if problems:
        raise ValueError(problems[0])
    if require_finite:
        _refuse_not_finite(path, [found for _, found in everyone])


def _fill(held: Sequence[Held], arch: Architecture, path: Path) -> dict[BoxKey, int]:
    """Reads every box of this rank; returns how many values of each are not finite, where there are any."""
    checkpoint = Checkpoint(path)
    checkpoint.check(arch)
    counts = {}
    with torch.no_grad():
        for item in held:
            values = torch.zeros(tuple(item.tensor.shape), dtype=item.tensor.dtype)
            shapes = hf_shapes(item.parameter, arch)
            for box in item.boxes:
                part = checkpoint.read(box, shapes[box.name])
                if arch.tied_embeddings and box.name == EMBEDDING.hf[0]:
                    _check_tied(checkpoint, box, part, shapes[box.name])
                # After the conversion: a large float32 is infinite in bfloat16.
                converted = part.to(values.dtype)
                if not_finite([converted]):
                    counts[box.name, box.start, box.shape] = int((~converted.isfinite()).sum())
                values[box_slices(box.local, box.shape)] = converted
            assign(item.tensor, values)
    return counts


def _check_tied(checkpoint: Checkpoint, box: Box, embedding: Tensor, whole: tuple[int, ...]) -> None:
    """Raises ValueError when a head of its own, with other values, is stored beside the embedding that config.json ties it to."""
    head = HEAD.hf[0]
    if head not in checkpoint.files:
        return
    stored = checkpoint.read(replace(box, name=head), whole)
    if not torch.equal(stored.to(embedding.dtype).nan_to_num(), embedding.nan_to_num()):
        raise ValueError(
            f"model.path: {checkpoint.path} stores an {head} that differs from {box.name}, but config.json has tie_word_embeddings true; "
            "set it to false there, or take the tensor out"
        )


def _refuse_not_finite(path: Path, everyone: Sequence[Mapping[BoxKey, int]]) -> None:
    """Raises ValueError where a rank has read values that are not finite. What several ranks hold counts once."""
    boxes = {key: count for counts in everyone for key, count in counts.items()}
    by_name: dict[str, int] = {}
    for (name, _, _), count in sorted(boxes.items()):
        by_name[name] = by_name.get(name, 0) + count
    if by_name:
        shown = ", ".join(f"{name} ({count} values)" for name, count in list(by_name.items())[:4])
        more = f" and {len(by_name) - 4} more" if len(by_name) > 4 else ""
        raise ValueError(
            f"model.path: {path} holds weights that are not finite: {shown}{more}; the run that wrote them had failed, "
            "or the file is damaged: copy it again, or give another model"
        )
