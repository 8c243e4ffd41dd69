"""Quantized files are read as the numbers that transformers makes of them, in any part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_rl.checkpoints.hf import HfDirectory, write_config
from megatron_rl.config.model_config import is_read_quantized
from megatron_rl.engine.arguments import engine_arguments
from megatron_rl.types import Shard
from tests.zoo import configured

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 64], "fmt": "e4m3"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
BLOCK = (128, 64)


def folder(path: Path, quantization: dict[str, Any], tensors: dict[str, Tensor]) -> HfDirectory:
    """Scales and numbers are in files of their own."""
    path.mkdir(exist_ok=True)
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors)}
    for name, file in files.items():
        save_file({name: tensors[name]}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (path / "config.json").write_text(
        json.dumps({"dtype": "x", "quantization_config": quantization})
    )
    return HfDirectory(path)


def fp8(rows: int, columns: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    grid = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    return {
        "a.weight": torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.rand(grid, generator=draw) + 0.5,
        "b": torch.ones(3, dtype=torch.bfloat16),
    }


def mxfp4(experts: int, columns: int, groups: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "e.down_proj_blocks": torch.randint(
            0, 256, (experts, columns, groups, 16), generator=draw, dtype=torch.uint8
        ),
        "e.down_proj_scales": torch.randint(
            117, 134, (experts, columns, groups), generator=draw, dtype=torch.uint8
        ),
        "e.down_proj_bias": torch.ones(3, dtype=torch.bfloat16),
    }


def part(files: HfDirectory, name: str, whole: Tensor, *index: slice) -> None:
    shard = Shard(
        name,
        full=tuple(whole.shape),
        start=tuple(each.start for each in index),
        shape=tuple(each.stop - each.start for each in index),
        offset=0,
        stride=(1,) * whole.ndim,
    )
    assert torch.equal(files.read_shard(shard), whole[index])


def test_fp8_has_a_scale_for_each_block(tmp_path: Path) -> None:
    """The last blocks of 300 rows and 100 columns are not whole, which transformers refuses."""
    tensors = fp8(256, 192)
    files = folder(tmp_path, FP8, tensors)
    scales = tensors["a.weight_scale_inv"]
    wanted = Fp8Dequantize(None)._dequantize_one(tensors["a.weight"], scales, torch.float32)
    assert torch.equal(files.read("a.weight"), wanted)
    assert set(files.files) == {"a.weight", "b"} and files.formats["a.weight"] == torch.float32
    assert files.read("b").dtype == torch.bfloat16
    part(files, "a.weight", wanted, slice(100, 200), slice(60, 130))
    uneven = fp8(300, 100)
    scales = uneven["a.weight_scale_inv"]
    by_number = scales.repeat_interleave(128, 0).repeat_interleave(64, 1)[:300, :100]
    files = folder(tmp_path / "uneven", FP8, uneven)
    wanted = uneven["a.weight"].float() * by_number
    assert torch.equal(files.read("a.weight"), wanted)
    part(files, "a.weight", wanted, slice(250, 300), slice(0, 100))


def test_mxfp4_has_two_numbers_in_a_byte(tmp_path: Path) -> None:
    tensors = mxfp4(3, 5, 2)
    blocks, scales = tensors["e.down_proj_blocks"], tensors["e.down_proj_scales"]
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    files = folder(tmp_path, MXFP4, tensors)
    assert set(files.files) == {"e.down_proj", "e.down_proj_bias"}
    assert torch.equal(files.read("e.down_proj"), wanted) and wanted.shape == (3, 64, 5)
    part(files, "e.down_proj", wanted, slice(1, 3), slice(20, 45), slice(2, 4))
    # By hand: byte 0x9A is -1 (0xA), then -0.5 (0x9); exponent 130 is 8.
    byte = {"e.down_proj_blocks": torch.full((1, 1, 1, 16), 0x9A, dtype=torch.uint8)}
    byte["e.down_proj_scales"] = torch.full((1, 1, 1), 130, dtype=torch.uint8)
    by_hand = folder(tmp_path / "hand", MXFP4, byte).read("e.down_proj")
    assert by_hand.flatten().tolist() == [-8.0, -4.0] * 16


@pytest.mark.parametrize(
    ("quantization", "change", "said"),
    [
        (FP8, {"a.weight_scale_inv": None}, "a.weight_scale_inv, are absent"),
        (FP8, {"a.weight_scale_inv": torch.ones(2, 2)}, r"2., but a.weight needs \(2, 3\)"),
        (MXFP4, {}, "tensor a.weight is F8_E4M3, not a float of 16 bits"),
    ],
)
def test_what_does_not_fit_is_refused(
    quantization: dict[str, Any], change: dict[str, Tensor | None], said: str, tmp_path: Path
) -> None:
    tensors = {**fp8(256, 192), **change}
    kept = {name: each for name, each in tensors.items() if each is not None}
    with pytest.raises(ValueError, match=said):
        folder(tmp_path, quantization, kept).read("a.weight")


def test_other_methods_are_not_read() -> None:
    assert is_read_quantized(FP8) and is_read_quantized(MXFP4)
    for other in ({"quant_method": "fp8"}, {"quant_method": "gptq"}, "fp8", {}):
        assert not is_read_quantized(other)


def test_nothing_after_the_policy_is_told_of_quantized_weights(tmp_path: Path) -> None:
    folder(tmp_path, FP8, fp8(4, 4))
    (tmp_path / "b").mkdir()
    write_config(tmp_path, tmp_path / "b", "float32")
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == {"dtype": "float32"}
    rollout = configured(tmp_path).rollout
    arguments = engine_arguments(str(tmp_path), rollout, 0, without_weights=True)
    assert arguments["hf_overrides"]["quantization_config"] is None
    with pytest.raises(ValueError, match="would read the files itself"):
        engine_arguments(str(tmp_path), rollout, 0)
