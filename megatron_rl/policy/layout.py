"""Where the elements of HF tensors sit in Megatron parameters, as boxes. Pure arithmetic: no megatron, no tensors.

Every tensor-parallel shard of a Megatron parameter is an interval of one axis of the whole parameter, and the whole parameter
is a stack of boxes of HF tensors along that axis. A rank's boxes are the stack cut to the rank's interval.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.policy.families.base import Architecture, Slot

EMBEDDING = Slot("embedding.word_embeddings.weight", "vocab", ("model.embed_tokens.weight",))
FINAL_NORM = Slot("decoder.final_layernorm.weight", "whole", ("model.norm.weight",))
HEAD = Slot("output_layer.weight", "vocab", ("lm_head.weight",))
TIED_HEAD = Slot("output_layer.weight", "vocab", ("model.embed_tokens.weight",))


@dataclass(frozen=True)
class Box:
    """``hf_tensor[start : start + shape]`` equals ``parameter[local : local + shape]`` (all tuples, one entry an axis).

    Example: the second of two tensor-parallel ranks holds rows 32..63 of k_proj, after 64 rows of q_proj:
    ``Box("model.layers.0.self_attn.k_proj.weight", (32, 0), (32, 64), (64, 0))``.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter of the whole model. ``layer`` and ``expert`` count over the whole model; ``names`` are the full
    HF names of the slot's tensors."""

    slot: Slot
    names: tuple[str, ...]
    layer: int | None = None
    expert: int | None = None


def padded_vocab(vocab_size: int, divisible_by: int, tensor: int) -> int:
    """``vocab_size`` rounded up to a multiple of ``divisible_by * tensor`` (rows, over all tensor-parallel ranks)."""
    multiple = divisible_by * tensor
    return -(-vocab_size // multiple) * multiple


def layer_parameters(arch: Architecture, layer: int) -> list[Parameter]:
    """Parameters of one layer but its experts, in the order of the architecture."""
    prefix = f"model.layers.{layer}."
    return [Parameter(slot, tuple(prefix + name for name in slot.hf), layer) for slot in arch.layer_slots]


def expert_parameters(arch: Architecture, layer: int, expert: int) -> list[Parameter]:
    """Parameters of one expert of one layer."""
    prefix = f"model.layers.{layer}.{arch.expert_prefix}.{expert}."
    return [Parameter(slot, tuple(prefix + name for name in slot.hf), layer, expert) for slot in arch.expert_slots]


def outer_parameters(arch: Architecture) -> tuple[list[Parameter], list[Parameter]]:
    """Parameters before the first layer, and after the last one. A tied head is not a parameter of its own."""
    after = [Parameter(FINAL_NORM, FINAL_NORM.hf)]
    if not arch.tied_embeddings:
        after.append(Parameter(HEAD, HEAD.hf))
    return [Parameter(EMBEDDING, EMBEDDING.hf)], after


def model_parameters(arch: Architecture) -> Iterator[Parameter]:
    """All parameters of the model, in the order in which weights are gathered and exported."""
    before, after = outer_parameters(arch)
    yield from before
    for layer in range(arch.num_layers):
        yield from layer_parameters(arch, layer)
        for expert in range(arch.num_experts):
            yield from expert_parameters(arch, layer, expert)
    yield from after


def hf_names(arch: Architecture) -> list[str]:
    """Names of all HF tensors of the model, in order."""
    return [name for parameter in model_parameters(arch) for name in parameter.names]


def axis_sizes(parameter: Parameter, arch: Architecture, vocab_rows: int) -> tuple[int, tuple[int, ...], int]:
    """``(length of the cut axis, the other axes, index of the cut axis)`` of the whole Megatron parameter; index -1: not cut."""
    kind, megatron = parameter.slot.kind, parameter.slot.megatron
    ffn = arch.ffn_hidden_size if parameter.expert is None else arch.expert_ffn_hidden_size
    heads = arch.num_heads * arch.head_dim
    if kind == "vocab":
        return vocab_rows, (arch.hidden_size,), 0
    if kind == "qkv":
        return heads + 2 * arch.num_kv_heads * arch.head_dim, () if megatron.endswith("bias") else (arch.hidden_size,), 0
    if kind == "gate_up":
        return 2 * ffn, (arch.hidden_size,), 0
    if kind == "columns":
        return (heads if "self_attention" in megatron else ffn), (arch.hidden_size,), 1
    assert kind == "whole", f"no sizes for kind {kind} of {megatron}"
    if "router" in megatron:
        return arch.num_experts, (arch.hidden_size,), -1
    return arch.head_dim if "q_layernorm" in megatron or "k_layernorm" in megatron else arch.hidden_size, (), -1


def local_shape(parameter: Parameter, arch: Architecture, vocab_rows: int, size: int) -> tuple[int, ...]:
    """Shape of the parameter on each of ``size`` tensor-parallel ranks (padding of the vocabulary included)."""
    length, others, axis = axis_sizes(parameter, arch, vocab_rows)
    if axis == -1:
        return (length, *others)
    assert length % size == 0, f"{parameter.slot.megatron}: {length} does not divide over {size} ranks"
    return (*others[:axis], length // size, *others[axis:])


def _stack(parameter: Parameter, arch: Architecture, size: int, vocab_rows: int) -> Iterator[tuple[str, int, int]]:
    """(HF tensor, first row, rows) from top to bottom of the whole Megatron parameter, along its cut axis."""
    kind, names, dim = parameter.slot.kind, parameter.names, arch.head_dim
    if kind == "qkv":
        queries = arch.num_heads // arch.num_kv_heads * dim
        for group in range(arch.num_kv_heads):
            yield names[0], group * queries, queries
            yield names[1], group * dim, dim
            yield names[2], group * dim, dim
    elif kind == "gate_up":
        rows = axis_sizes(parameter, arch, vocab_rows)[0] // 2 // size
        for rank in range(size):
            yield names[0], rank * rows, rows
            yield names[1], rank * rows, rows
    elif kind == "vocab":
        yield names[0], 0, arch.vocab_size
    else:
        yield names[0], 0, axis_sizes(parameter, arch, vocab_rows)[0]


def boxes(parameter: Parameter, arch: Architecture, vocab_rows: int, rank: int, size: int) -> list[Box]:
    """The boxes that tensor-parallel rank ``rank`` of ``size`` holds of ``parameter``, from top to bottom."""
    length, others, axis = axis_sizes(parameter, arch, vocab_rows)
    cut = max(axis, 0)
    per_rank = length if axis == -1 else length // size
    first = 0 if axis == -1 else rank * per_rank
    found: list[Box] = []
    position = 0
    for name, start, rows in _stack(parameter, arch, size, vocab_rows):
        low, high = max(position, first), min(position + rows, first + per_rank)
        if low < high:
            corner = tuple(0 for _ in others)
            found.append(
                Box(
                    name,
                    (*corner[:cut], start + low - position, *corner[cut:]),
                    (*others[:cut], high - low, *others[cut:]),
                    (*corner[:cut], low - first, *corner[cut:]),
                )
            )
        position += rows
    return found


def hf_shapes(parameter: Parameter, arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Whole shape of each HF tensor of ``parameter``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for box in boxes(parameter, arch, arch.vocab_size, 0, 1):
        ends = tuple(first + length for first, length in zip(box.start, box.shape, strict=True))
        known = shapes.get(box.name, ends)
        shapes[box.name] = tuple(max(pair) for pair in zip(known, ends, strict=True))
    return shapes
