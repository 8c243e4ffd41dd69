"""A distributed checkpoint as a HF directory, one tensor in memory at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rl.policy import dist_format
from megatron_rl.policy.families import read_architecture
from megatron_rl.policy.hf_files import MAX_FILE_BYTES, ShardWriter, copy_companions, write_config
from megatron_rl.runtime import checkpoint_dir
from megatron_rl.runtime.digest import combined_digest, tensor_digest


def checkpoint_to_hf(
    source: Path,
    target: Path,
    config: Path,
    max_file_bytes: int = MAX_FILE_BYTES,
    *,
    allow_pickle: bool = False,
) -> str:
    """Writes ``target`` (as a whole or not at all) and returns the digest of the weights.

    Args:
        source: a checkpoint of megatron-core, of NeMo 2, or of a training run (its optimizer is
            left out).
        config: the HF directory that config.json and the tokenizer files are taken from.
        max_file_bytes: largest safetensors file.
        allow_pickle: read an index that names other classes than those it needs; it may run any
            program.

    Raises:
        ValueError: no checkpoint, or one that does not fit ``config``.
    """
    arch, _ = read_architecture(config)
    partial = checkpoint_dir.begin(target)
    writer = ShardWriter(partial, max_file_bytes)
    digests: dict[str, str] = {}
    formats: set[torch.dtype] = set()
    for name, tensor in dist_format.read_hf(
        source, arch, writer.make_room, allow_pickle=allow_pickle
    ):
        digests[name] = tensor_digest(tensor)
        formats.add(tensor.dtype)
        writer.add(name, tensor)
    writer.close()
    dtype = str(formats.pop()).removeprefix("torch.") if len(formats) == 1 else None
    write_config(config, partial, dtype)
    copy_companions(config, partial)
    checkpoint_dir.publish(target)
    return combined_digest(digests)
