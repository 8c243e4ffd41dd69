"""Low-rank adapters (LoRA) beside megatron's linear layers: their forward, and merged weights.

A layer that is cut along its outputs (qkv, gate and up) has A whole and B cut like itself; one that
is cut along its inputs (output and down projection) has A cut and B whole; both are whole beside
one that every rank has whole (to latent vectors). So only the product with A crosses tensor ranks,
``rank`` numbers per token. Whole matrices get their whole gradient on every rank, except under
sequence parallelism, where each rank sees its own tokens: megatron then sums the gradients of
parameters that are marked ``sequence_parallel``.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import xxhash
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_rl.checkpoints import peft_format
from megatron_rl.config.lora import LoraConfig
from megatron_rl.models import Architecture, Slot
from megatron_rl.models.adapters import is_adapted
from megatron_rl.models.base import Kind
from megatron_rl.models.parameter_map import (
    ADAPTER,
    Parameter,
    adapter_module,
    layer_parameters,
    local_shape,
    part_of,
    tensor_slices,
)
from megatron_rl.policy.state.weights import LocalParameter
from megatron_rl.runtime.launch import from_first_rank

_AXES = {"rows": 0, "qkv": 0, "gate_up": 0, "parts": 0, "columns": 1}


@dataclass(frozen=True)
class Host:
    """The linear layer that adapters stand beside, as a tensor rank has it."""

    kind: Kind  # how its projections lie in it
    num_groups: int  # query groups of this rank
    gated_heads: int  # queries of a group that have a gate; 0: none have
    group: Any  # tensor ranks
    sequence_parallel: bool  # whether these share the tokens between layers


class Adapter(torch.nn.Module):
    """The adapters of all projections in one linear layer: parameters ``q_proj_a``, ``q_proj_b``.

    Args:
        slots: those of the projections, A before B, in the order in which the layer has them.
        scale: factor of the product B A.
    """

    def __init__(
        self, slots: Sequence[Slot], sizes: Sequence[tuple[int, ...]], host: Host, scale: float
    ) -> None:
        super().__init__()
        self.host = host
        self.scale = scale
        self.enabled = True
        self._cut = {}
        self._halves: str | None = None  # a B whose rows are those of gate, then those of up
        # Bs of the inputs of linear attention, which lie in parts
        self._parts = {slot.megatron.rsplit(".", 1)[-1]: slot.parts for slot in slots if slot.parts}
        for slot, size in zip(slots, sizes, strict=True):
            name = slot.megatron.rsplit(".", 1)[-1]
            parameter = torch.nn.Parameter(torch.zeros(size))
            if slot.kind in _AXES:
                self._cut[name] = _AXES[slot.kind]
                self._halves = name if slot.kind == "gate_up" else self._halves
            else:
                cast(Any, parameter).sequence_parallel = host.sequence_parallel
            self.register_parameter(name, parameter)

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """A and B of each projection."""
        each = list(self.parameters())
        return list(zip(each[::2], each[1::2], strict=True))

    def forward(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """``outputs`` of the layer with the update of its ``inputs``."""
        if not self.enabled:
            return outputs
        return outputs + self.scale * self._update(inputs)

    def _update(self, inputs: Tensor) -> Tensor:
        group = self.host.group
        # One product for all projections: they read the same inputs.
        inner = F.linear(inputs, torch.cat([a for a, _ in self.pairs]))
        if self.host.kind == "whole":
            pass  # each rank computes what it needs of the layer
        elif self.host.kind == "columns":
            if self.host.sequence_parallel:
                inner = reduce_scatter_to_sequence_parallel_region(inner, group=group)
            else:
                inner = reduce_from_tensor_model_parallel_region(inner, group=group)
        elif self.host.sequence_parallel:
            inner = gather_from_sequence_parallel_region(inner, group=group)
        else:
            # Each rank's B gives a part of the gradient: their sum is due here, not at the inputs.
            inner = copy_to_tensor_model_parallel_region(inner, group=group)
        parts = inner.chunk(len(self.pairs), -1)
        return self._fused([F.linear(x, b) for x, (_, b) in zip(parts, self.pairs, strict=True)])

    def _fused(self, parts: Sequence[Tensor]) -> Tensor:
        """The outputs of the projections, along the last axis in the order of the layer's rows."""
        if self.host.kind == "qkv":
            # Each query group stands together: its queries, its key, its value.
            groups = [x.unflatten(-1, (self.host.num_groups, -1)) for x in parts]
            if self.host.gated_heads:  # HF has the gate of each head behind its query
                heads = groups[0].unflatten(-1, (self.host.gated_heads, 2, -1))
                groups[0] = heads.transpose(-2, -3).flatten(-3)
            return torch.cat(groups, -1).flatten(-2)
        return torch.cat(list(parts), -1)

    def merged(self, weight: Tensor) -> Tensor:
        """``W + scale B A`` of this rank's ``weight``: in float32, rounded once to its format."""
        products = [a.float().t() @ b.float().t() for a, b in self.pairs]
        total = weight.to(torch.float32, copy=True)
        total.add_(self._fused(products).t(), alpha=self.scale)
        return total.to(weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """megatron's description of the parameters for checkpoints."""
        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            self._cut,
            sharded_offsets,
            tp_group=self.host.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self._halves is not None:
            # Those of each rank are halves of the whole in other layouts.
            key = f"{prefix}{self._halves}"
            state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets)
        for name, parts in self._parts.items():
            key = f"{prefix}{name}"
            rows = [part.rows * part.groups // self.host.group.size() for part in parts]
            state[key] = _split_tensor_factory(state[key], rows, [x.name for x in parts], 0)
        return state


def add_adapters(model: Any, arch: Architecture, scale: float) -> None:
    """Freezes the parameters of ``model``, a chunk before it is wrapped, and sets adapters beside
    its linear layers, with zeros in them."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if model.pre_process and model.config.recompute_granularity == "full":
        # A layer that is run again has a gradient only where its inputs have one.
        model.embedding.register_forward_hook(lambda _, inputs, states: states.requires_grad_())
    for layer in model.decoder.layers:
        for parameter in layer_parameters(arch, layer.layer_number - 1):
            name = adapter_module(parameter.slot.megatron)
            slots = [slot for slot in arch.adapter_slots if slot.megatron.startswith(name + ".")]
            if is_adapted(parameter) and slots:
                _add(layer, parameter.slot, slots, arch, scale)


def _add(layer: Any, slot: Slot, slots: Sequence[Slot], arch: Architecture, scale: float) -> None:
    linear = layer.get_submodule(slot.megatron.removesuffix(".weight"))
    assert not hasattr(linear, "layer_norm_weight"), f"{slot.megatron}: its inputs are not normed"
    group = layer.pg_collection.tp
    size = group.size()
    heads = arch.num_heads // arch.num_kv_heads if arch.gated_outputs else 0
    groups = arch.num_kv_heads // size
    host = Host(slot.kind, groups, heads, group, layer.config.sequence_parallel)
    sizes = [local_shape(Parameter(each, each.hf), arch, 0, size) for each in slots]
    adapter = Adapter(slots, sizes, host, scale).to(linear.weight)
    owner, _, name = adapter_module(slot.megatron).rpartition(".")
    layer.get_submodule(owner).add_module(name, adapter)

    def adapted(_: Any, inputs: Any, outputs: Any) -> Any:
        # megatron's linear layers return (product, bias not yet added).
        return adapter(inputs[0], outputs[0]), *outputs[1:]

    linear.register_forward_hook(adapted)


def adapters_by_weight(model: torch.nn.Module) -> dict[Tensor, Adapter]:
    """The adapters of a model chunk, by the weight that they are added to."""
    modules = dict(model.named_modules())
    return {
        modules[name.removesuffix(ADAPTER)].weight: module
        for name, module in modules.items()
        if isinstance(module, Adapter)
    }


@contextlib.contextmanager
def switched_off(adapters: Mapping[Tensor, Adapter]) -> Iterator[None]:
    """Context in which the model has no adapters."""
    for adapter in adapters.values():
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters.values():
            adapter.enabled = True


def start_adapters(
    adapters: Sequence[LocalParameter], arch: Architecture, lora: LoraConfig, *, read: bool
) -> None:
    """Collective: sets this rank's adapters to those of ``lora.path`` (unless ``read`` is False: a
    checkpoint will bring others), else A random and B zero.

    Raises:
        ValueError: on every rank, as ``peft_format.check``.
    """
    path = Path(lora.path) if lora.path is not None and read else None
    if path is not None:
        from_first_rank(lambda: peft_format.check(path, arch, lora))
    for item in adapters:
        for shard in item.shards:  # of one HF tensor
            if path is not None:
                values = peft_format.read_shard(path, shard, arch)
            elif shard.name.endswith("lora_A.weight"):
                values = random_a(shard.name, shard.full)[tensor_slices(shard)]
            else:
                values = torch.zeros(shard.shape)
            part_of(item.tensor.detach(), shard).copy_(values)


def random_a(name: str, shape: Sequence[int]) -> Tensor:
    """A of a new adapter: uniform in +-1 / sqrt(inputs), as peft has it. B starts at 0.

    The whole tensor, by its HF name alone: the same in every layout, and in every run.
    """
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) % 2**63)
    return (2 * torch.rand(*shape, generator=generator) - 1) / shape[1] ** 0.5
