"""Loads this rank's Megatron parameters from HF safetensors, by the shards of parameter_map.py."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_rl.checkpoints.hf import HfDirectory
from megatron_rl.config.model_config import format_name
from megatron_rl.errors import first_few
from megatron_rl.models import Architecture
from megatron_rl.models.parameter_map import (
    EMBEDDING,
    EXPERT_BIAS,
    FINAL_NORM,
    HEAD,
    TIED_HEAD,
    VISION,
    Parameter,
    adapter_parameters,
    axis_sizes,
    expert_parameters,
    fused_norms,
    layer_parameters,
    local_shape,
    outer_parameter,
    part_of,
    shards,
    vision_parameters,
)
from megatron_rl.policy.not_finite import not_finite
from megatron_rl.policy.parallel import Ranks
from megatron_rl.policy.precision import assign
from megatron_rl.runtime.guard.activity import ACTIVITY
from megatron_rl.runtime.launch import from_first_rank, on_all_ranks
from megatron_rl.types import Shard

_ShardKey = tuple[str, tuple[int, ...], tuple[int, ...]]  # tensor, start and shape of a part of it
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
# The experts of a rank are modules of their own, or, grouped, numbered weights of one module.
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<number>\d+)\.(?P<name>.*)")
GROUPED_EXPERT = re.compile(
    r"mlp\.experts\.(?P<name>linear_fc[12]\.(?:weight|bias))(?P<number>\d+)"
)


@dataclass(frozen=True)
class LocalParameter:
    """One parameter of this rank, and the shards of HF tensors in it, with its key and format.

    ``name`` is its name in the chunk. The head of a tied model, where a stage has a copy of it,
    holds the embedding; padding of the vocabulary is in no shard.
    """

    chunk: int
    name: str
    tensor: Tensor
    parameter: Parameter
    shards: list[Shard]

    @property
    def key(self) -> str:
        """Example: "0:decoder.layers.0.self_attention.linear_qkv.weight"."""
        return f"{self.chunk}:{self.name}"


def local_parameters(
    chunks: Sequence[torch.nn.Module], arch: Architecture, ranks: Ranks, vocab_rows: int
) -> list[LocalParameter]:
    """Every parameter of this rank's chunks with the shards of HF-named tensors that it holds."""
    held = []
    for index, chunk in enumerate(chunks):
        model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        biases = [item for item in model.named_buffers() if item[0].endswith(EXPERT_BIAS)]
        for name, tensor in [*model.named_parameters(), *biases]:
            parameter = _identify(name, layers, arch, ranks)
            in_expert = parameter.expert is not None
            rank = ranks.expert_tensor_rank if in_expert else ranks.tensor_rank
            size = ranks.expert_tensor if in_expert else ranks.tensor
            shape = local_shape(parameter, arch, vocab_rows, size)
            assert tuple(tensor.shape) == shape, (
                f"{name} is {tuple(tensor.shape)} in the model, {shape} in the map"
            )
            _mark(tensor, parameter, arch, vocab_rows)
            item = LocalParameter(index, name, tensor, parameter, [])
            dtype = format_name(tensor.dtype)
            for shard in shards(parameter, arch, vocab_rows, rank, size):
                item.shards.append(replace(shard, key=item.key, dtype=dtype))
            held.append(item)
    return held


def _mark(tensor: Tensor, parameter: Parameter, arch: Architecture, vocab_rows: int) -> None:
    """Sets the attributes by which megatron knows a tensor-parallel parameter.

    Its layers set them only when they draw random weights. Without them the gradient norm counts
    the shard of one rank instead of all.
    """
    axis = axis_sizes(parameter, arch, vocab_rows)[2]
    if axis != -1 and not hasattr(tensor, "tensor_model_parallel"):
        stride = 2 if parameter.slot.kind == "gate_up" else 1
        set_tensor_model_parallel_attributes(tensor, True, axis, stride)


def _identify(name: str, layers: list[int], arch: Architecture, ranks: Ranks) -> Parameter:
    """The parameter that a chunk calls ``name``.

    ``layers[i]``: the number in the whole model of the chunk's layer i.
    """
    if name == HEAD.megatron:
        return outer_parameter(TIED_HEAD if arch.tied_embeddings else HEAD, arch)
    outer = {slot.megatron: slot for slot in (EMBEDDING, FINAL_NORM)}
    if name in outer:
        return outer_parameter(outer[name], arch)
    if name.startswith(VISION):
        return next(each for each in vision_parameters(arch) if each.slot.megatron == name)
    in_layer = LAYER.fullmatch(name)
    assert in_layer, f"no HF tensor is known for parameter {name}"
    layer = layers[int(in_layer[1])]
    rest = in_layer[2]
    in_expert = EXPERT.fullmatch(rest) or GROUPED_EXPERT.fullmatch(rest)
    if in_expert:
        first_expert = ranks.expert_rank * (arch.num_experts // ranks.expert)
        candidates = expert_parameters(arch, layer, first_expert + int(in_expert["number"]))
        slot_name = in_expert["name"]
    else:
        candidates = layer_parameters(arch, layer) + adapter_parameters(arch, layer)
        slot_name = fused_norms(arch, layer).get(rest, rest)
    matches = [parameter for parameter in candidates if parameter.slot.megatron == slot_name]
    assert len(matches) == 1, f"no HF tensor is known for parameter {name}"
    return matches[0]


def check_directory(path: Path, arch: Architecture) -> None:
    """Collective. Reads headers, on one rank: a damaged folder is named before anything is built.

    Raises:
        ValueError: on every rank, as ``HfDirectory`` and its ``check``.
    """
    from_first_rank(lambda: HfDirectory(path, arch.prefixes).check(arch))


def load(
    held: Sequence[LocalParameter],
    arch: Architecture,
    path: Path,
    ranks: Ranks | None = None,
    *,
    require_finite: bool = True,
) -> None:
    """Collective: fills this rank's parameters from the HF directory.

    Of the ranks that hold the same parameters the first reads them and sends them to the others. So
    the files are read once, however many data-parallel ranks there are; without ``ranks`` this rank
    reads for itself. Rows of the padded vocabulary get 0.

    Raises:
        ValueError: on every rank, when a rank finds tensors that are missing, unknown, of the wrong
            shape, not finite (unless ``require_finite`` is False), or a stored head that differs
            from the embedding that it is tied to.
    """
    own = [item for item in held if ranks is None or _reads(item, ranks)]
    counts = on_all_ranks(lambda: _fill(own, arch, path) if own else {})
    if ranks is not None:
        _copy_to_others(held, ranks)
    if require_finite:
        _refuse_not_finite(path, counts)


def _copies_group(item: LocalParameter, ranks: Ranks) -> Any:
    """The ranks that hold the same values of this parameter."""
    return ranks.copies_group if item.parameter.expert is None else ranks.expert_copies_group


def _reads(item: LocalParameter, ranks: Ranks) -> bool:
    """Whether this rank reads the parameter: the first that holds it. In FP8 each rank does: the
    optimizer's copy takes the numbers before rounding, which cannot be sent."""
    return is_float8tensor(item.tensor) or dist.get_rank(_copies_group(item, ranks)) == 0


def _copy_to_others(held: Sequence[LocalParameter], ranks: Ranks) -> None:
    """Collective over the ranks that hold the same parameters."""
    with torch.no_grad():
        for item in held:
            group = _copies_group(item, ranks)
            if is_float8tensor(item.tensor) or dist.get_world_size(group) == 1:
                continue
            dist.broadcast(item.tensor, dist.get_global_rank(group, 0), group=group)
            ACTIVITY.note("sending the policy's weights")


def _fill(held: Sequence[LocalParameter], arch: Architecture, path: Path) -> dict[_ShardKey, int]:
    """Reads every shard of these parameters.

    Returns how many values of a shard are not finite, where any are.
    """
    directory = HfDirectory(path, arch.prefixes)
    directory.check(arch)
    counts = {}
    with torch.no_grad():
        for item in held:
            values = torch.zeros(tuple(item.tensor.shape), dtype=item.tensor.dtype)
            for shard in item.shards:
                stored = directory.read_shard(shard)
                if arch.tied_embeddings and item.parameter.slot.kind == "vocab":
                    _check_tied(directory, shard, stored)
                converted = stored.to(values.dtype)
                # Not before the conversion: a large float32 becomes infinite in bfloat16.
                if not_finite([converted]):
                    count = int((~converted.isfinite()).sum())
                    counts[shard.name, shard.start, shard.shape] = count
                part_of(values, shard).copy_(converted)
            assign(item.tensor, values)
            ACTIVITY.note("reading the policy's weights")
    return counts


def _check_tied(directory: HfDirectory, shard: Shard, embedding: Tensor) -> None:
    """Raises ValueError when a head differs from the embedding that config.json ties it to.

    Most directories store no such head.
    """
    head = HEAD.hf[0]
    if head not in directory.files:
        return
    stored = directory.read_shard(replace(shard, name=head))
    if not torch.equal(stored.to(embedding.dtype).nan_to_num(), embedding.nan_to_num()):
        raise ValueError(
            f"model.path: {directory.path} stores an {head} that differs from {shard.name}, but"
            " config.json has tie_word_embeddings true; set it to false there, or take the"
            " tensor out"
        )


def _refuse_not_finite(path: Path, everyone: Sequence[Mapping[_ShardKey, int]]) -> None:
    """Raises ValueError where a rank has read values that are not finite."""
    # A shard that several ranks hold counts once.
    by_shard = {shard: count for counts in everyone for shard, count in counts.items()}
    by_name: Counter[str] = Counter()
    for (name, _, _), count in sorted(by_shard.items()):
        by_name[name] += count
    if by_name:
        shown = first_few([f"{name} ({count} values)" for name, count in by_name.items()], 4)
        raise ValueError(
            f"model.path: {path} holds weights that are not finite: {', '.join(shown)}; the run"
            " that wrote them had failed, or the file is damaged: copy it again, or give another"
            " model"
        )
