"""Low-rank adapters (LoRA) of an architecture: which there are, under which names, of what shape.

Every projection of the HF model has an A and a B of its own, as peft has them, also where megatron
fuses projections into one layer. The update of a weight is ``scale * B @ A``.
Source: Hu et al. 2021, arXiv:2106.09685; rsLoRA: Kalajdzievski 2023, arXiv:2312.03732.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.config.lora import LoraConfig
from megatron_rl.models.base import Architecture, Kind, Slot
from megatron_rl.models.parameter_map import (
    Parameter,
    adapter_module,
    hf_shapes,
    layer_parameters,
)

# Of linear layers; norms, routers and embeddings are none.
_KINDS = ("qkv", "gate_up", "columns")


def with_adapters(arch: Architecture, lora: LoraConfig) -> Architecture:
    """The architecture with the adapters that ``lora`` asks for, if any."""
    if lora.rank is None:
        return arch
    slots: list[Slot] = []
    first_of_kind = {arch.is_linear(layer): layer for layer in reversed(range(arch.num_layers))}
    for layer in first_of_kind.values():
        for parameter in layer_parameters(arch, layer):
            target = "attention" if "self_attention" in parameter.slot.megatron else "mlp"
            if is_adapted(parameter) and target in lora.targets:
                slots += _slots(parameter, arch, lora.rank)
    return replace(arch, adapter_slots=tuple(dict.fromkeys(slots)))


def is_adapted(parameter: Parameter) -> bool:
    """Whether it is the weight of a linear layer, which may have adapters."""
    slot = parameter.slot
    # Latent and linear attention have other kinds, and say their shapes.
    is_matrix = "self_attention" in slot.megatron and len(slot.shape) == 2
    return (slot.kind in _KINDS or is_matrix) and slot.megatron.endswith(".weight")


def _slots(parameter: Parameter, arch: Architecture, rank: int) -> Iterator[Slot]:
    """A and B of each projection in a linear layer.

    Where the layer is cut along its outputs B is, where it is cut along its inputs A is; what is
    not cut is whole on every tensor rank.
    """
    module = adapter_module(parameter.slot.megatron)
    kind_a: Kind = "columns" if parameter.slot.kind == "columns" else "whole"
    kind_b: Kind = "whole" if parameter.slot.kind in ("columns", "whole") else "rows"
    if kind_b == "rows" and (parameter.slot.parts or len(parameter.names) == 1):
        kind_b = parameter.slot.kind  # one B for all of a fused HF tensor, laid out like it
    shapes = hf_shapes(parameter, arch)
    for number, (full, name) in enumerate(zip(parameter.names, parameter.slot.hf, strict=True)):
        parts = [x._replace(tensor=0) for x in parameter.slot.parts if x.tensor == number]
        outputs, inputs = shapes[full]
        stem = name.removesuffix(".weight")
        short = f"{module}.{stem.rsplit('.', 1)[-1]}"  # mlp.linear_fc2_adapter.down_proj
        yield Slot(f"{short}_a", kind_a, (f"{stem}.lora_A.weight",), (rank, inputs))
        shape_b = (outputs, rank)
        yield Slot(f"{short}_b", kind_b, (f"{stem}.lora_B.weight",), shape_b, tuple(parts))
