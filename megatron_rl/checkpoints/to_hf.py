"""A distributed checkpoint as a HF directory, one tensor in memory at a time."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.checkpoints import directory, megatron_format
from megatron_rl.checkpoints.hf import MAX_FILE_BYTES, ShardWriter, copy_companions, write_config
from megatron_rl.config.model_config import format_name
from megatron_rl.models import read_architecture
from megatron_rl.runtime.digest import combined_digest, tensor_digest


def checkpoint_to_hf(
    source: Path,
    target: Path,
    config: Path,
    max_file_bytes: int = MAX_FILE_BYTES,
    *,
    allow_pickle: bool = False,
) -> str:
    """Writes ``target``, as a whole or not at all; returns the digest of the weights.

    Args:
        source: a checkpoint of megatron-core, of NeMo 2, or of a training run (its optimizer is
            left out).
        config: the HF directory that config.json and the tokenizer files are taken from.
        max_file_bytes: largest safetensors file.
        allow_pickle: read an index that names classes it does not need; it may run any program.

    Raises:
        ValueError: no checkpoint, or one that does not fit ``config``.
    """
    arch, _ = read_architecture(config)
    if (source / directory.MANIFEST).is_file():  # of a training run, which says what is whole
        directory.check_whole(source)
    partial = directory.begin(target)
    writer = ShardWriter(partial, max_file_bytes)
    digests: dict[str, str] = {}
    formats: set[str] = set()
    stored = megatron_format.read_hf(source, arch, writer.make_room, allow_pickle=allow_pickle)
    for name, tensor in stored:
        digests[name] = tensor_digest(tensor)
        formats.add(format_name(tensor.dtype))
        writer.add(name, tensor)
    writer.close()
    # config.json has one entry for all tensors: where they differ, it stays as it was.
    write_config(config, partial, formats.pop() if len(formats) == 1 else None)
    copy_companions(config, partial)
    directory.publish(target)
    return combined_digest(digests)
