"""Tensors that a HF directory stores in few bits, read as the float32 numbers that they stand for.

``NAME.weight`` in FP8 has a scale of each block of rows and columns in ``NAME.weight_scale_inv``
(DeepSeek-V3); ``NAME_blocks`` has two numbers of MXFP4 in a byte, 32 of them with one exponent in
``NAME_scales`` (experts of GPT-OSS), and is the transpose of the tensor NAME.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MXFP4_BLOCK = 32
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat([_E2M1, -_E2M1])  # the fourth bit is the sign
_BIAS = 127  # of an exponent
_FP8, _FP8_SCALES = "F8_E4M3", ("F32", "BF16")
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Quantized:
    """A tensor that is stored in two. ``block``: rows and columns of a scale; None: MXFP4."""

    numbers: str
    scales: str
    block: tuple[int, int] | None

    def shape(self, numbers: Any, scales: Any) -> tuple[int, ...]:
        """Of the tensor; ``numbers``, ``scales``: the stored ones, as slices of safetensors.

        Raises:
            ValueError: there is not one scale for each block.
        """
        shape = tuple(numbers.get_shape())
        wanted = shape[:-1]
        if self.block is not None:
            wanted = tuple(-(-length // size) for length, size in zip(shape, self.block))
        if tuple(scales.get_shape()) != wanted:
            raise ValueError(
                f"model.path: {self.scales} has shape {scales.get_shape()}, but {self.numbers} of"
                f" shape {shape} needs {wanted}; check quantization_config against the weights"
            )
        if self.block is not None:
            return shape
        experts, columns, groups, _ = shape
        return experts, groups * MXFP4_BLOCK, columns

    def read(self, numbers: Any, scales: Any, index: Index) -> Tensor:
        """The part ``index`` of the tensor, and no more of the files."""
        if self.block is None:
            return _from_mxfp4(numbers, scales, index)
        return _from_fp8(numbers, scales, self.block, index)


def _from_fp8(numbers: Any, scales: Any, block: tuple[int, int], index: Index) -> Tensor:
    blocks = [_blocks(part, size) for part, size in zip(index, block, strict=True)]
    of_block = scales[tuple(blocks)].float()
    for axis, (part, size, first) in enumerate(zip(index, block, blocks, strict=True)):
        place = torch.arange(part.start, part.stop) // size - first.start
        of_block = of_block.index_select(axis, place)
    return numbers[index].float().mul_(of_block)


def _from_mxfp4(numbers: Any, scales: Any, index: Index) -> Tensor:
    experts, rows, columns = index
    groups = _blocks(rows, MXFP4_BLOCK)
    first = rows.start - groups.start * MXFP4_BLOCK
    sizes = [part.stop - part.start for part in index]
    values = torch.empty(sizes, dtype=torch.float32)
    for number in range(sizes[0]):  # the bytes of one expert at a time
        expert = slice(experts.start + number, experts.start + number + 1)
        packed = numbers[expert, columns, groups]
        exponents = scales[expert, columns, groups].int() - _BIAS
        pairs = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        whole = torch.ldexp(_E2M1[pairs.int()], exponents[..., None]).flatten(2)
        values[number] = whole[0, :, first : first + sizes[1]].t()
    return values


def _blocks(part: slice, size: int) -> slice:
    """Those that ``part`` touches."""
    return slice(part.start // size, -(-part.stop // size))


def quantized_tensors(formats: Mapping[str, str], quantization: Any) -> dict[str, Quantized]:
    """The tensors that are stored in two, by name. ``formats``: that of each stored tensor;
    ``quantization``: of config.json.

    Raises:
        ValueError: one has no scales; names it.
    """
    found = {}
    method = (quantization or {}).get("quant_method")
    for name, dtype in formats.items():
        if method == "fp8" and dtype == _FP8:
            rows, columns = quantization["weight_block_size"]
            found[name] = Quantized(name, f"{name}_scale_inv", (rows, columns))
        elif method == "mxfp4" and name.endswith("_blocks"):
            tensor = name.removesuffix("_blocks")
            found[tensor] = Quantized(name, f"{tensor}_scales", None)
    for name, each in found.items():
        wanted: Sequence[str] = ("U8",) if each.block is None else _FP8_SCALES
        if formats.get(each.scales) not in wanted:
            raise ValueError(
                f"model.path: the scales of {name}, {each.scales}, are"
                f" {formats.get(each.scales, 'absent')}, not {' or '.join(wanted)}; copy the model"
                " again, or give it before quantization"
            )
    return found
