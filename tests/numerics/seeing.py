"""Prompts with images for a tiny model that sees, and what transformers says about them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from megatron_rl.types import Image, SequenceBatch
from tests import zoo
from tests.numerics.policy_reference import TEMPERATURE, ClippedLoss, sequences
from tests.zoo import IMAGE_TOKEN, tiny_model

if TYPE_CHECKING:
    from megatron_rl.policy.megatron_policy import MegatronPolicy

MERGE = 2
PATCH = 14
NUMBERS = 3 * 2 * PATCH * PATCH
START = 3
END = 4


class RandomPatches:
    """An ImageProcessor without files: pixels are drawn from the digest of an image."""

    image_token_id = IMAGE_TOKEN
    patch_size = PATCH
    merge_size = MERGE
    size_limits: ClassVar[dict[str, int]] = {"shortest_edge": 28 * 28, "longest_edge": 280 * 280}

    def grid(self, image: Image) -> tuple[int, int, int]:
        return 1, image.height // PATCH, image.width // PATCH

    def num_tokens(self, image: Image) -> int:
        _, rows, columns = self.grid(image)
        return rows * columns // MERGE**2

    def pixels(self, image: Image) -> Tensor:
        _, rows, columns = self.grid(image)
        generator = torch.Generator().manual_seed(int(image.digest[:8], 16))
        return torch.randn(rows * columns, NUMBERS, generator=generator)

    def collapsed(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        raise NotImplementedError("for engines")


PROCESSOR = RandomPatches()


def image(name: str, rows: int, columns: int) -> Image:
    """An image of so many patches."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    return Image(digest, columns * PATCH, rows * PATCH, source=name.encode())


SQUARE = image("square", 4, 6)
WIDE = image("wide", 2, 10)
SMALL = image("small", 4, 4)
LINE = image("line", 2, 4)


def span(one: Image) -> list[int]:
    return [IMAGE_TOKEN] * PROCESSOR.num_tokens(one)


# Between texts; at the very beginning; two, the second at the very end; none.
PROMPTS: list[tuple[list[int], tuple[Image, ...]]] = [
    ([9, START, *span(SQUARE), END, 30, 31], (SQUARE,)),
    ([*span(WIDE), 11, 12], (WIDE,)),
    ([START, *span(SMALL), END, 40, *span(LINE)], (SMALL, LINE)),
    ([50, 51, 52], ()),
]
PROMPT_OF_ROW = (0, 0, 1, 2, 2, 3)
# A policy does sample image tokens; they stand for no image.
RESPONSES = (
    [60, IMAGE_TOKEN, 61, 62],
    [63, 64],
    [IMAGE_TOKEN],
    [65, 66, 67, 68, IMAGE_TOKEN, 69],
    [70],
    [71, IMAGE_TOKEN, 72],
)


def seeing_policy(path: Path, layout: dict[str, Any], **more: Any) -> MegatronPolicy:
    """See zoo.tiny_policy; it gets the images of this module."""
    return zoo.tiny_policy(path, layout, image_processor=PROCESSOR, **more)


def rows_of(policy: MegatronPolicy) -> list[list[int]]:
    """Two micro-batches of this rank; the last one of every rank is without images."""
    if policy.data_parallel_size == 1:
        return [[0, 1, 2, 3, 4], [5]]
    return [[0, 1, 3, 4], []] if policy.data_parallel_rank == 0 else [[2], [5]]


def seeing_batch() -> SequenceBatch:
    """Two rows with one image, one with a wide one, two with two images, one without."""
    prompts = [PROMPTS[number] for number in PROMPT_OF_ROW]
    tokens = [
        token
        for (prompt, _), response in zip(prompts, RESPONSES, strict=True)
        for token in [*prompt, *response]
    ]
    return SequenceBatch(
        torch.tensor(tokens),
        torch.tensor([len(prompt) for prompt, _ in prompts]),
        torch.tensor([len(response) for response in RESPONSES]),
        torch.tensor(PROMPT_OF_ROW),
        tuple(images for _, images in prompts),
    )


def hf_positions(hf: Any, prompt: Sequence[int], length: int, images: Sequence[Image]) -> Tensor:
    """[3, 1, length]: transformers' own, with image tokens in the prompt only."""
    kinds = torch.zeros(1, length, dtype=torch.int)
    kinds[0, : len(prompt)] = (torch.tensor(prompt) == IMAGE_TOKEN).int()
    grids = torch.tensor([PROCESSOR.grid(each) for each in images]) if images else None
    ids = torch.zeros(1, length, dtype=torch.long)
    positions, _ = hf.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
    return positions


def hf_logits(hf: Any, tokens: Tensor, prompt: int, images: Sequence[Image]) -> Tensor:
    """``[tokens, vocabulary]``, with their graph.

    By the parts of the model, for transformers refuses a response with image tokens.
    """
    states = hf.get_input_embeddings()(tokens[None])
    if images:
        pixels = torch.cat([PROCESSOR.pixels(each) for each in images])
        grids = torch.tensor([PROCESSOR.grid(each) for each in images])
        features = hf.model.visual(pixels, grid_thw=grids).pooler_output
        places = torch.zeros_like(tokens, dtype=torch.bool)
        places[:prompt] = tokens[:prompt] == IMAGE_TOKEN
        states = states.masked_scatter(places[None, :, None], features)
    positions = hf_positions(hf, tokens[:prompt].tolist(), len(tokens), images)
    states = hf.model.language_model(inputs_embeds=states, position_ids=positions)
    return hf.lm_head(states.last_hidden_state)[0]


def published_name(name: str) -> str:
    """Of a tensor, from its name in transformers."""
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def seeing_reference(model: str, layers: int | None) -> dict[str, Any]:
    """Logits, scores, loss and gradients by transformers and torch."""
    hf = tiny_model(model, layers=layers)
    batch = seeing_batch()
    assert batch.images is not None
    rows = zip(sequences(batch), batch.prompt_lengths.tolist(), batch.images, strict=True)
    logits, logprobs, entropies = [], [], []
    for tokens, prompt, images in rows:
        logits.append(hf_logits(hf, tokens, prompt, images))
        scaled = torch.log_softmax(logits[-1][prompt - 1 : -1] / TEMPERATURE, -1)
        logprobs.append(scaled.gather(1, tokens[prompt:, None])[:, 0])
        entropies.append(-(scaled.exp() * scaled).sum(-1))
    loss = ClippedLoss(batch, torch.cat(logprobs))
    count = int(batch.response_lengths.sum())
    value = loss.contribution(
        torch.arange(count), torch.cat(logprobs), torch.cat(entropies), lambda sums: sums
    )
    value.backward()
    return dict(
        batch=batch,
        logits=[each.detach() for each in logits],
        logprobs=torch.cat(logprobs).detach(),
        entropy=torch.cat(entropies).detach(),
        loss=loss,
        value=value.item(),
        gradients={published_name(key): each.grad for key, each in hf.named_parameters()},
        settings=dict(image_processor=PROCESSOR),
    )
