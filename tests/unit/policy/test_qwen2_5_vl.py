"""Qwen2.5-VL from its configuration: shapes, layouts of names, what is refused. No weights."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

from megatron_rl.checkpoints.facts import num_parameters
from megatron_rl.checkpoints.hf import HfDirectory
from megatron_rl.config.load import compose
from megatron_rl.config.rules.layout_rules import model_problems
from megatron_rl.config.schema import ParallelConfig, PrecisionConfig
from megatron_rl.models import read_architecture
from megatron_rl.models.parameter_map import hf_shapes, model_parameters, vision_parameters
from megatron_rl.models.problems import family_problems
from megatron_rl.types import Shard
from tests.numerics.seeing import published_name
from tests.unit.qwen2_5_vl import CONFIGS, write_config
from tests.zoo import model_config, save_tiny_model

NAME = "Qwen2_5_VLForConditionalGeneration"


@pytest.mark.parametrize(
    ("size", "parameters", "of_tower"),
    [("3B", 3_754_622_976, 668_684_288), ("7B", 8_292_166_656, 676_550_144)],
)
def test_a_published_model_has_the_tensors_of_transformers(
    tmp_path: Path, size: str, parameters: int, of_tower: int
) -> None:
    """``parameters``: half of the bytes that the index of the published bfloat16 files sums up."""
    folder = write_config(tmp_path / size, size)
    arch, _ = read_architecture(folder)
    assert num_parameters(arch, 1) == parameters
    sizes = [torch.Size(shape).numel() for _, shape in arch.vision.tensors]
    assert sum(sizes) == of_tower
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(AutoConfig.from_pretrained(folder))
    wanted = {published_name(name): tuple(t.shape) for name, t in model.named_parameters()}
    found = {}
    for parameter in model_parameters(arch):
        found.update(hf_shapes(parameter, arch))
    assert found == wanted


def test_options_of_the_published_models(tmp_path: Path) -> None:
    small, _ = read_architecture(write_config(tmp_path / "3B", "3B"))
    large, _ = read_architecture(write_config(tmp_path / "7B", "7B"))
    for arch in (small, large):
        assert arch.mrope_section == (16, 24, 24)
        assert (arch.rope_type, arch.rope_theta, arch.qkv_bias) == ("default", 1e6, True)
        assert (arch.vision.image_token, arch.vision.merge) == (151655, 2)
        assert arch.vision.patch_numbers == 3 * 2 * 14 * 14
    assert (small.tied_embeddings, large.tied_embeddings) == (True, False)


@pytest.mark.parametrize(
    ("size", "layout", "fits"),
    [
        ("3B", dict(tensor=2, sequence=True), True),
        ("3B", dict(pipeline=4), True),
        ("3B", dict(tensor=8, sequence=True), True),
        ("7B", dict(tensor=4, sequence=True, pipeline=2, virtual_pipeline=2), True),
        ("7B", dict(tensor=2, context=2), True),
        ("7B", dict(tensor=8), False),  # 28 heads
        ("7B", dict(pipeline=3), False),
    ],
)
def test_layouts_that_the_language_model_allows(
    tmp_path: Path, size: str, layout: dict[str, Any], fits: bool
) -> None:
    arch, _ = read_architecture(write_config(tmp_path / size, size))
    parallel = ParallelConfig(**(compose("parallel/single") | layout))
    assert (list(model_problems(arch, parallel)) == []) == fits


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        (None, "use_sliding_window", True, "use_sliding_window is True"),
        (None, "rope_scaling", {"type": "mrope", "mrope_section": [16, 24]}, "mrope_section is"),
        (None, "rope_scaling", None, "mrope_section is"),
        ("vision_config", "hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("vision_config", "out_hidden_size", 2048, "out_hidden_size is 2048, but hidden_size is"),
    ],
)
def test_what_the_policy_lacks_is_refused_by_name(
    tmp_path: Path, section: str | None, key: str, value: Any, named: str
) -> None:
    values = copy.deepcopy(CONFIGS["7B"])
    (values if section is None else values[section])[key] = value
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=named):
        read_architecture(folder)


def test_settings_that_do_not_suit_a_tower(tmp_path: Path) -> None:
    seeing, _ = read_architecture(write_config(tmp_path / "3B", "3B"))
    frozen = model_config(Path("m"), freeze_vision=True)
    plain = PrecisionConfig(**compose("precision/bf16"))
    fp8 = PrecisionConfig(**compose("precision/fp8_tensorwise"))
    alone = ParallelConfig(**compose("parallel/single"))
    assert family_problems(seeing, frozen, alone, plain) == []
    (problem,) = family_problems(seeing, frozen, alone, fp8)
    assert problem.startswith("precision.fp8.recipe = tensorwise: ")
    (problem,) = family_problems(replace(seeing, vision=None), frozen, alone, fp8)
    assert problem.startswith("model.freeze_vision = True: ")


def newer_name(name: str) -> str:
    """Of a published tensor in the layout of transformers' own modules."""
    if name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1) if "model." in name else name


def test_both_layouts_of_names_are_read(tmp_path: Path) -> None:
    older = save_tiny_model("qwen2_5_vl", tmp_path / "older", layers=1)
    arch, _ = read_architecture(older)
    tensors = load_file(older / "model.safetensors")
    newer = tmp_path / "newer"
    newer.mkdir()
    renamed = {newer_name(name): tensor for name, tensor in tensors.items()}
    assert "model.visual.merger.ln_q.weight" in renamed
    assert "model.language_model.norm.weight" in renamed
    save_file(renamed, newer / "model.safetensors")
    directory = HfDirectory(newer, arch.prefixes)
    directory.check(arch)
    for name, tensor in tensors.items():
        assert torch.equal(directory.read(name), tensor), name
        whole = Shard(name, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape), 0, ())
        assert torch.equal(directory.read_shard(whole), tensor), name
    with pytest.raises(ValueError, match="does not fit qwen2_5_vl"):
        HfDirectory(newer).check(arch)
    name = "visual.merger.ln_q.weight"
    save_file(renamed | {name: tensors[name].clone()}, newer / "model.safetensors")
    with pytest.raises(ValueError, match=f"holds both .*{name}"):
        HfDirectory(newer, arch.prefixes)


def test_every_tensor_of_the_tower_is_whole(tmp_path: Path) -> None:
    arch, _ = read_architecture(write_config(tmp_path / "7B", "7B"))
    parameters = vision_parameters(arch)
    assert len(parameters) == 1 + 32 * 12 + 5
    assert {parameter.slot.kind for parameter in parameters} == {"whole"}
