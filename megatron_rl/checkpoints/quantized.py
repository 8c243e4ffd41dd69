"""Tensors that a HF directory stores in few bits, read as the float32 numbers that they stand for.

``NAME.weight`` in FP8 has a scale for each block of rows and columns in ``NAME.weight_scale_inv``
(DeepSeek-V3). ``NAME_blocks`` is the transpose of the tensor NAME, with two numbers of MXFP4 in a
byte, and ``NAME_scales`` has the exponent of each 32 of them (experts of GPT-OSS).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MXFP4_BLOCK = 32
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat([_E2M1, -_E2M1])  # the fourth bit is the sign
_BIAS = 127  # of an exponent


@dataclass(frozen=True)
class Quantized:
    """A tensor that is stored in two. ``block``: rows and columns of a scale; None: MXFP4."""

    numbers: str
    scales: str
    block: tuple[int, int] | None


@dataclass(frozen=True)
class QuantizedSlice:
    """Such a tensor as safetensors gives others: its shape, and parts of it, which are read alone.
    ``numbers``, ``scales``: slices of the stored ones."""

    tensor: Quantized
    numbers: Any
    scales: Any

    def get_shape(self) -> tuple[int, ...]:
        """Raises ValueError: there is not one scale for each block."""
        shape = tuple(self.numbers.get_shape())
        wanted = shape[:-1]
        if self.tensor.block is None:
            shape = (shape[0], shape[2] * MXFP4_BLOCK, shape[1])
        else:
            wanted = tuple(-(-length // size) for length, size in zip(shape, self.tensor.block))
        if (found := tuple(self.scales.get_shape())) != wanted:
            raise ValueError(
                f"model.path: {self.tensor.scales} has shape {found}, but {self.tensor.numbers}"
                f" needs {wanted}; check quantization_config against the weights"
            )
        return shape

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        if self.tensor.block is None:
            return _from_mxfp4(self.numbers, self.scales, *index)
        blocks = tuple(map(_blocks, index, self.tensor.block))
        of_block = self.scales[blocks].float()
        for axis, (part, size, block) in enumerate(zip(index, self.tensor.block, blocks)):
            places = torch.arange(part.start, part.stop) // size - block.start
            of_block = of_block.index_select(axis, places)
        return self.numbers[index].float().mul_(of_block)


def _from_mxfp4(numbers: Any, scales: Any, experts: slice, rows: slice, columns: slice) -> Tensor:
    groups = _blocks(rows, MXFP4_BLOCK)
    first = rows.start - groups.start * MXFP4_BLOCK
    sizes = [part.stop - part.start for part in (experts, rows, columns)]
    values = torch.empty(sizes)
    for number in range(sizes[0]):  # the bytes of one expert at a time
        at = (slice(experts.start + number, experts.start + number + 1), columns, groups)
        exponents = scales[at].int() - _BIAS
        pairs = torch.stack([numbers[at] & 15, numbers[at] >> 4], dim=-1).flatten(-2)
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
        if method == "fp8" and dtype == "F8_E4M3":
            rows, columns = quantization["weight_block_size"]
            found[name] = Quantized(name, f"{name}_scale_inv", (rows, columns))
        elif method == "mxfp4" and dtype == "U8" and name.endswith("_blocks"):
            tensor = name.removesuffix("_blocks")
            found[tensor] = Quantized(name, f"{tensor}_scales", None)
    for name, each in found.items():
        dtype = formats.get(each.scales, "absent")
        if dtype not in (("U8",) if each.block is None else ("F32", "BF16")):
            raise ValueError(
                f"model.path: the scales of {name}, {each.scales}, are {dtype}; copy the model"
                " again, or give it before quantization"
            )
    return found
