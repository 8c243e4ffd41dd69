"""Files of a HF directory: tensors read and written one at a time, config.json, tokenizer files."""

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.checkpoints.quantized import QuantizedSlice, quantized_tensors
from megatron_rl.config.model_config import QUANTIZATION, read_json, refuse_pointer, unread_layers
from megatron_rl.errors import concerning
from megatron_rl.models.base import Architecture
from megatron_rl.models.parameter_map import HEAD, hf_names, tensor_slices
from megatron_rl.types import Shard

MAX_FILE_BYTES = 5 * 10**9
# What a HF directory may hold besides weights and config.json.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "*.jinja",
    "chat_template.json",
    "*preprocessor_config.json",
)
# By their names in safetensors. Numbers of 8 bits mean nothing without their scales.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_NAMES_SHOWN = 4


def open_tensors(file: Path) -> Any:
    """The safetensors file, opened; also a context manager.

    Raises:
        ValueError: it is not there, a Git LFS pointer, or not whole; names the file.
    """
    if not file.is_file():
        raise ValueError(
            f"model.path: {file} is not there, but the index of the folder names it; copy it from"
            " the model"
        )
    refuse_pointer(file)
    with concerning(
        f"model.path: {file}", "it is damaged or cut off; copy it again", (SafetensorError, OSError)
    ):
        return safe_open(file, framework="pt")


def _tensor_files(path: Path) -> dict[str, Path]:
    """The file of each tensor of a HF directory, from the index where there is one."""
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if index.is_file():
        files = read_json(index).get("weight_map")
        # Names alone: one with a folder in it could lead anywhere.
        if not isinstance(files, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in files.values()
        ):
            raise ValueError(
                f"model.path: {index} has no weight_map of tensors to file names; copy it again"
                " from the model"
            )
        if single.is_file() and single.name not in files.values():
            raise ValueError(
                f"model.path: {path} holds {single.name} and {index.name}, which names other files:"
                " readers differ in which they take; remove the one that is not the model"
            )
        return {name: path / file for name, file in files.items()}
    if single.is_file():
        with open_tensors(single) as file:
            return dict.fromkeys(file.keys(), single)
    raise ValueError(
        f"model.path: {path} holds neither model.safetensors nor model.safetensors.index.json; save"
        " the model as safetensors"
    )


def _number_formats(files: Mapping[str, Path]) -> dict[str, str]:
    """That of each stored tensor. Reads the header of every file, and no weights."""
    formats = {}
    by_file = sorted(files, key=lambda name: (files[name], name))
    for path, names in groupby(by_file, key=files.__getitem__):
        with open_tensors(path) as file:
            present = set(file.keys())
            for name in names:
                if name not in present:
                    raise ValueError(
                        f"model.path: {path} holds no tensor {name}, but the index says so; copy"
                        " both again from the model"
                    )
                formats[name] = file.get_slice(name).get_dtype()
    return formats


def _number_format(name: str, dtype: str, path: Path) -> torch.dtype:
    if dtype not in _FLOATS:
        raise ValueError(
            f"model.path: {path}: tensor {name} is {dtype}, not a float of 16 bits or more"
            f" ({', '.join(_FLOATS)}); quantized weights are not supported where config.json has"
            " no quantization_config of fp8 with weight_block_size or mxfp4: give the model before"
            " quantization"
        )
    return _FLOATS[dtype]


class HfDirectory:
    """The tensors of a HF directory, by name; quantized ones as the float32 numbers that they stand
    for.

    ``prefixes``: see ``Architecture``; tensors of either layout are known by their older names.

    Raises:
        ValueError: the directory holds no safetensors, index or a file is missing or damaged, a
            file lacks a tensor that the index says it has, or a tensor is no float, or is there in
            both layouts.
    """

    def __init__(self, path: Path, prefixes: Sequence[tuple[str, str]] = ()) -> None:
        self.path = path
        self._stored = _tensor_files(path)
        formats = _number_formats(self._stored)
        config = path / "config.json"
        quantization = read_json(config).get(QUANTIZATION) if config.is_file() else None
        self._quantized = quantized_tensors(formats, quantization)
        scales = {each.scales for each in self._quantized.values()}
        names_of = {each.numbers: name for name, each in self._quantized.items()}
        self.files: dict[str, Path] = {}
        self._stored_names: dict[str, str] = {}
        self.formats: dict[str, torch.dtype] = {}
        for part, file in self._stored.items():
            if part in scales:
                continue
            stored_name = names_of.get(part, part)
            # As in the layout of published files.
            older = (
                old + stored_name.removeprefix(new)
                for new, old in prefixes
                if stored_name.startswith(new)
            )
            name = next(older, stored_name)
            if name in self.files:
                raise ValueError(
                    f"model.path: {path} holds both {self._stored_names[name]} and {stored_name},"
                    " two names of one tensor; take one of them out"
                )
            self.files[name] = file
            self._stored_names[name] = stored_name
            dtype = "F32" if part in names_of else formats[part]
            self.formats[name] = _number_format(part, dtype, file)
        self._open: dict[Path, Any] = {}

    def check(self, arch: Architecture) -> None:
        """Raises ValueError unless exactly the tensors of ``arch`` are there.

        Three kinds may be there too: the head of a tied model (who reads it compares it with the
        embedding), the rotary tables of old checkpoints, which follow from config.json, and layers
        that nothing here reads.
        """
        wanted = set(hf_names(arch))
        unread = unread_layers(arch.num_layers, arch.num_unread_layers, arch.linear is not None)
        present = {
            name
            for name in self.files
            if not name.endswith("rotary_emb.inv_freq") and not name.startswith(unread)
        }
        if arch.tied_embeddings:
            present -= set(HEAD.hf)
        missing = sorted(wanted - present)
        unknown = sorted(present - wanted)
        if missing or unknown:
            raise ValueError(
                f"model.path: {self.path} does not fit {arch.family} with {arch.num_layers} layers:"
                f" {len(missing)} tensors are missing {missing[:MAX_NAMES_SHOWN]} and"
                f" {len(unknown)} are unknown {unknown[:MAX_NAMES_SHOWN]}; check config.json"
                " against the weights"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """The whole tensor, a copy.

        Its file is mapped only meanwhile: the process does not grow with the model.
        """
        others, self._open = self._open, {}
        try:
            whole = tuple(slice(0, length) for length in self.shape(name))
            return self._slice(name)[whole].clone()
        finally:
            self._open = others

    def read_shard(self, shard: Shard) -> Tensor:
        """The shard, and nothing more of its tensor.

        Files stay open: a rank reads many shards of each.

        Raises:
            ValueError: the tensor has another shape than the shard says.
        """
        shape = self.shape(shard.name)
        if shape != shard.full:
            why = "the weights belong to another model"
            if len(shape) == 3 and shape == (shard.full[0], *shard.full[:0:-1]):
                why = "transformers 5 saves experts so, and vLLM cannot read it: swap the last two"
            raise ValueError(
                f"model.path: {shard.name} in {self.files[shard.name]} has shape {shape}, but"
                f" config.json needs {shard.full}; {why}"
            )
        return self._slice(shard.name)[tensor_slices(shard)]

    def _slice(self, name: str) -> Any:
        stored_name = self._stored_names[name]
        if (parts := self._quantized.get(stored_name)) is None:
            return self._stored_slice(stored_name)
        numbers, scales = map(self._stored_slice, (parts.numbers, parts.scales))
        return QuantizedSlice(parts, numbers, scales)

    def _stored_slice(self, stored_name: str) -> Any:
        file = self._stored[stored_name]
        if file not in self._open:
            self._open[file] = open_tensors(file)
        return self._open[file].get_slice(stored_name)


class ShardWriter:
    """Writes named tensors, in the order they come, into files of ``max_bytes`` at most.

    A larger tensor gets a file of its own. At most one file is in memory.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = 0
        self.total_bytes = 0
        self.files: list[list[str]] = []

    def make_room(self, size: int) -> None:
        """Writes what is pending if ``size`` more bytes would not fit into its file.

        Called before they are read, so that the two are never in memory together.
        """
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
        self.pending = {}
        self.pending_bytes = 0

    def _temporary(self, number: int) -> Path:
        """Final names say how many files there are, which is known at the end."""
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
        index = {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (self.path / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="ascii"
        )


def copy_companions(source: Path, target: Path) -> None:
    """Copies the tokenizer and generation files of a HF directory."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)


def write_config(source: Path, target: Path, dtype: str | None) -> None:
    """Copies ``source/config.json``.

    ``dtype`` (as in "bfloat16") becomes the format of the weights in it; None: as it is.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop(QUANTIZATION, None)  # what was read is dequantized
    # transformers wrote "torch_dtype" before version 5 and "dtype" since; both are read.
    names = ("torch_dtype", "dtype")
    if dtype is not None:
        if not any(key in config for key in names):
            config["dtype"] = dtype
        # A model with a tower has a section for each of its parts.
        sections = [value for value in config.values() if isinstance(value, dict)]
        for section in (config, *sections):
            for key in names:
                if key in section:
                    section[key] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="ascii")
