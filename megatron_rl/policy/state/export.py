"""Exports the policy as a HF directory: config.json, safetensors, tokenizer files."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megatron_rl.checkpoints import directory, facts
from megatron_rl.checkpoints.hf import MAX_FILE_BYTES, ShardWriter, copy_companions, write_config
from megatron_rl.models import Architecture
from megatron_rl.runtime import disk
from megatron_rl.runtime.launch import from_first_rank

ADAPTERS = "adapter"  # folder inside an export, in the format of peft


def export_hf(
    weights: Iterable[tuple[str, Tensor]],
    path: Path,
    source: Path,
    arch: Architecture,
    params: str,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    adapters: Callable[[Path], None] | None = None,
) -> None:
    """Collective: writes weights, as ``gathered_weights`` gives them, as a HF directory.

    ``path`` is replaced as a whole. ``source``: the HF directory of the same model that has
    config.json and the tokenizer; ``params``: number format of the weights;
    ``adapters``: writes those that the weights hold merged, into a folder of their own.

    Raises:
        ValueError: the disk is full.
    """
    partial = path.with_name(path.name + directory.PARTIAL)
    from_first_rank(lambda: directory.begin(path))
    writer = ShardWriter(partial, max_file_bytes)
    failure = _write(weights, writer, dist.get_rank() == 0)
    needed = facts.export_bytes(facts.num_parameters(arch, 1), params)

    def publish() -> None:
        with disk.room_for(partial, needed, f"the export {path.name}"):
            if failure is not None:
                raise failure
            writer.close()
            write_config(source, partial, params)
            copy_companions(source, partial)
            if adapters is not None:
                adapters(partial / ADAPTERS)
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
