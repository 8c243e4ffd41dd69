"""HF directories out of a policy: config.json, safetensors, tokenizer files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_rl.policy.hf_files import MAX_FILE_BYTES, ShardWriter, copy_companions, write_config
from megatron_rl.policy.main_rank import on_main
from megatron_rl.runtime import checkpoint_dir


def export_hf(policy: Any, path: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Collective: the policy's weights, in their own number format, as a HF directory that replaces ``path`` as a whole."""
    partial = path.with_name(path.name + checkpoint_dir.PARTIAL)
    on_main(lambda: checkpoint_dir.begin(path))
    writer = ShardWriter(partial, max_file_bytes)
    failure = _write(policy.gathered_weights(), writer, dist.get_rank() == 0)

    def publish() -> None:
        if failure is not None:
            raise failure
        writer.close()
        write_config(policy.path, partial, str(policy.config.params_dtype).removeprefix("torch."))
        copy_companions(policy.path, partial)
        checkpoint_dir.publish(path)

    on_main(publish)


def _write(weights: Iterable[tuple[str, Tensor]], writer: ShardWriter, is_main: bool) -> OSError | None:
    """Takes all weights, because gathering them is collective, even when writing has failed."""
    failure: OSError | None = None
    for name, tensor in weights:
        if is_main and failure is None:
            try:
                writer.add(name, tensor)
            except OSError as raised:
                failure = raised
    return failure
