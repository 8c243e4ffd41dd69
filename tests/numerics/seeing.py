"""Prompts with images for a tiny vision-language model, and what transformers says about them."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
)

from megatron_rl.data.multimodal.masks import MaskedImage
from megatron_rl.types import Image, Prompt, SequenceBatch
from tests import zoo
from tests.numerics.policy_reference import TEMPERATURE, ClippedLoss, sequences
from tests.numerics.rollout_models import DELTA
from tests.tiny_options import EXPERTS
from tests.zoo import IMAGE_TOKEN, tiny_model
from tools.make_toy_vision_model import write_untrained

if TYPE_CHECKING:
    from megatron_rl.policy.megatron_policy import MegatronPolicy
    from megatron_rl.protocols import ImageProcessor

MERGE = 2
PATCH = 14
NUMBERS = 3 * 2 * PATCH * PATCH
BLACK = torch.full((NUMBERS,), -1.5)
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
        if isinstance(image, MaskedImage):
            return image.blackened(self.pixels(image.original), BLACK)
        _, rows, columns = self.grid(image)
        generator = torch.Generator().manual_seed(int(image.digest[:8], 16))
        return torch.randn(rows * columns, NUMBERS, generator=generator)

    def keep(self, images: Iterable[Image]) -> None:
        """Nothing is kept."""

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
    if policy.ranks.data == 1:
        return [[0, 1, 2, 3, 4], [5]]
    return [[0, 1, 3, 4], []] if policy.ranks.data_rank == 0 else [[2], [5]]


def seeing_batch() -> SequenceBatch:
    """Two rows with one image, one with a wide one, two with two images, one without."""
    prompts = [PROMPTS[number] for number in PROMPT_OF_ROW]
    tokens = [
        token
        for (prompt, _), response in zip(prompts, RESPONSES, strict=True)
        for token in [*prompt, *response]
    ]
    return SequenceBatch(
        torch.tensor([len(prompt) for prompt, _ in prompts]),
        torch.tensor([len(response) for response in RESPONSES]),
        torch.tensor(PROMPT_OF_ROW),
        token_ids=torch.tensor(tokens),
        images=tuple(images for _, images in prompts),
    )


def hf_positions(
    hf: Any,
    prompt: Sequence[int],
    length: int,
    images: Sequence[Image],
    processor: ImageProcessor = PROCESSOR,
) -> Tensor:
    """[3, 1, length]: transformers' own, with image tokens in the prompt only."""
    kinds = torch.zeros(1, length, dtype=torch.int)
    kinds[0, : len(prompt)] = (torch.tensor(prompt) == processor.image_token_id).int()
    grids = torch.tensor([processor.grid(each) for each in images]) if images else None
    ids = torch.zeros(1, length, dtype=torch.long)
    positions, _ = hf.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
    return positions


def hf_logits(
    hf: Any,
    tokens: Tensor,
    prompt: int,
    images: Sequence[Image],
    processor: ImageProcessor = PROCESSOR,
) -> Tensor:
    """``[tokens, vocabulary]``, with their graph.

    By the parts of the model, for transformers refuses a response with image tokens.
    """
    states = hf.get_input_embeddings()(tokens[None])
    deep: dict[str, Any] = {}
    if images:
        pixels = torch.cat([processor.pixels(each) for each in images])
        grids = torch.tensor([processor.grid(each) for each in images])
        features = hf.model.visual(pixels, grid_thw=grids)
        places = torch.zeros_like(tokens, dtype=torch.bool)
        places[:prompt] = tokens[:prompt] == processor.image_token_id
        states = states.masked_scatter(places[None, :, None], features.pooler_output)
        if hasattr(features, "deepstack_features"):
            deep = dict(
                visual_pos_masks=places[None], deepstack_visual_embeds=features.deepstack_features
            )
    positions = hf_positions(hf, tokens[:prompt].tolist(), len(tokens), images, processor)
    states = hf.model.language_model(inputs_embeds=states, position_ids=positions, **deep)
    return hf.lm_head(states.last_hidden_state)[0]


@torch.no_grad()
def hf_logprobs(
    hf: Any, prompt: Prompt, response: Sequence[int], processor: ImageProcessor
) -> Tensor:
    """``[tokens of the response]``, at temperature 1."""
    tokens = torch.tensor([*prompt.token_ids, *response])
    first = len(prompt.token_ids)
    logits = hf_logits(hf, tokens, first, prompt.images, processor)[first - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, tokens[first:, None])[:, 0]


def write_model(path: Path, seed: int = 0, family: str = "qwen2_5_vl") -> Any:
    """A directory with random weights with which an image shows in the logprobs."""
    options = argparse.Namespace(seed=seed, layers=2, hidden=128, tower_hidden=32)
    write_untrained(path, ["What is it?"], options)
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    model = model.eval()
    if family != "qwen2_5_vl":
        model = with_deep_tower(path, model.config, family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "visual" not in name and "conv1d" not in name:
                parameter.normal_(0.0, 0.06)
    zoo.save(model, path)
    return model


def with_deep_tower(path: Path, config: Any, family: str = "qwen3_vl") -> Any:
    """A Qwen3-VL or 3.5 with the sizes of the Qwen2.5-VL of ``path``, in its place."""
    kind = f"{family.removesuffix('_vl')}_text" if family in zoo.LINEAR else f"{family}_text"
    text = config.text_config.to_dict() | dict(model_type=kind, head_dim=32)
    if "moe" in family:  # an engine of two ranks on CPUs takes no narrower experts
        text |= EXPERTS | dict(moe_intermediate_size=64)
    text["rope_parameters"] |= dict(mrope_interleaved=True)
    tower = zoo.DEEP_TOWER
    if family in zoo.LINEAR:
        rope = zoo.TURNS | dict(mrope_section=[4, 2, 2])
        text |= DELTA | dict(
            tie_word_embeddings=True, shared_expert_intermediate_size=64, rope_parameters=rope
        )
        tower = zoo.SQUARE_TOWER
    tower = tower | dict(out_hidden_size=text["hidden_size"])
    ids = {key: getattr(config, key) for key in zoo.SPECIAL_IDS}
    file = path / "preprocessor_config.json"
    file.write_text(file.read_text().replace("Qwen2_5_VLProcessor", "Qwen3VLProcessor"))
    torch.manual_seed(0)
    model = zoo.deep_model(family, text, tower, tie_word_embeddings=True, dtype="float32", **ids)
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
    zoo.save(model, path)
    return model


def published_name(name: str, model: str = "qwen2_5_vl") -> str:
    """Of a tensor, from its name in transformers."""
    if model.startswith("qwen3"):
        return name
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def seeing_reference(model: str, layers: int | None) -> dict[str, Any]:
    """Logits, scores, loss and gradients by transformers and torch."""
    hf = tiny_model(model, layers=layers)
    found = seeing_differentiated(hf)
    # Files have the matrices of experts in the other order of axes.
    gradients = {
        published_name(key, model): each.grad.transpose(1, 2)
        if model == "qwen3_vl_moe" and each.dim() == 3
        else each.grad
        for key, each in hf.named_parameters()
    }
    return found | dict(gradients=gradients)


def seeing_differentiated(hf: Any) -> dict[str, Any]:
    """Logits, scores and loss of a model, whose parameters get their gradients."""
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
        settings=dict(image_processor=PROCESSOR),
    )
