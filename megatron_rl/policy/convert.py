"""HF directories out of a policy: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.policy.main_rank import on_main
from megatron_rl.runtime import checkpoint_dir

MAX_FILE_BYTES = 5 * 10**9
# What a HF directory may hold beside weights and config.json.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "*.jinja", "chat_template.json", "*preprocessor_config.json",
)  # fmt: skip


class ShardWriter:
    """Writes named tensors, in the order they come, into safetensors files of at most ``max_bytes`` (a larger tensor gets a file
    of its own). At most one file is in memory."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path, self.max_bytes = path, max_bytes
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = self.total_bytes = 0
        self.files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > self.max_bytes:
            self._flush()
        self.pending[name] = tensor.detach().cpu().contiguous()
        self.pending_bytes += size
        self.total_bytes += size

    def _flush(self) -> None:
        save_file(self.pending, self._temporary(len(self.files)), metadata={"format": "pt"})
        self.files.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def _temporary(self, number: int) -> Path:
        return self.path / f"part-{number:05d}.safetensors"

    def close(self) -> None:
        """Names the files as HF does: one ``model.safetensors``, or numbered files and an index."""
        if self.pending:
            self._flush()
        count = len(self.files)
        if count == 1:
            self._temporary(0).rename(self.path / "model.safetensors")
            return
        weight_map = {}
        for number, names in enumerate(self.files):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._temporary(number).rename(self.path / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="ascii")


def copy_companions(source: Path, target: Path) -> None:
    """Copies the tokenizer and generation files of a HF directory."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)


def write_config(source: Path, target: Path, dtype: str) -> None:
    """``source/config.json`` with ``dtype`` (as in "bfloat16") as the format of the weights."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    # transformers wrote "torch_dtype" before version 5 and "dtype" since; both are read.
    keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["dtype"]
    config.update(dict.fromkeys(keys, dtype))
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="ascii")


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


__all__: Sequence[str] = ("ShardWriter", "copy_companions", "export_hf", "write_config")
