"""Responses seen once more behind prompts with masked images, for methods that ask how likely they
are there.

The policy is given a second sequence for each response: the same tokens, other pixels. To it they
are prompts and responses like all, in the micro-batch of the plain ones. What comes back is taken
apart here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.data.multimodal.masks import masked
from megatron_rl.loss import Method
from megatron_rl.types import Image, Prompt, SequenceBatch, Share, TokenScores, TokenView

OF_TOKENS = ("index", "logprobs", "entropy", "topk_logprobs", "is_argmax", "nucleus_entropy")


def mask_seed(seed: int, step: int) -> int:
    """The masks of an image differ from step to step; those of all epochs of a step are one."""
    return hash((seed, step)) % 2**63


def with_masked_images(share: Share, ratio: float, seed: int) -> Share:
    """``share`` with a ``MaskedImage`` in place of each image; one without any stays as it is."""
    images = share.batch.images
    if images is None:
        return share
    hidden = {image.digest: masked(image, ratio, seed) for row in images for image in row}

    def of_row(row: tuple[Image, ...]) -> tuple[Image, ...]:
        return tuple(hidden[image.digest] for image in row)

    batch = replace(share.batch, images=tuple(map(of_row, images)))
    return Share(batch, share.microbatches)


def with_masked_copies(share: Share, ratio: float, seed: int) -> Share:
    """``share`` with ``with_masked_images`` behind it: row i has its copy at i + number of rows, in
    the same micro-batch, behind all plain rows."""
    plain = share.batch
    copies = with_masked_images(share, ratio, seed).batch
    num_rows = plain.num_responses
    prompt_index = None
    if plain.prompt_index is not None:
        # A prompt and its copy share no tokens: they see other images.
        first = int(plain.prompt_index.max()) + 1 if num_rows else 0
        prompt_index = torch.cat([plain.prompt_index, plain.prompt_index + first])
    images = None
    if plain.images is not None and copies.images is not None:
        images = plain.images + copies.images
    both = SequenceBatch(
        token_ids=plain.token_ids.repeat(2),
        prompt_lengths=plain.prompt_lengths.repeat(2),
        response_lengths=plain.response_lengths.repeat(2),
        prompt_index=prompt_index,
        images=images,
        temperatures=None if plain.temperatures is None else plain.temperatures.repeat(2),
    )
    microbatches = []
    for rows in share.microbatches:
        copied = [row + num_rows for row in rows]
        microbatches.append([*rows, *copied])
    return Share(both, microbatches)


@dataclass(frozen=True)
class MaskedCopies:
    """Of the response tokens of a batch and its copies. ``num_tokens``: without the copies."""

    num_tokens: int

    def without(self, scores: TokenScores) -> TokenScores:
        """Of the responses as they are."""
        entropy = scores.entropy
        kept = None if entropy is None else entropy[: self.num_tokens]
        return TokenScores(scores.logprobs[: self.num_tokens], kept)

    def split(self, view: TokenView) -> tuple[TokenView, TokenView]:
        """The view of the plain batch, and that of the copies, token by token the same."""
        half = len(view.index) // 2
        assert torch.equal(view.index[half:], view.index[:half] + self.num_tokens), (
            "tokens and their copies lie on different ranks"
        )
        plain = _cut(view, slice(0, half))
        copies = _cut(view, slice(half, None))
        return plain, replace(copies, index=copies.index - self.num_tokens)


def _cut(view: TokenView, tokens: slice) -> TokenView:
    cut: dict[str, Any] = {}
    for name in OF_TOKENS:
        values: Tensor | None = getattr(view, name)
        cut[name] = None if values is None else values[tokens]
    return replace(view, **cut)


def check_images(prompts: Iterable[Prompt], method: Method) -> None:
    """Raises ValueError where the method masks images and no prompt has any."""
    if method.needs.mask_ratio is None or any(prompt.images for prompt in prompts):
        return
    raise ValueError(
        f"method {method.name} masks the images of prompts, and no prompt of data.train has one;"
        " name their column (data.columns.images), or choose another method"
    )
