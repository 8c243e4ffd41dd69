"""The memory of a vision-language policy, by hand, and measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_rl.models import FAMILIES, read_architecture
from megatron_rl.planning.memory import live_first_chunks
from megatron_rl.planning.parameter_counts import engine_parameters
from megatron_rl.policy.activations import tower_activations, tower_block
from megatron_rl.policy.passes.vision import set_tower_angles
from tests.unit.planning_of_7b import LOAD, engine_settings, parallel, plan
from tests.unit.qwen2_5_vl import write_config
from tests.zoo import seeing_config

TOWER = 676_550_144
LANGUAGE = 7_615_616_512
TOKENS = LOAD.tokens_per_microbatch
PIXELS = 4 * TOKENS * 4 * 1176  # four patches of 1176 float32 numbers a token


@pytest.fixture(scope="module")
def qwen2_5_vl(tmp_path_factory: pytest.TempPathFactory):
    return read_architecture(write_config(tmp_path_factory.mktemp("7b") / "model", "7B"))[0]


def test_the_first_stage_has_the_tower_whole(qwen2_5_vl) -> None:
    first, second = plan(dict(pipeline=2, tensor=4), arch=qwen2_5_vl)
    blind = replace(qwen2_5_vl, vision=None)
    without, other = plan(dict(pipeline=2, tensor=4), arch=blind)
    assert first.weights - without.weights == 2 * TOWER
    assert first.gradients - without.gradients == 4 * TOWER
    assert first.optimizer - without.optimizer == 12 * TOWER
    # Two micro-batches are in flight in the first stage.
    kept = tower_activations(qwen2_5_vl.vision, parallel(), 2 * TOKENS, 2, frozen=False)
    assert first.activations - without.activations == PIXELS + kept
    assert (second.weights, second.activations) == (other.weights, other.activations)


def test_a_frozen_tower_has_weights_only(qwen2_5_vl) -> None:
    frozen = replace(LOAD, freeze_vision=True, keep_reference=True)
    (stage,) = plan({}, frozen, arch=qwen2_5_vl)
    (blind,) = plan({}, frozen, arch=replace(qwen2_5_vl, vision=None))
    assert stage.weights - blind.weights == 2 * TOWER
    for name in ("gradients", "optimizer", "reference"):
        assert getattr(stage, name) == getattr(blind, name), name
    assert stage.checkpoint_copy - blind.checkpoint_copy == 2 * TOWER // frozen.world_size
    block = tower_block(qwen2_5_vl.vision, TOKENS, 2)
    assert stage.activations - blind.activations == PIXELS + block


def test_recomputation_keeps_the_input_of_each_block(qwen2_5_vl) -> None:
    # 4000 patches in 2 bytes: 32 inputs of 1280, pixels of 1176, six widths of the merger.
    tower = qwen2_5_vl.vision
    full = tower_activations(tower, parallel(recompute="full"), 1000, 2, frozen=False)
    assert full == 4000 * 2 * (32 * 1280 + 1176 + 6 * 1280)
    assert tower_block(tower, 1000, 2) == 4000 * (2 * 1280 * 4 + (11 * 1280 + 4 * 3420) * 2)


@pytest.mark.parametrize(("layout", "live"), [({}, 1), (dict(pipeline=4), 4)])
def test_micro_batches_in_the_first_chunk(layout, live: int) -> None:
    assert live_first_chunks(parallel(**layout)) == live


def test_interleaved_chunks_ahead() -> None:
    # Two stages, two chunks: 2 x 1 + 1 x 2 + 1 chunks in the order 0 0 1 1 0.
    assert live_first_chunks(parallel(pipeline=2, virtual_pipeline=2)) == 3


def test_the_engine_cuts_the_matrices_of_the_tower(qwen2_5_vl) -> None:
    def engine_counts(arch, rollout) -> int:
        return sum(numbers * tensors for _, numbers, tensors in engine_parameters(arch, rollout))

    one = engine_counts(qwen2_5_vl, engine_settings(tensor=1))
    assert one == TOWER + LANGUAGE
    two = engine_counts(qwen2_5_vl, engine_settings(tensor=2))
    without = replace(qwen2_5_vl, vision=None)
    of_tower = two - engine_counts(without, engine_settings(tensor=2))
    # 32 blocks of 4 x 1280^2 + 3 x 1280 x 3420, and the merger: 5120^2 + 5120 x 3584.
    matrices = 32 * (4 * 1280**2 + 3 * 1280 * 3420) + 5120 * (5120 + 3584)
    assert of_tower == TOWER - matrices // 2


def saved_bytes(tower: torch.nn.Module, patches: Tensor, grid: Tensor) -> int:
    """What autograd keeps of a forward, beside the parameters."""
    parameters = {each.untyped_storage()._cdata for each in tower.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tower(patches, grid_thw=grid)
    storages = (kept[key].untyped_storage() for key in kept.keys() - parameters)
    return sum(storage.nbytes() for storage in storages)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_counted_is_what_autograd_keeps(
    tmp_path: Path, recompute: str, dtype: torch.dtype
) -> None:
    text = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    text |= dict(num_attention_heads=4, num_key_value_heads=2)
    text |= dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3]))
    config = seeing_config(text)
    config.vision_config.update(dict(hidden_size=256, intermediate_size=512, depth=4))
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    arch, hf = read_architecture(tmp_path)
    tower = FAMILIES[config.architectures[0]].tower(hf).to(dtype)
    set_tower_angles(tower)
    if recompute == "full":
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    patches = torch.randn(256, 1176)
    measured = saved_bytes(tower, patches, torch.tensor([[1, 16, 16]]))
    layout = parallel(recompute=recompute)
    counted = tower_activations(arch.vision, layout, 64, dtype.itemsize, frozen=False)
    assert measured == pytest.approx(counted, rel=0.12)
