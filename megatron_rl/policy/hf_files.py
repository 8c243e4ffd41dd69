"""Files of a HF directory: safetensors read and written piece by piece, config.json, tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

MAX_FILE_BYTES = 5 * 10**9
# What a HF directory may hold beside weights and config.json.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "*.jinja", "chat_template.json", "*preprocessor_config.json",
)  # fmt: skip


class HfFiles:
    """The tensors of a HF directory. A file is mapped only while one of its tensors is read, so the process does not grow with it.

    Raises ValueError when the directory holds no safetensors.
    """

    def __init__(self, path: Path) -> None:
        index, single = path / "model.safetensors.index.json", path / "model.safetensors"
        self.path = path
        if index.is_file():
            self.files = {name: path / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
        elif single.is_file():
            with safe_open(single, framework="pt") as file:
                self.files = dict.fromkeys(file.keys(), single)
        else:
            raise ValueError(f"{path} holds neither model.safetensors nor model.safetensors.index.json; save the model as safetensors")

    def check(self, names: Sequence[str], ignored: Collection[str]) -> None:
        """Raises ValueError unless exactly the tensors ``names`` are there (``ignored`` and rotary tables may be, too)."""
        present = {name for name in self.files if name not in ignored and not name.endswith("rotary_emb.inv_freq")}
        missing, unknown = sorted(set(names) - present), sorted(present - set(names))
        if missing or unknown:
            raise ValueError(
                f"{self.path}: {len(missing)} tensors are missing {missing[:4]} and {len(unknown)} are unknown {unknown[:4]}; "
                "check config.json against the weights"
            )

    def read(self, name: str) -> Tensor:
        """The whole tensor, a copy."""
        with safe_open(self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor.clone()

    def common_dtype(self, names: Sequence[str]) -> torch.dtype:
        """Number format of tensors that become one parameter. Raises ValueError when they differ."""
        found = {}
        for name in names:
            with safe_open(self.files[name], framework="pt") as file:
                first = file.get_slice(name)
                found[name] = (first[:0] if len(first.get_shape()) else file.get_tensor(name)).dtype
        if len(set(found.values())) > 1:
            raise ValueError(f"{self.path}: tensors that make up one parameter differ in number format: {found}; convert them to one")
        return found[names[0]]


class ShardWriter:
    """Writes named tensors, in the order they come, into safetensors files of at most ``max_bytes`` (a larger tensor gets a file
    of its own). At most one file is in memory."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path, self.max_bytes = path, max_bytes
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = self.total_bytes = 0
        self.files: list[list[str]] = []

    def make_room(self, size: int) -> None:
        """Writes what is pending if ``size`` more bytes would not fit into its file: before they are read, not after."""
        if self.pending and self.pending_bytes + size > self.max_bytes:
            self._flush()

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self.make_room(size)
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


def write_config(source: Path, target: Path, dtype: str | None) -> None:
    """``source/config.json`` with ``dtype`` (as in "bfloat16") as the format of the weights; None: as it is."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    # transformers wrote "torch_dtype" before version 5 and "dtype" since; both are read.
    keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["dtype"]
    if dtype is not None:
        config.update(dict.fromkeys(keys, dtype))
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="ascii")
