"""How often a pass encodes an image: responses to one prompt stay together where there are images,
also where each computes its prompt itself (Transformer Engine, context parallel)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.policy.batches.batching import Batching
from megatron_rl.policy.batches.microbatches import Multiples, Packer
from megatron_rl.policy.batches.packing_plan import PlanRule, plan_microbatches
from megatron_rl.policy.batches.work_model import WorkModel
from megatron_rl.policy.passes.vision import VisionBatcher
from megatron_rl.types import Image, SequenceBatch

PROMPTS, RESPONSES, BUDGET = 128, 8, 16_384
IMAGE_TOKEN = 7
WORK = WorkModel(70_454)  # of 7B
PROCESSOR = SimpleNamespace(
    grid=lambda image: (1, image.height, image.width), keep=lambda images: None
)


@pytest.fixture(scope="module")
def batch() -> SequenceBatch:
    """A step of the preset qwen2_5_vl_7b_8gpu: images of 1,024 to 1,280 tokens, 100 of text, and
    responses of 512 on average, the longest 2,048."""
    draw = np.random.default_rng(0)
    images = [
        Image(f"{number:064x}", 64, 2 * int(draw.integers(32, 41)), b"")
        for number in range(PROMPTS)
    ]
    sizes = [image.height * image.width // 4 for image in images]
    responses = np.clip(draw.lognormal(np.log(400), 0.7, PROMPTS * RESPONSES), 1, 2048)
    rows = [
        [IMAGE_TOKEN] * sizes[row // RESPONSES] + [1] * (100 + int(length))
        for row, length in enumerate(responses)
    ]
    return SequenceBatch(
        torch.tensor(sizes).add(100).repeat_interleave(RESPONSES),
        torch.tensor(responses.astype(int)),
        torch.arange(PROMPTS).repeat_interleave(RESPONSES),
        token_ids=torch.tensor([token for row in rows for token in row]),
        images=tuple((image,) for image in images for _ in range(RESPONSES)),
    )


def batching(processor: object, *, share: bool = False) -> Batching:
    vision = VisionBatcher(
        SimpleNamespace(image_token=IMAGE_TOKEN, merge=2), processor, has_tower=True
    )
    device = torch.device("cpu")
    return Batching(
        config=SimpleNamespace(num_moe_experts=None),
        ranks=SimpleNamespace(pipeline=1),
        rule=PlanRule(2, BUDGET, 1, WORK),
        packer=Packer(Multiples(1, 1), 0, 1, device, share=share, vision=vision),
    )


def encodes(made: Batching, batch: SequenceBatch, plan: list[list[list[int]]]) -> list[int]:
    """Images that the tower gets in a pass of each data-parallel rank."""
    passes = [made.packed(batch, microbatches) for microbatches in plan]
    return [
        sum(len(each.packing.images.images) for each in microbatches) for microbatches in passes
    ]


def work_over_mean(batch: SequenceBatch, plan: list[list[list[int]]]) -> float:
    """Of the rank with the most work: its responses, with their prompts."""
    of_rows = WORK.work(batch.lengths.numpy())
    ranks = [sum(int(of_rows[rows].sum()) for rows in rank) for rank in plan]
    return max(ranks) * len(ranks) / sum(ranks)


def test_an_image_is_encoded_about_once_a_pass(batch):
    """Without it about once a response; a prompt is cut where its rows exceed the budget, or a rank
    would wait."""
    made = batching(PROCESSOR)
    rows = range(batch.num_responses)
    plan = made.plan(batch, rows)
    assert sorted(row for rank in plan for rows in rank for row in rows) == list(rows)
    assert max(encodes(made, batch, plan)) <= 70
    assert work_over_mean(batch, plan) < 1.01
    scattered = plan_microbatches(batch.lengths.tolist(), rows, made.rule)
    assert min(encodes(made, batch, scattered)) >= 480
    assert len(plan[0]) <= 1.2 * len(scattered[0])


def test_without_images_rows_stay_scattered(batch):
    """A vision-language model whose prompts are text."""
    rows = range(64)
    plain = plan_microbatches(batch.lengths.tolist(), rows, batching(None).rule)
    assert batching(None).plan(batch, rows) == plain
    assert batching(PROCESSOR).plan(batch, rows) != plain


def test_a_response_is_charged_with_its_prompt_unless_that_is_shared():
    """Two ranks; prompts of 90 and 10 tokens. Shared: 90 + 2 x 10 against 10 + 2 x 50, as even as
    it gets. Each by itself, with images: 90 + 2 x 100 against 10 + 2 x 60 is worse than one row of
    both on each rank, (90 + 100) + (10 + 60)."""
    lengths = SequenceBatch(
        torch.tensor([90, 90, 10, 10]),
        torch.tensor([10, 10, 50, 50]),
        torch.tensor([0, 0, 1, 1]),
        token_ids=torch.zeros(320, dtype=torch.long),
    )
    shared = batching(PROCESSOR, share=True).plan(lengths, range(4))
    assert sorted(rank[0] for rank in shared) == [[0, 1], [2, 3]]
    apart = batching(PROCESSOR).plan(lengths, range(4))
    assert sorted(rank[0] for rank in apart) == [[0, 3], [1, 2]]
