"""The places of HF tensors in Megatron parameters, as shards: pure arithmetic.

A tensor-parallel rank has an interval of one axis of the whole Megatron parameter, and the whole
parameter is a stack of slices of HF tensors along that axis. A rank's shards are the stack cut to
the rank's interval.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, product

from torch import Tensor

from megatron_rl.models.base import Architecture, Slot
from megatron_rl.types import Shard

EMBEDDING = Slot("embedding.word_embeddings.weight", "vocab", ("model.embed_tokens.weight",))
FINAL_NORM = Slot("decoder.final_layernorm.weight", "whole", ("model.norm.weight",))
HEAD = Slot("output_layer.weight", "vocab", ("lm_head.weight",))
TIED_HEAD = Slot("output_layer.weight", "vocab", ("model.embed_tokens.weight",))
# How the names of the tower's parameters begin in the model.
VISION = "visual."
SHARED_EXPERT = "shared_experts."
EXPERT_BIAS = "router.expert_bias"
ADAPTER = "_adapter"  # what follows the name of a layer in that of its adapters
# Transformer Engine fuses a norm into the linear layer after it: its name there -> its own name.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
LINEAR_FUSED_NORMS = {
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
LATENT_FUSED_NORMS = {
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def fused_norms(arch: Architecture, layer: int) -> dict[str, str]:
    """Of a layer of ``arch``: name inside the linear layer -> own name."""
    if arch.is_linear(layer):
        return LINEAR_FUSED_NORMS
    return FUSED_NORMS if arch.latent is None else LATENT_FUSED_NORMS


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter of the whole model.

    ``names``: full HF names of the slot's tensors; ``layer`` and ``expert`` count over the model.
    """

    slot: Slot
    names: tuple[str, ...]
    layer: int | None = None
    expert: int | None = None

    @property
    def is_adapter(self) -> bool:
        return f"{ADAPTER}." in self.slot.megatron

    @property
    def is_buffer(self) -> bool:
        """Whether megatron keeps it beside the parameters: in float32, without a gradient."""
        return self.slot.megatron.endswith(EXPERT_BIAS)


def padded_vocab(vocab_size: int, divisible_by: int, tensor: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks.

    ``vocab_size`` is rounded up to a multiple of ``divisible_by * tensor``.
    """
    multiple = divisible_by * tensor
    return -(-vocab_size // multiple) * multiple


def layer_parameters(arch: Architecture, layer: int) -> list[Parameter]:
    """Parameters of one layer without its experts, in the order of the architecture."""
    prefix = f"{arch.text_prefix}layers.{layer}."
    slots = arch.dense_slots if layer < arch.num_dense_layers else arch.layer_slots
    if arch.is_linear(layer):
        slots = arch.linear_slots
    return [_parameter(slot, prefix, layer) for slot in slots]


def adapter_module(weight: str) -> str:
    """Name of the module with the adapters of a ``weight``.

    Example: ``adapter_module("mlp.linear_fc2.weight")`` is "mlp.linear_fc2_adapter".
    """
    return weight.removesuffix(".weight") + ADAPTER


def adapter_parameters(arch: Architecture, layer: int) -> list[Parameter]:
    """The adapters of one layer. They are no parameters of the model: see ``models.adapters``."""
    if not arch.adapter_slots:
        return []
    weights = layer_parameters(arch, layer)
    modules = {adapter_module(each.slot.megatron) for each in weights}
    prefix = f"{arch.text_prefix}layers.{layer}."
    return [
        _parameter(slot, prefix, layer)
        for slot in arch.adapter_slots
        if slot.megatron.rpartition(".")[0] in modules
    ]


def expert_parameters(arch: Architecture, layer: int, expert: int) -> list[Parameter]:
    """Parameters of one expert of one layer that has experts."""
    number = "" if arch.fused_experts else f"{expert}."
    prefix = f"{arch.text_prefix}layers.{layer}.{arch.expert_prefix}.{number}"
    return [_parameter(slot, prefix, layer, expert) for slot in arch.expert_slots]


def _parameter(slot: Slot, prefix: str, layer: int, expert: int | None = None) -> Parameter:
    return Parameter(slot, tuple(prefix + name for name in slot.hf), layer, expert)


def vision_parameters(arch: Architecture) -> list[Parameter]:
    """Parameters of the vision tower, which every tensor rank of the first stage has whole."""
    tensors = () if arch.vision is None else arch.vision.tensors
    return [
        Parameter(Slot(name, "whole", (name,)), (arch.tower_prefix + name,)) for name, _ in tensors
    ]


def outer_parameter(slot: Slot, arch: Architecture) -> Parameter:
    """One of the language model outside its layers."""
    (name,) = slot.hf
    if name.startswith("model."):
        name = arch.text_prefix + name.removeprefix("model.")
    return Parameter(slot, (name,))


def outer_parameters(arch: Architecture) -> tuple[list[Parameter], list[Parameter]]:
    """Parameters of the language model before its first layer, and after its last one. A tied
    head is no parameter."""
    after = [outer_parameter(FINAL_NORM, arch)]
    if not arch.tied_embeddings:
        after.append(outer_parameter(HEAD, arch))
    return [outer_parameter(EMBEDDING, arch)], after


def model_parameters(arch: Architecture) -> Iterator[Parameter]:
    """All parameters of the model, in the order in which weights are gathered and exported. Those
    that are parts of one HF tensor follow each other."""
    before, after = outer_parameters(arch)
    yield from vision_parameters(arch)
    yield from before
    for layer in range(arch.num_layers):
        yield from layer_parameters(arch, layer)
        experts = range(arch.num_experts if arch.has_experts(layer) else 0)
        parts = [expert_parameters(arch, layer, expert) for expert in experts]
        yield from chain(*(zip(*parts, strict=True) if arch.fused_experts else parts))
    yield from after


def hf_names(arch: Architecture) -> list[str]:
    """Names of all HF tensors of the model, in order."""
    every = (name for parameter in model_parameters(arch) for name in parameter.names)
    return list(dict.fromkeys(every))


def axis_sizes(
    parameter: Parameter, arch: Architecture, vocab_rows: int
) -> tuple[int, tuple[int, ...], int]:
    """Length of the cut axis, the other axes, and the index of the cut axis (-1: not cut).

    They are those of the whole Megatron parameter.
    """
    kind = parameter.slot.kind
    megatron = parameter.slot.megatron
    if parameter.slot.shape:
        axis = {"whole": -1, "columns": 1}.get(kind, 0)
        others = list(parameter.slot.shape)
        return others.pop(max(axis, 0)), tuple(others), axis
    hidden = arch.hidden_size
    ffn = arch.ffn_hidden_size if parameter.expert is None else arch.expert_ffn_hidden_size
    if SHARED_EXPERT in megatron:
        ffn = arch.shared_ffn_hidden_size
    query_rows = arch.num_heads * arch.head_dim
    if kind == "vocab":
        return vocab_rows, (hidden,), 0
    if kind == "qkv":
        rows = (1 + arch.gated_outputs) * query_rows + 2 * arch.num_kv_heads * arch.head_dim
        return rows, () if megatron.endswith("bias") else (hidden,), 0
    if kind == "gate_up":
        return 2 * ffn, (hidden,), 0
    if kind == "columns":
        return query_rows if "self_attention" in megatron else ffn, (hidden,), 1
    assert kind == "whole", f"no sizes for kind {kind} of {megatron}"
    if megatron.startswith(VISION):
        assert arch.vision is not None, f"{megatron}: the architecture has no tower"
        shape = dict(arch.vision.tensors)[megatron]
        return shape[0], shape[1:], -1
    if "router" in megatron:
        return arch.num_experts, () if megatron.endswith("bias") else (hidden,), -1
    is_head_norm = "q_layernorm" in megatron or "k_layernorm" in megatron
    return arch.head_dim if is_head_norm else hidden, (), -1


def local_shape(
    parameter: Parameter, arch: Architecture, vocab_rows: int, size: int
) -> tuple[int, ...]:
    """Shape of the parameter on each of ``size`` tensor-parallel ranks, with vocabulary padding."""
    length, others, axis = axis_sizes(parameter, arch, vocab_rows)
    if axis == -1:
        return (length, *others)
    assert length % size == 0, (
        f"{parameter.slot.megatron}: {length} does not divide over {size} ranks"
    )
    return (*others[:axis], length // size, *others[axis:])


def _stack(
    parameter: Parameter, arch: Architecture, size: int, vocab_rows: int
) -> Iterator[tuple[str, int, int]]:
    """(HF tensor, first row, rows) along the cut axis of the whole parameter, from the top."""
    kind = parameter.slot.kind
    names = parameter.names
    dim = arch.head_dim
    if kind == "qkv":
        # Megatron keeps each query group together, so that a cut between groups is a cut of heads.
        heads = arch.num_heads // arch.num_kv_heads
        # In one HF tensor keys are behind all queries, values behind all keys.
        keys = arch.num_heads if len(names) == 1 else 0
        values = keys + arch.num_kv_heads if len(names) == 1 else 0
        for group in range(arch.num_kv_heads):
            if arch.gated_outputs:  # queries of the group, then their gates
                for at, head in product(range(2), range(heads)):
                    yield names[0], (2 * (group * heads + head) + at) * dim, dim
            else:
                yield names[0], group * heads * dim, heads * dim
            yield names[len(names) // 2], (keys + group) * dim, dim
            yield names[-1], (values + group) * dim, dim
    elif kind == "gate_up":
        # A rank computes silu(gate) * up alone: its gate rows stand directly before its up rows.
        half = axis_sizes(parameter, arch, vocab_rows)[0] // 2
        rows = half // size
        for rank in range(size):
            yield names[0], rank * rows, rows
            yield names[-1], rank * rows + (half if len(names) == 1 else 0), rows
    elif kind == "parts":
        for rank, part in product(range(size), parameter.slot.parts):
            groups = part.groups // size
            for group in range(rank * groups, (rank + 1) * groups):
                yield names[part.tensor], part.first + group * part.period, part.rows
    elif kind == "vocab":
        yield names[0], 0, arch.vocab_size
    else:
        yield names[0], 0, axis_sizes(parameter, arch, vocab_rows)[0]


def shards(
    parameter: Parameter, arch: Architecture, vocab_rows: int, rank: int, size: int
) -> list[Shard]:
    """The shards that tensor-parallel rank ``rank`` of ``size`` has in ``parameter``, from top to
    bottom, without ``key`` and ``dtype``, which their owner knows. The parameter is contiguous.

    Example: the second of two ranks has rows 32..63 of k_proj after 64 rows of q_proj, at hidden
    size 64: ``Shard("model.layers.0.self_attn.k_proj.weight", (64, 64), (32, 0), (32, 64), 4096,
    (64, 1))``.
    """
    length, others, axis = axis_sizes(parameter, arch, vocab_rows)
    cut = max(axis, 0)
    per_rank = length if axis == -1 else length // size
    first = 0 if axis == -1 else rank * per_rank

    def along_cut(value: int, on_others: tuple[int, ...]) -> tuple[int, ...]:
        return (*on_others[:cut], value, *on_others[cut:])

    stack = list(_stack(parameter, arch, size, vocab_rows))
    rows_of: dict[str, int] = {}  # of the whole HF tensors
    for name, start, rows in stack:
        rows_of[name] = max(rows_of.get(name, 0), start + rows)
    local = along_cut(per_rank, others)
    stride = tuple(math.prod(local[axis + 1 :]) for axis in range(len(local)))
    zeros = (0,) * len(others)
    in_interval: list[Shard] = []
    position = 0
    for name, start, rows in stack:
        low = max(position, first)
        high = min(position + rows, first + per_rank)
        if low < high:
            shard = Shard(
                name,
                full=along_cut(rows_of[name], others),
                start=along_cut(start + low - position, zeros),
                shape=along_cut(high - low, others),
                offset=(low - first) * stride[cut],
                stride=stride,
            )
            is_fused = arch.fused_experts and parameter.expert is not None
            in_interval.append(_in_fused(shard, parameter.expert, arch) if is_fused else shard)
        position += rows
    return in_interval


def _in_fused(shard: Shard, expert: int, arch: Architecture) -> Shard:
    """``shard`` of a matrix ``[out, in]``, which is one of a tensor ``[experts, in, out]``, or of
    one ``[experts, out, in]``."""
    step = -1 if arch.turned_experts else 1
    return replace(
        shard,
        full=(arch.num_experts, *shard.full[::step]),
        start=(expert, *shard.start[::step]),
        shape=(1, *shard.shape[::step]),
        stride=(1, *shard.stride[::step]),  # nothing steps along an axis of one element
    )


def tensor_slices(shard: Shard) -> tuple[slice, ...]:
    """The shard as an index into its whole HF tensor."""
    ends = zip(shard.start, shard.shape, strict=True)
    return tuple(slice(first, first + length) for first, length in ends)


def part_of(parameter: Tensor, shard: Shard) -> Tensor:
    """The elements of a shard of ``shards`` in its contiguous ``parameter``, a view."""
    offset = parameter.storage_offset() + shard.offset
    return parameter.as_strided(shard.shape, shard.stride, offset)


def hf_shapes(parameter: Parameter, arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Whole shape of each HF tensor of ``parameter``."""
    return {shard.name: shard.full for shard in shards(parameter, arch, arch.vocab_size, 0, 1)}
