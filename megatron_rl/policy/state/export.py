"""Exports the policy as a HF directory: config.json, safetensors, tokenizer files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megatron_rl.checkpoints import directory, facts
from megatron_rl.checkpoints.hf import MAX_FILE_BYTES, ShardWriter, copy_companions, write_config
from megatron_rl.config.number_formats import format_name
from megatron_rl.models import Architecture
from megatron_rl.runtime import disk
from megatron_rl.runtime.launch import from_first_rank


class Exportable(Protocol):
    """What an export takes of a MegatronPolicy. ``path`` is the HF directory it was built from."""

    path: Path
    arch: Architecture
    config: Any  # megatron's TransformerConfig

    def gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: (HF name, whole tensor)."""
        ...


def export_hf(policy: Exportable, path: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Collective: writes the policy's weights as a HF directory, in their own number format.

    ``path`` is replaced as a whole.

    Raises:
        ValueError: the disk is full.
    """
    partial = path.with_name(path.name + directory.PARTIAL)
    from_first_rank(lambda: directory.begin(path))
    writer = ShardWriter(partial, max_file_bytes)
    failure = _write(policy.gathered_weights(), writer, dist.get_rank() == 0)
    params = format_name(policy.config.params_dtype)
    needed = facts.export_bytes(facts.num_parameters(policy.arch, 1), params)

    def publish() -> None:
        with disk.room_for(partial, needed, f"the export {path.name}"):
            if failure is not None:
                raise failure
            writer.close()
            write_config(policy.path, partial, params)
            copy_companions(policy.path, partial)
        directory.publish(path)

    from_first_rank(publish)


def _write(
    weights: Iterable[tuple[str, Tensor]], writer: ShardWriter, is_main: bool
) -> Exception | None:
    """Writes the weights on rank 0; returns what went wrong.

    Takes all of them even then, because gathering them is collective.
    """
    failure: Exception | None = None
    for name, tensor in weights:
        if is_main and failure is None:
            try:
                writer.add(name, tensor)
            except (OSError, SafetensorError) as raised:
                failure = raised
    return failure
