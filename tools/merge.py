"""Averages models of one architecture, such as exports of one run, one tensor at a time.

    python tools/merge.py --out MERGED EXPORT EXPORT [--method slerp] [--weights 3,1]

linear: the weighted mean of each tensor. slerp: of two, each tensor moves on the arc from the first
to the second, by the share of the second weight; tensors that are nearly parallel, or 0, get the
mean. Weights are divided by their sum. Sums are in float64, rounded once to the format of the
models. config.json and the tokenizer are those of the first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.checkpoints import directory
from megatron_rl.checkpoints.hf import HfDirectory, ShardWriter, copy_companions, write_config

_PARALLEL = 1 - 1e-9  # cosine above which the arc is a line, to what float64 can tell


def linear(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum of w_i x_i in float64; the weights add up to 1."""
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        total += weight * tensor.double()
    return total


def slerp(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """(sin((1 - t) a) x + sin(t a) y) / sin(a), a the angle between x and y, t the second weight.
    Source: Shoemake 1985, of vectors that need not have the length 1."""
    first, second = (tensor.double() for tensor in tensors)
    lengths = float(first.norm() * second.norm())
    cosine = float((first * second).sum()) / lengths if lengths else 1.0
    if abs(cosine) > _PARALLEL:
        return linear(tensors, weights)
    angle = torch.tensor(cosine, dtype=torch.float64).acos()
    parts = [torch.sin(weight * angle) / torch.sin(angle) for weight in weights]
    return parts[0] * first + parts[1] * second


AVERAGES = {"linear": linear, "slerp": slerp}


def compared(folders: Sequence[Path]) -> list[HfDirectory]:
    """The directories. Raises ValueError where they differ in tensors, shapes or number formats."""
    directories = [HfDirectory(folder) for folder in folders]
    first, *others = [
        {name: f"{tuple((one := each.read(name)).shape)} {one.dtype}" for name in each.files}
        for each in directories
    ]
    problems = []
    for each, kinds in zip(directories[1:], others, strict=True):
        names = sorted({name for name, _ in kinds.items() ^ first.items()})
        pairs = [f"{name} ({kinds.get(name)}, not {first.get(name)})" for name in names[:3]]
        if names:
            problems.append(f"{each.path} differs in {len(names)} tensors: {', '.join(pairs)}")
    if problems:
        raise ValueError(f"not like {directories[0].path}: {'; '.join(problems)}")
    return directories


def merge(folders: Sequence[Path], weights: Sequence[float], method: str, out: Path) -> None:
    """Writes ``out``, as a whole or not at all. Raises ValueError as ``compared``."""
    directories = compared(folders)
    partial = directory.begin(out)
    writer = ShardWriter(partial)
    for name in directories[0].files:
        tensors = [each.read(name) for each in directories]
        writer.add(name, AVERAGES[method](tensors, weights).to(tensors[0].dtype))
    writer.close()
    write_config(folders[0], partial, None)
    copy_companions(folders[0], partial)
    directory.publish(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="EXPORT")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--method", choices=AVERAGES, default="linear")
    parser.add_argument("--weights", help="one for each model, e.g. 3,1; without it all alike")
    options = parser.parse_args()
    count = len(options.models)
    try:
        weights = [float(text) for text in (options.weights or ",".join("1" * count)).split(",")]
        if len(weights) != count or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
            raise ValueError(f"--weights {options.weights}: give {count} numbers, none below 0")
        if count < 2 or (options.method == "slerp" and count > 2):
            raise ValueError(
                f"--method {options.method}: {count} models; give two, or more to linear"
            )
        merge(
            options.models, [each / sum(weights) for each in weights], options.method, options.out
        )
    except (ValueError, OSError) as error:
        print(f"merge: {error}", file=sys.stderr)
        return 1
    print(f"merged {count} models into {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
