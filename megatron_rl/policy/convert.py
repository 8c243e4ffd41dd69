"""HF directories out of a policy: config.json, safetensors, tokenizer files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megatron_rl.policy import checkpoint_info
from megatron_rl.policy.hf_files import MAX_FILE_BYTES, ShardWriter, copy_companions, write_config
from megatron_rl.policy.main_rank import on_main
from megatron_rl.runtime import checkpoint_dir, disk


def export_hf(policy: Any, path: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Collective: the policy's weights, in their own number format, as a HF directory that replaces ``path`` as a whole.

    Raises:
        ValueError: the disk is full.
    """
    partial = path.with_name(path.name + checkpoint_dir.PARTIAL)
    on_main(lambda: checkpoint_dir.begin(path))
    writer = ShardWriter(partial, max_file_bytes)
    failure = _write(policy.gathered_weights(), writer, dist.get_rank() == 0)
    params = str(policy.config.params_dtype).removeprefix("torch.")
    needed = checkpoint_info.export_bytes(checkpoint_info.num_parameters(policy.arch, 1), params)

    def publish() -> None:
        with disk.room_for(partial, needed, f"the export {path.name}"):
            if failure is not None:
                raise failure
            writer.close()
            write_config(policy.path, partial, params)
            copy_companions(policy.path, partial)
        checkpoint_dir.publish(path)

    on_main(publish)


def _write(weights: Iterable[tuple[str, Tensor]], writer: ShardWriter, is_main: bool) -> Exception | None:
    """Takes all weights, because gathering them is collective, even when writing has failed."""
    failure: Exception | None = None
    for name, tensor in weights:
        if is_main and failure is None:
            try:
                writer.add(name, tensor)
            except (OSError, SafetensorError) as raised:
                failure = raised
    return failure
