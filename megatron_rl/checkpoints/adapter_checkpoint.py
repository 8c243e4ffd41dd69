"""Checkpoints that hold adapters alone, read with the weights that they were trained beside."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.checkpoints import directory, megatron_format
from megatron_rl.checkpoints.hf import HfDirectory
from megatron_rl.checkpoints.megatron_format import (
    CheckpointReader,
    LayerTensor,
    layer_place,
    to_hf,
)
from megatron_rl.config.lora import LoraConfig
from megatron_rl.models import Architecture
from megatron_rl.models.adapters import with_adapters
from megatron_rl.models.parameter_map import adapter_parameters, hf_names
from megatron_rl.runtime.digest import combined_digest, tensor_digest


def read_hf(
    path: Path,
    base: Path,
    arch: Architecture,
    announce: Callable[[int], None],
    *,
    allow_pickle: bool = False,
) -> Iterable[tuple[str, Tensor]]:
    """As ``megatron_format.read_hf`` of any checkpoint; adapters come merged into the weights of
    the HF directory ``base``.

    Raises:
        ValueError: also, behind the last tensor: the adapters were trained beside other weights.
    """
    # Where there is no manifest, no training wrote it. An old one says nothing of adapters.
    info = directory.check(path) if (path / directory.MANIFEST).is_file() else {}
    if info.get("model.lora") is None:
        return megatron_format.read_hf(path, arch, announce, allow_pickle=allow_pickle)
    return _merged(path, base, arch, announce, info)


def _merged(
    path: Path,
    base: Path,
    arch: Architecture,
    announce: Callable[[int], None],
    info: Mapping[str, Any],
) -> Iterator[tuple[str, Tensor]]:
    lora = LoraConfig.model_validate({**info["model.lora"], "path": None}, strict=False)
    dtype = getattr(torch, info["precision.params"])
    reader = CheckpointReader(path)
    adapters = _adapters(with_adapters(arch, lora))
    stored = HfDirectory(base, arch.prefixes)
    stored.check(arch)
    digests = {}
    for name in hf_names(arch):
        weight = stored.read(name).to(dtype)
        announce(weight.nbytes)
        digests[name] = tensor_digest(weight)
        a, b = (f"{name.removesuffix('.weight')}.lora_{part}.weight" for part in "AB")
        if a in adapters:
            of_b = to_hf([adapters[b]], arch, reader.read)[b]
            # In the order of the policy's product, for the same bits, and rounded once.
            product = (reader.read(adapters[a]).float().t() @ of_b.float().t()).t()
            weight = weight.float().add(product, alpha=lora.scale).to(dtype)
        yield name, weight
    if combined_digest(digests) != info["digest of the base"]:
        raise ValueError(
            f"{path} holds adapters that were trained beside other weights than those of {base};"
            " give the model that its run started from"
        )


def _adapters(arch: Architecture) -> dict[str, LayerTensor]:
    """Where a checkpoint has each adapter, by HF name."""
    found = {}
    for layer in range(arch.num_layers):
        for parameter in adapter_parameters(arch, layer):
            layers, place, extent = layer_place(arch, layer)
            key = f"{layers}.{parameter.slot.megatron}"
            item = LayerTensor(parameter, key, key, place, extent, parameter.slot.shape)
            found[parameter.names[0]] = item
    return found
