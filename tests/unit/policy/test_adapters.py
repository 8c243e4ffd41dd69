"""Adapters by hand: names and shapes, merging, peft's folder, what is refused, what is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoints import facts, peft_format
from megatron_rl.config.load import compose
from megatron_rl.config.schema import PrecisionConfig
from megatron_rl.models import Architecture, read_architecture
from megatron_rl.models.adapters import with_adapters
from megatron_rl.models.base import Slot
from megatron_rl.models.problems import adapter_problems
from megatron_rl.planning.parameter_counts import is_trained, stage_counts
from megatron_rl.policy.adapters import Adapter, Host, random_a
from tests.numerics.policy_cases import parallel
from tests.zoo import SMALL, model_config
from tools.plan_sync import PRESETS

MODEL = partial(model_config, Path("m"))


def architecture(folder: Path, preset: str = "7b", **sizes: int) -> Architecture:
    (folder / "config.json").write_text(json.dumps(PRESETS[preset] | sizes))
    return read_architecture(folder)[0]


@pytest.fixture
def small(tmp_path: Path) -> Architecture:
    """Hidden size 64, feed-forward part 96, 4 heads of 16, 2 key-value heads, 2 layers."""
    arch = architecture(tmp_path, **{key: SMALL[key] for key in SMALL if key.startswith("num_")})
    sizes = dict(hidden_size=64, ffn_hidden_size=96, num_heads=4, num_kv_heads=2, head_dim=16)
    return replace(arch, **sizes, num_layers=2)


def adapter(kind: Any, numbers: dict[str, list[float]], scale: float, groups: int = 1) -> Adapter:
    """Rank 1, one input: A is 1, B is ``numbers``."""
    slots = []
    for name in numbers:
        slots += [Slot(f"m.{name}_a", "whole", ()), Slot(f"m.{name}_b", "rows", ())]
    sizes = [size for values in numbers.values() for size in ((1, 1), (len(values), 1))]
    made = Adapter(slots, sizes, Host(kind, groups, 0, None, False), scale)
    with torch.no_grad():
        for (a, b), values in zip(made.pairs, numbers.values(), strict=True):
            a.fill_(1.0)
            b[:, 0] = torch.tensor(values)
    return made


def test_each_projection_has_an_a_and_a_b(small: Architecture) -> None:
    lora = MODEL(lora={"rank": 3, "targets": ["attention"]}).lora
    shapes = peft_format.adapter_shapes(with_adapters(small, lora))
    of_layer = {"q": (64, 64), "k": (64, 32), "v": (64, 32), "o": (64, 64)}
    assert shapes == {
        f"model.layers.{layer}.self_attn.{x}_proj.lora_{part}.weight": shape
        for layer in range(2)
        for x, (inputs, outputs) in of_layer.items()
        for part, shape in (("A", (3, inputs)), ("B", (outputs, 3)))
    }
    kinds = {slot.megatron: slot.kind for slot in with_adapters(small, lora).adapter_slots}
    module = "self_attention.linear_qkv_adapter"
    assert (kinds[f"{module}.k_proj_a"], kinds[f"{module}.k_proj_b"]) == ("whole", "rows")
    module = "self_attention.linear_proj_adapter"
    assert (kinds[f"{module}.o_proj_a"], kinds[f"{module}.o_proj_b"]) == ("columns", "whole")


def test_merging_keeps_each_query_group_together() -> None:
    numbers = {"q_proj": [1.0, 2, 3, 4], "k_proj": [5.0, 6], "v_proj": [7.0, 8]}
    weight = torch.full((8, 1), 100.0)
    merged = adapter("qkv", numbers, 2.0, groups=2).merged(weight)
    assert merged[:, 0].tolist() == [102, 104, 110, 114, 106, 108, 112, 116]
    assert weight.eq(100).all() and merged.is_contiguous()


def test_merging_rounds_once() -> None:
    """In bfloat16 1 + 2**-8 is a tie, which goes to 1; 2**-16 more decides it."""
    small = adapter("columns", {"o_proj": [2.0**-8 + 2.0**-16]}, 1.0)
    merged = small.merged(torch.ones(1, 1, dtype=torch.bfloat16))
    assert merged.dtype == torch.bfloat16 and merged.item() == 1 + 2.0**-7


def test_switched_off_nothing_is_added() -> None:
    one = adapter("gate_up", {"gate_proj": [1.0], "up_proj": [2.0]}, 3.0)
    one.enabled = False
    outputs = torch.ones(2, 2)
    assert one(torch.ones(2, 1), outputs) is outputs


def test_a_is_drawn_by_its_name_alone() -> None:
    one = random_a("x", (4, 16))
    assert torch.equal(one, random_a("x", (4, 16))) and not torch.equal(one, random_a("y", (4, 16)))
    assert one.abs().max() <= 1 / 4 and one.std() > 0.1  # of a uniform number: 1/4 / sqrt(3)


def test_scales() -> None:
    assert MODEL(lora={"rank": 16, "alpha": 32}).lora.scale == 2
    assert MODEL(lora={"rank": 16, "alpha": 32, "rslora": True}).lora.scale == 8


@pytest.mark.parametrize(
    ("change", "layout", "lora", "number_format", "says"),
    [
        ({"num_experts": 4}, {}, {"rank": 4}, "bf16", "experts"),
        ({}, {}, {"rank": 4}, "fp8_tensorwise", "FP8"),
        ({}, {"tensor": 4}, {"rank": 4}, "bf16", "parallel.tensor = 4 to a divisor of 2"),
        ({}, {}, {"path": "x"}, "bf16", "model.lora.path = x"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(
    small: Architecture, change: Any, layout: Any, lora: Any, number_format: str, says: str
) -> None:
    precision = PrecisionConfig(**compose(f"precision/{number_format}"))
    problems = adapter_problems(
        replace(small, **change), MODEL(lora=lora), parallel(**layout), precision
    )
    assert len(problems) == 1 and says in problems[0]
    mlp, attention = (MODEL(lora={"rank": 4, "targets": [each]}) for each in ("mlp", "attention"))
    plain = PrecisionConfig(**compose("precision/bf16"))
    assert not adapter_problems(small, mlp, parallel(tensor=4), plain)
    assert not adapter_problems(replace(small, num_experts=4), attention, parallel(), plain)


def changed_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / peft_format.CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def changed_tensor(folder: Path, values: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    tensors = load_file(folder / peft_format.WEIGHTS)
    name = next(iter(tensors))
    found = values(tensors.pop(name))
    save_file(tensors | ({name: found} if found is not None else {}), folder / peft_format.WEIGHTS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed_config(r=8), "r is 8, not 4"),
        (changed_config(lora_alpha=1), "lora_alpha is 1, not 32"),
        (changed_config(use_rslora=True), "use_rslora is True, not False"),
        (changed_config(use_dora=True), "use_dora is True, which is not implemented"),
        (changed_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (changed_config(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
        (partial(changed_tensor, values=lambda x: None), "1 adapters are missing"),
        (partial(changed_tensor, values=lambda x: x * torch.nan), "not finite"),
        (partial(changed_tensor, values=lambda x: x[:1]), r"has shape \(1, 96\)"),
    ],
)
def test_a_folder_of_other_adapters_is_refused(
    small: Architecture, tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    lora = MODEL(lora={"rank": 4}).lora
    arch = with_adapters(small, lora)
    tensors = {name: torch.ones(shape) for name, shape in peft_format.adapter_shapes(arch).items()}
    folder = tmp_path / "adapter"
    peft_format.write(tensors, arch, MODEL(lora={"rank": 4}), folder)
    peft_format.check(folder, arch, lora)
    config = json.loads((folder / peft_format.CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 32)
    change(folder)
    with pytest.raises(ValueError, match=says):
        peft_format.check(folder, arch, lora)


def test_numbers_of_a_72b_model(tmp_path: Path) -> None:
    """Rank 16 of 80 layers: q and o 8192 + 8192, k and v 8192 + 1024, three of 8192 + 29568."""
    arch = with_adapters(architecture(tmp_path, "72b"), MODEL(lora={"rank": 16}).lora)
    adapters = 80 * 16 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 29568))
    assert facts.num_saved(arch, 1) == adapters == 210_534_400
    which = partial(is_trained, arch=arch, freeze_vision=False)
    (trained,) = stage_counts(arch, parallel(), 1, which)
    (held,) = stage_counts(arch, parallel(), 1)
    assert trained.total == adapters
    assert held.total == facts.num_parameters(arch, 1) + adapters
    # Of two tensor ranks each has half of what is cut, and all of the rest.
    whole = 80 * 16 * (3 * 8192 + 8192 + 2 * 8192 + 8192)  # A of qkv, B of o, A of gate and up, B
    (of_two,) = stage_counts(arch, parallel(tensor=2), 1, which)
    assert of_two.total == whole + (adapters - whole) // 2
