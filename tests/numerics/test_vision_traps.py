"""What goes wrong without a word in a vision-language policy, each with what prevents it (real
megatron-core)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from torch import Tensor

from megatron_rl.passes import LocalBatch
from megatron_rl.policy import model, optimizer
from megatron_rl.policy.batches import microbatches
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.passes import vision
from megatron_rl.types import Image
from tests import zoo
from tests.numerics.policy_reference import ENTROPY, relative_error
from tests.numerics.seeing import (
    PROCESSOR,
    SQUARE,
    WIDE,
    RandomPatches,
    hf_positions,
    rows_of,
    seeing_batch,
    seeing_policy,
    seeing_reference,
)
from tests.ranks import call, on_ranks
from tools.replay.gradients import gathered_gradients

VL = "qwen2_5_vl"
SEQUENCE: dict[str, Any] = dict(tensor=2, sequence=True)
SHARDED: dict[str, Any] = dict(distributed_optimizer=True)
OVERLAP = dict(SHARDED, overlap_grad_reduce=True, overlap_param_gather=True)


def tower_gradients(policy: MegatronPolicy) -> dict[str, Tensor]:
    return {
        name: value.clone()
        for name, value in gathered_gradients(policy)
        if name.startswith("visual.")
    }


def on_both_ranks_alike(policy: MegatronPolicy) -> float:
    """The largest difference between what the two ranks have of the tower's gradient."""
    visual = policy.modules[0].visual
    own = torch.cat([parameter.main_grad.flatten() for parameter in visual.parameters()])
    other = own.clone()
    dist.broadcast(other, src=0)
    gap = (own - other).abs().max()
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return float(gap)


def factor(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """How many times the wanted gradient this is, by projection."""
    dot = sum(float((got[name] * wanted[name]).sum()) for name in got)
    return dot / sum(float(wanted[name].square().sum()) for name in got)


def marked(kind: str) -> Callable[[MegatronPolicy], None]:
    """Megatron then treats the tower's gradient as ``kind`` says."""

    def mark(policy: MegatronPolicy) -> None:
        for parameter in policy.modules[0].visual.parameters():
            parameter.average_gradients_across_tp_domain = kind == "averaged"
            parameter.sequence_parallel = kind == "summed"

    return mark


def own_slice(seeing: Any, token_ids: Tensor, images: vision.PlacedImages | None) -> Tensor:
    """As ``embed``, but each tensor rank puts features into its part of the sequence alone."""
    states = scatter_to_sequence_parallel_region(
        seeing.embedding(input_ids=token_ids, position_ids=None)
    )
    first = len(states) * dist.get_rank()
    here = (images.places >= first) & (images.places < first + len(states))
    features = seeing.visual(images.pixels(slice(None)), grid_thw=images.grids).pooler_output
    rows = features[images.source[here]][:, None]
    return states.index_put((images.places[here] - first,), rows)


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "embed", "times", "apart"),
    [
        ("averaged", vision.embed, 1.0, False),
        ("summed", vision.embed, 2.0, False),
        ("averaged", own_slice, 0.5, False),
        ("left alone", own_slice, None, True),
    ],
)
def test_the_tower_has_the_whole_gradient_once(
    seeing_models: Path, kind: str, embed: Any, times: float | None, apart: bool
) -> None:
    """Under tensor and sequence parallelism; beside it, what other ways of doing it give."""
    wanted = seeing_reference(VL, None)
    policy = seeing_policy(seeing_models / VL, SEQUENCE)
    if kind != "averaged":
        marked(kind)(policy)
    with mock.patch.object(model, "embed", embed):
        policy.backward(LocalBatch(wanted["batch"], [list(range(6))]), wanted["loss"], ENTROPY)
    assert (on_both_ranks_alike(policy) > 1e-3) == apart
    if times is not None:
        found = tower_gradients(policy)
        assert factor(found, wanted["gradients"]) == pytest.approx(times, rel=1e-5)


def test_positions_are_those_of_transformers() -> None:
    """With several images, wide ones, images at both ends, and text behind them."""
    hf = zoo.tiny_model(VL, layers=1)
    batch = seeing_batch()
    for row, images in enumerate(batch.images):
        start = int(batch.offsets[row])
        prompt = batch.token_ids[start : start + int(batch.prompt_lengths[row])]
        length = int(batch.lengths[row]) + 3
        grids = [PROCESSOR.grid(each) for each in images]
        got = vision.rope_positions(prompt == zoo.IMAGE_TOKEN, length, grids, 2)
        assert torch.equal(got, hf_positions(hf, prompt.tolist(), length, images)[:, 0]), row
    example = torch.tensor([False, True, True, False])
    assert vision.rope_positions(example, 4, [(1, 2, 4)], 2).tolist() == [
        [0, 1, 1, 3],
        [0, 1, 1, 3],
        [0, 1, 2, 3],
    ]


def plain_positions(is_image: Tensor, length: int, grids: Any, merge: int) -> Tensor:
    return torch.arange(length).expand(3, -1)


@on_ranks(1)
def test_plain_positions_give_other_logprobs(seeing_models: Path) -> None:
    wanted = seeing_reference(VL, None)
    policy = seeing_policy(seeing_models / VL, {})
    with mock.patch.object(vision, "rope_positions", plain_positions):
        got = policy.score_alone(wanted["batch"]).logprobs
    with_images = slice(0, -3)
    assert float((got - wanted["logprobs"])[with_images].abs().max()) > 1e-3
    assert float((got - wanted["logprobs"])[-3:].abs().max()) <= 5e-6


@on_ranks(1)
def test_angles_of_the_tower_stay_exact_in_bfloat16(seeing_models: Path) -> None:
    """A change of number format rounds the buffers of a module too."""
    policy = seeing_policy(seeing_models / VL, {}, params="bfloat16")
    (chunk,) = policy.modules
    tower = chunk.module.visual
    assert tower.patch_embed.proj.weight.dtype == torch.bfloat16
    wanted = zoo.tiny_model(VL, layers=1).model.visual.rotary_pos_emb.inv_freq
    assert tower.rotary_pos_emb.inv_freq.dtype == torch.float32
    assert torch.equal(tower.rotary_pos_emb.inv_freq, wanted)
    assert not torch.equal(wanted.bfloat16().float(), wanted), "rounding them would not show"


class Counting(RandomPatches):
    """Counts how often pixels are asked for, and knows the images that the last pass has named."""

    def __init__(self) -> None:
        self.asked: list[Image] = []
        self.named: list[Image] = []

    def keep(self, images: Iterable[Image]) -> None:
        self.named = list(images)

    def pixels(self, image: Image) -> Tensor:
        self.asked.append(image)
        return super().pixels(image)


@on_ranks(2)
def test_the_first_stage_alone_has_a_tower_and_asks_for_pixels(seeing_models: Path) -> None:
    processor = Counting()
    policy = zoo.tiny_policy(seeing_models / VL, dict(pipeline=2), image_processor=processor)
    is_first = dist.get_rank() == 0
    assert hasattr(policy.modules[0], "visual") == is_first
    batch = seeing_batch()
    policy.score(LocalBatch(batch, [[0, 1, 2], [3, 4, 5]]))
    assert len(processor.asked) == (4 if is_first else 0), "an image of two rows is encoded once"
    assert {one.digest for one in processor.named} == {one.digest for one in processor.asked}


@on_ranks(2)
def test_an_image_is_encoded_on_one_tensor_rank(seeing_models: Path) -> None:
    """Four of one micro-batch; seven in micro-batches of a row, of which some have the same."""
    processor = Counting()
    policy = zoo.tiny_policy(seeing_models / VL, SEQUENCE, image_processor=processor)
    batch = seeing_batch()
    logprobs = []
    for rows, wanted in (([list(range(6))], 4), ([[row] for row in range(6)], 7)):
        processor.asked.clear()
        logprobs.append(policy.score(LocalBatch(batch, rows)).logprobs)
        own = len(processor.asked)
        total = torch.tensor(own)
        dist.all_reduce(total)
        assert total == wanted > own
    assert float((logprobs[0] - logprobs[1]).abs().max()) <= 5e-6


@on_ranks(2)
@pytest.mark.parametrize("rows", [[[0, 1, 2, 3, 4, 5]], [[row] for row in range(6)]], ids=len)
def test_gradients_of_images_of_other_tensor_ranks(
    seeing_models: Path, rows: list[list[int]]
) -> None:
    wanted = seeing_reference(VL, None)
    policy = seeing_policy(seeing_models / VL, SEQUENCE)
    policy.backward(LocalBatch(wanted["batch"], rows), wanted["loss"], ENTROPY)
    found = tower_gradients(policy)
    visual = {name: value for name, value in wanted["gradients"].items() if is_visual(name)}
    assert relative_error(found, visual) <= 2e-6
    assert on_both_ranks_alike(policy) == 0.0


def test_shares_of_images() -> None:
    """6 + 4 + 24 patches: the middle of the first two lies in the first half. One large image
    leaves a rank of two without any."""
    grids = torch.tensor([[1, 2, 3], [1, 2, 2], [1, 4, 6]])
    assert vision.image_shares(grids, 2) == [slice(0, 2), slice(2, 3)]
    assert vision.image_shares(grids[:1], 2) == [slice(0, 0), slice(0, 1)]
    assert vision.image_shares(grids, 1) == [slice(0, 3)]


@on_ranks(1)
def test_neither_building_nor_passes_consume_random_numbers(seeing_models: Path) -> None:
    before = torch.get_rng_state()
    wanted = seeing_batch()
    seeing_policy(seeing_models / VL, {}).score_alone(wanted)
    assert torch.equal(before, torch.get_rng_state())


# What is given instead of the images of seeing_batch.
OTHER_IMAGES: dict[str, tuple[tuple[Image, ...], ...] | None] = {
    "one for a text": (*seeing_batch().images[:-1], (SQUARE,)),
    "none": ((), *seeing_batch().images[1:]),
    "another": ((WIDE,), *seeing_batch().images[1:]),
    "no images at all": None,
}


@on_ranks(1)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("one for a text", "row 5 has 0 image tokens .* its 1 images take 6"),
        ("none", "row 0 has 6 image tokens .* its 0 images take 0"),
        ("another", "row 0 has 6 image tokens .* its 1 images take 5"),
        ("no images at all", "row 0 has 6 image tokens .* its 0 images take 0"),
    ],
)
def test_images_that_are_not_those_of_the_prompt_are_refused(
    seeing_models: Path, given: str, words: str
) -> None:
    other = replace(seeing_batch(), images=OTHER_IMAGES[given])
    policy = seeing_policy(seeing_models / VL, {})
    with pytest.raises(ValueError, match=words):
        policy.score(LocalBatch(other, [[0, 1, 2], [3, 4, 5]]))


@on_ranks(1)
def test_images_without_a_processor_are_refused(seeing_models: Path) -> None:
    policy = zoo.tiny_policy(seeing_models / VL, {})
    with pytest.raises(ValueError, match="built without an image processor"):
        policy.score_alone(seeing_batch())


def two_updates(path: Path, remedy: bool) -> float:
    """The norm of the second of two updates; the last micro-batch of each rank has no image."""
    wanted = seeing_reference(VL, None)
    policy = seeing_policy(path, dict(overlap_grad_reduce=True))
    nothing = torch.zeros(1, requires_grad=True)
    with mock.patch.object(
        vision, "_black_image", vision._black_image if remedy else lambda tower: nothing
    ):
        for _ in range(2):
            result = policy.update(
                LocalBatch(wanted["batch"], rows_of(policy)), wanted["loss"], ENTROPY
            )
    return result.grad_norm


def test_overlapped_reduction_with_a_last_microbatch_without_images(seeing_models: Path) -> None:
    """It waits for every parameter: without a pass of the tower the second update never ends."""
    norms = call(2, two_updates, seeing_models / VL, remedy=True)
    assert norms[0] == norms[1] > 0
    with pytest.raises((AssertionError, RuntimeError)):
        call(2, two_updates, seeing_models / VL, remedy=False, timeout=60.0)


@on_ranks(2)
@pytest.mark.parametrize("layout", [SEQUENCE, OVERLAP, dict(pipeline=2)], ids=str)
def test_a_frozen_tower_is_in_neither_optimizer_nor_norm(
    seeing_models: Path, layout: dict[str, Any], tmp_path: Path
) -> None:
    wanted = seeing_reference(VL, None)
    batch = wanted["batch"]
    policy = seeing_policy(seeing_models / VL, layout, freeze_vision=True)
    start = {name: value.clone() for name, value in policy.gathered_weights()}
    before = policy.score_alone(batch).logprobs
    assert float((before - wanted["logprobs"]).abs().max()) <= 5e-6
    language = {name: value for name, value in wanted["gradients"].items() if not is_visual(name)}
    if not policy.parallel.distributed_optimizer:
        policy.backward(LocalBatch(batch, rows_of(policy)), wanted["loss"], ENTROPY)
        found = dict(gathered_gradients(policy))
        assert all(not found[name].any() for name in found if is_visual(name))
        learned = {name: found[name] for name in language}
        assert relative_error(learned, language) <= 2e-6
        assert_no_tower(policy)
    result = policy.update(LocalBatch(batch, rows_of(policy)), wanted["loss"], ENTROPY)
    norm = sum(float(value.square().sum()) for value in language.values()) ** 0.5
    assert result.grad_norm == pytest.approx(norm, rel=2e-6)
    after = dict(policy.gathered_weights())
    changed = {name for name in start if not torch.equal(start[name], after[name])}
    assert changed == set(language)
    reference = policy.score_alone(batch, reference=True).logprobs
    assert torch.equal(reference, before)
    now = policy.score_alone(batch).logprobs
    policy.offload(("weights", "gradients", "optimizer"))
    policy.reload()
    assert torch.equal(policy.score_alone(batch).logprobs, now)


def is_visual(name: str) -> bool:
    return name.startswith("visual.")


def assert_no_tower(policy: MegatronPolicy) -> None:
    (part,) = optimizer.parts(policy.optimizer)
    held = sum(parameter.numel() for parameter in part.get_parameters())
    trained = (item for item in policy.held if not is_visual(item.name))
    assert held == sum(item.tensor.numel() for item in trained)


def test_padding_and_dummy_rows_have_plain_positions() -> None:
    """An empty micro-batch of a vision-language model."""
    arch = vision.Vision(
        tensors=(),
        image_token=zoo.IMAGE_TOKEN,
        merge=2,
        patch_numbers=1,
        depth=1,
        hidden_size=1,
        ffn_hidden_size=1,
    )
    batcher = vision.VisionBatcher(arch, PROCESSOR, has_tower=True)
    rule = microbatches.multiples(1, 1, False)
    packer = microbatches.Packer(rule, 0, 1, torch.device("cpu"), vision=batcher)
    packing = packer.pack(seeing_batch(), [], at_least=4).packing
    assert packing.rope_positions.tolist() == [[[0, 1, 2, 3]]] * 3
    assert packing.images is None
