"""Converts weights between a HF directory and a distributed checkpoint of megatron-core or NeMo 2,
one tensor at a time.

    python tools/convert_checkpoint.py to-megatron HF_DIRECTORY CHECKPOINT
    python tools/convert_checkpoint.py to-nemo HF_DIRECTORY CHECKPOINT
    python tools/convert_checkpoint.py to-hf CHECKPOINT HF_DIRECTORY [--config HF_DIRECTORY]
    [--max-file-gb 5] [--allow-pickle]

A distributed checkpoint suits every parallel layout, so none is asked for. Number formats are kept.
The printed digest is that of the HF tensors: equal digests, equal weights. ``to-hf`` needs the
model's config.json and tokenizer files, which ``to-megatron`` and ``to-nemo`` leave in
CHECKPOINT/hf. It also takes a training checkpoint (run_dir/checkpoints/step_NNNNNN; its optimizer
is left out), which has none: there ``--config`` names the model that the run started from, whose
weights get the adapters of a checkpoint of adapters. A NeMo 2 checkpoint has weights/ and context/;
NeMo itself is needed for neither direction.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.checkpoints import adapter_checkpoint, directory, megatron_format
from megatron_rl.checkpoints.hf import HfDirectory, ShardWriter, copy_companions, write_config
from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.model_config import format_name
from megatron_rl.errors import concerning
from megatron_rl.models import Architecture, read_architecture
from megatron_rl.models.parameter_map import hf_names
from megatron_rl.runtime.digest import combined_digest, tensor_digest
from tools import megatron_writer, nemo_context

CONFIG = "hf"


def to_megatron(source: Path, target: Path) -> str:
    """Writes a checkpoint of megatron-core; returns the digest of the weights."""
    arch, _ = read_architecture(source)
    files = _checked(source, arch)
    partial = directory.begin(target)
    digest = _write(arch, files, partial, "")
    _copy_config(source, partial / CONFIG)
    directory.publish(target)
    return digest


def to_nemo(source: Path, target: Path) -> str:
    """Writes a checkpoint of NeMo 2; returns the digest of the weights. Its configuration has one
    number format: the embedding's."""
    arch, hf = read_architecture(source)
    files = _checked(source, arch)
    dtype = files.formats[hf_names(arch)[0]]
    model = nemo_context.model_call(arch, hf, dtype, nemo_context.has_tokenizer(source))
    partial = directory.begin(target)
    nemo_context.write_context(source, partial / nemo_context.CONTEXT, model)
    (partial / megatron_format.NEMO_WEIGHTS).mkdir()
    digest = _write(
        arch, files, partial / megatron_format.NEMO_WEIGHTS, megatron_format.NEMO_PREFIX
    )
    _copy_config(source, partial / CONFIG)
    directory.publish(target)
    return digest


def _checked(source: Path, arch: Architecture) -> HfDirectory:
    files = HfDirectory(source, arch.prefixes)
    files.check(arch)
    return files


def _common_dtype(files: HfDirectory, names: Sequence[str]) -> torch.dtype:
    """Number format of tensors that become one parameter. Raises ValueError where they differ."""
    dtypes = {name: files.formats[name] for name in names}
    if len(set(dtypes.values())) > 1:
        raise ValueError(
            f"{files.path}: tensors that make up one parameter differ in number format: {dtypes};"
            " convert them to one"
        )
    return dtypes[names[0]]


def _write(arch: Architecture, files: HfDirectory, weights: Path, prefix: str) -> str:
    digests: dict[str, str] = {}

    @lru_cache(maxsize=1)  # parameters that are parts of one tensor follow each other
    def read(names: tuple[str, ...]) -> dict[str, Tensor]:
        tensors = {name: files.read(name) for name in names}
        digests.update({name: tensor_digest(tensor) for name, tensor in tensors.items()})
        return tensors

    def produce(item: megatron_format.LayerTensor) -> Tensor:
        return megatron_writer.to_megatron(item, arch, read(item.parameter.names))

    megatron_writer.write(
        weights,
        arch,
        lambda item: _common_dtype(files, item.parameter.names),
        produce,
        prefix,
    )
    return combined_digest(digests)


def _copy_config(source: Path, folder: Path) -> None:
    folder.mkdir()
    write_config(source, folder, None)
    copy_companions(source, folder)


def to_hf(
    source: Path,
    target: Path,
    config: Path | None,
    max_file_bytes: int,
    *,
    allow_pickle: bool = False,
) -> str:
    """Writes the HF directory, as a whole or not at all; returns the digest of the weights.

    Args:
        source: a checkpoint of megatron-core, of NeMo 2, or of a training run (its optimizer is
            left out).
        config: the HF directory that config.json and the tokenizer files are taken from; None:
            what ``to_megatron`` left in ``source``.
        max_file_bytes: largest safetensors file.
        allow_pickle: read an index that names classes it does not need; it may run any program.

    Raises:
        ValueError: no checkpoint, or one that does not fit ``config``.
    """
    config = config or source / CONFIG
    arch, _ = read_architecture(config)
    nemo_context.check_model(source, arch)
    if (source / directory.MANIFEST).is_file():  # of a training run, which says what is whole
        directory.check_whole(source)
    partial = directory.begin(target)
    writer = ShardWriter(partial, max_file_bytes)
    digests: dict[str, str] = {}
    formats: set[str] = set()
    stored = adapter_checkpoint.read_hf(
        source, config, arch, writer.make_room, allow_pickle=allow_pickle
    )
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


def check_source(command: str, source: Path, config: Path | None) -> None:
    """Raises ValueError, with the way out, when the source is not what the direction reads."""
    is_checkpoint = any(
        (folder / ".metadata").is_file()
        for folder in (source, source / megatron_format.NEMO_WEIGHTS)
    )
    if not source.is_dir():
        wanted = "a checkpoint" if command == "to-hf" else "a HF directory"
        raise ValueError(f"{source} is not a directory; give {wanted}")
    if command != "to-hf":
        if is_checkpoint:
            raise ValueError(
                f"{source} is a checkpoint, and {command} reads a HF directory; to-hf makes one"
                " of it"
            )
        return
    if not is_checkpoint:
        _refuse_other_directory(source)
    if config is None and not (source / CONFIG / "config.json").is_file():
        raise ValueError(
            f"{source} has no {CONFIG}/config.json beside its weights (training checkpoints have"
            " none); give --config HF_DIRECTORY, the model that the run started from, for its"
            " config.json and tokenizer files"
        )
    if config is not None and not (config / "config.json").is_file():
        raise ValueError(
            f"--config {config}: no config.json there; give a HF directory of this model"
        )


def _refuse_other_directory(source: Path) -> None:
    """Raises ValueError: ``source`` is a directory, and no checkpoint."""
    manifests = [
        *source.glob("step_*/manifest.json"),
        *source.glob("checkpoints/step_*/manifest.json"),
    ]
    if manifests:
        newest = sorted(manifest.parent for manifest in manifests)[-3:]
        raise ValueError(
            f"{source} holds checkpoints; give one of them: {', '.join(map(str, newest))}"
        )
    reason = f"(no file .metadata in it or in its {megatron_format.NEMO_WEIGHTS}/)"
    if (source / "config.json").is_file():
        reason = "but a HF directory already"
    raise ValueError(
        f"{source} is not a distributed checkpoint {reason}; give one: to-hf reads what"
        " to-megatron, to-nemo or a run wrote"
    )


def convert(options: argparse.Namespace) -> str:
    """Does what the command line asks; returns the digest.

    Raises:
        ValueError: the user's mistake, a damaged source, or a target that cannot be written.
        Nothing is left at the target.
    """
    source = options.source
    target = options.target
    if target.exists():
        raise ValueError(f"{target} exists; choose another directory, or remove it")
    check_source(options.command, source, options.config)
    with concerning(str(target), "choose a place where files can be written", (OSError,)):
        partial = directory.begin(target)  # now, and not after reading for hours
    try:
        cut = "a file is damaged or cut off; compare its size with the original"
        index = "config.json or the index of the weights is damaged"
        free_mib = shutil.disk_usage(partial).free >> 20
        full = (
            "a file of the source is damaged, or the disk of the target is full"
            f" ({free_mib} MiB were free at the start)"
        )
        others = (RuntimeError, EOFError, pickle.UnpicklingError)
        with (
            concerning(str(source), cut, (SafetensorError,)),
            concerning(str(source), index, (json.JSONDecodeError,)),
            concerning(f"{source} to {target}", full, others),
        ):
            if options.command == "to-hf":
                size = int(options.max_file_gb * 10**9)
                pickled = options.allow_pickle
                return to_hf(source, target, options.config, size, allow_pickle=pickled)
            write = to_megatron if options.command == "to-megatron" else to_nemo
            return write(source, target)
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    into = commands.add_parser("to-megatron", help="HF directory -> distributed checkpoint")
    nemo = commands.add_parser("to-nemo", help="HF directory -> NeMo 2 checkpoint")
    out = commands.add_parser("to-hf", help="distributed or NeMo 2 checkpoint -> HF directory")
    for command in (into, nemo, out):
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path)
        command.set_defaults(config=None)
    out.add_argument(
        "--config",
        type=Path,
        help="HF directory with config.json and tokenizer files (default: SOURCE/hf)",
    )
    out.add_argument(
        "--max-file-gb", type=float, default=5.0, help="largest safetensors file, in 10^9 bytes"
    )
    out.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read an index that names other classes: it may run any program, so trust its source",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 with one message."""
    options = arguments(argv)
    try:
        digest = convert(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.target}: digest {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
