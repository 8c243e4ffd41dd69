"""Converts weights between a HF directory and a distributed checkpoint of megatron-core or NeMo 2, one tensor at a time.

    python tools/convert_checkpoint.py to-megatron HF_DIRECTORY CHECKPOINT
    python tools/convert_checkpoint.py to-nemo HF_DIRECTORY CHECKPOINT
    python tools/convert_checkpoint.py to-hf CHECKPOINT HF_DIRECTORY [--config HF_DIRECTORY] [--max-file-gb 5] [--allow-pickle]

A distributed checkpoint suits every parallel layout, so none is asked for. Number formats are kept. The printed digest is that of
the HF tensors: equal digests, equal weights. ``to-hf`` also takes a training checkpoint (its optimizer is left out); it needs the
model's config.json and tokenizer files, which ``to-megatron`` and ``to-nemo`` leave in CHECKPOINT/hf. A NeMo 2 checkpoint has weights/
and context/; NeMo itself is needed for neither direction.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.policy import dist_format, nemo_files
from megatron_rl.policy.families import Architecture, read_architecture
from megatron_rl.policy.hf_files import HfFiles, ShardWriter, copy_companions, write_config
from megatron_rl.policy.layout import hf_names
from megatron_rl.runtime import checkpoint_dir
from megatron_rl.runtime.digest import combined_digest, tensor_digest

CONFIG = "hf"


def to_megatron(source: Path, target: Path) -> str:
    """Writes a checkpoint of megatron-core; returns the digest of the weights."""
    arch, _ = read_architecture(source)
    files = _files(source, arch)
    partial = checkpoint_dir.begin(target)
    digest = _write(arch, files, partial, "")
    _copy_config(source, partial / CONFIG)
    checkpoint_dir.publish(target)
    return digest


def to_nemo(source: Path, target: Path) -> str:
    """Writes a checkpoint of NeMo 2; returns the digest of the weights. Its configuration has one number format: the embedding's."""
    arch, hf = read_architecture(source)
    files = _files(source, arch)
    dtype = files.common_dtype(hf_names(arch)[:1])
    model = nemo_files.model_call(arch, hf, dtype, nemo_files.has_tokenizer(source))
    partial = checkpoint_dir.begin(target)
    nemo_files.write_context(source, partial / nemo_files.CONTEXT, model)
    (partial / nemo_files.WEIGHTS).mkdir()
    digest = _write(arch, files, partial / nemo_files.WEIGHTS, nemo_files.PREFIX)
    _copy_config(source, partial / CONFIG)
    checkpoint_dir.publish(target)
    return digest


def _files(source: Path, arch: Architecture) -> HfFiles:
    files = HfFiles(source)
    files.check(hf_names(arch), ignored={"lm_head.weight"} if arch.tied_embeddings else set())
    return files


def _write(arch: Architecture, files: HfFiles, weights: Path, prefix: str) -> str:
    digests: dict[str, str] = {}

    def produce(slab: dist_format.Slab) -> Tensor:
        tensors = {name: files.read(name) for name in slab.parameter.names}
        digests.update({name: tensor_digest(tensor) for name, tensor in tensors.items()})
        return dist_format.to_megatron(slab, arch, tensors)

    dist_format.write(weights, arch, lambda slab: files.common_dtype(slab.parameter.names), produce, prefix)
    return combined_digest(digests)


def _copy_config(source: Path, folder: Path) -> None:
    folder.mkdir()
    write_config(source, folder, None)
    copy_companions(source, folder)


def to_hf(source: Path, target: Path, config: Path | None, max_file_bytes: int, *, allow_pickle: bool = False) -> str:
    """Writes the HF directory; returns the digest of the weights."""
    config = source / CONFIG if config is None else config
    arch, _ = read_architecture(config)
    partial = checkpoint_dir.begin(target)
    writer = ShardWriter(partial, max_file_bytes)
    digests: dict[str, str] = {}
    formats: set[torch.dtype] = set()
    for name, tensor in dist_format.read_hf(source, arch, writer.make_room, allow_pickle=allow_pickle):
        digests[name] = tensor_digest(tensor)
        formats.add(tensor.dtype)
        writer.add(name, tensor)
    writer.close()
    write_config(config, partial, str(formats.pop()).removeprefix("torch.") if len(formats) == 1 else None)
    copy_companions(config, partial)
    checkpoint_dir.publish(target)
    return combined_digest(digests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    into = commands.add_parser("to-megatron", help="HF directory -> distributed checkpoint")
    nemo = commands.add_parser("to-nemo", help="HF directory -> NeMo 2 checkpoint")
    out = commands.add_parser("to-hf", help="distributed or NeMo 2 checkpoint -> HF directory")
    for command in (into, nemo, out):
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path)
    out.add_argument("--config", type=Path, help="HF directory with config.json and tokenizer files (default: SOURCE/hf)")
    out.add_argument("--max-file-gb", type=float, default=5.0, help="largest safetensors file, in 10^9 bytes")
    out.add_argument(
        "--allow-pickle", action="store_true", help="read an index that names other classes: it may run any program, so trust its source"
    )
    arguments = parser.parse_args()
    try:
        if arguments.target.exists():
            raise ValueError(f"{arguments.target} exists; choose another directory, or remove it")
        if arguments.command == "to-hf":
            max_file_bytes = int(arguments.max_file_gb * 10**9)
            digest = to_hf(
                arguments.source, arguments.target, arguments.config, max_file_bytes, allow_pickle=arguments.allow_pickle
            )
        else:
            write = to_megatron if arguments.command == "to-megatron" else to_nemo
            digest = write(arguments.source, arguments.target)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.target}: digest {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
