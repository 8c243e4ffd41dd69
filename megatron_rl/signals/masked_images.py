"""Responses behind prompts with masked images, for methods that read how likely they are there.

In an update the policy is given a second sequence for each response: the same tokens, other pixels.
To it they are prompts and responses like all, in the micro-batch of the plain ones. What comes back
is taken apart here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megatron_rl.config.schema import Config
from megatron_rl.data.multimodal.masks import masked
from megatron_rl.passes import LocalBatch, TokenScores, TokenView
from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal
from megatron_rl.types import Prompt, SequenceBatch


@register_signal
class MaskedImages(Signal):
    """``masked_logprobs``: of the same tokens, each patch of an image black with probability
    ``mask_ratio``; ``masked``: of the current policy with gradient, or of the old one without."""

    about = "images in prompts, and each response once more behind masked ones"
    token_columns = ("masked_logprobs",)

    def __init__(self, *, mask_ratio: float, masked: Literal["current", "old"], seed: int) -> None:
        self._ratio = mask_ratio
        self._in_update = masked == "current"
        self._seed = seed

    def check(self, prompts: Iterable[Prompt], config: Config) -> None:
        if not any(prompt.images for prompt in prompts):
            raise ValueError(
                f"method {config.method.name} masks the images of prompts, and no prompt of"
                " data.train has one; name their column (data.columns.images), or choose another"
                " method"
            )

    def after_rollout(self, view: StepView) -> Columns:
        if self._in_update:
            return {}
        seed = mask_seed(self._seed, view.experience.step)
        scores = view.score(batch=with_masked_images(view.local, self._ratio, seed))
        return {"masked_logprobs": scores.logprobs}

    def extend(self, batch: LocalBatch, step: int) -> MaskedCopies | None:
        if not self._in_update:
            return None
        return MaskedCopies.of(batch, self._ratio, mask_seed(self._seed, step))


def mask_seed(seed: int, step: int) -> int:
    """The masks of an image differ from step to step, and are the same in all epochs of a step."""
    return hash((seed, step)) % 2**63


def with_masked_images(local: LocalBatch, ratio: float, seed: int) -> LocalBatch:
    """``local`` with a ``MaskedImage`` in place of each image; one without any stays as it is."""
    images = local.batch.images
    if images is None:
        return local
    hidden = {image.digest: masked(image, ratio, seed) for row in images for image in row}
    shown = tuple(tuple(hidden[image.digest] for image in row) for row in images)
    return replace(local, batch=replace(local.batch, images=shown))


def _with_copies(local: LocalBatch, ratio: float, seed: int) -> LocalBatch:
    """``local`` with ``with_masked_images`` behind it: row i has its copy at i + number of rows, in
    the same micro-batch, behind all plain rows."""
    plain = local.batch
    copies = with_masked_images(local, ratio, seed).batch
    num_rows = plain.num_responses
    prompt_index = None
    if plain.prompt_index is not None:
        # A prompt and its copy share no tokens: their images differ.
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
    microbatches = [[*rows, *(row + num_rows for row in rows)] for rows in local.microbatches]
    rows = None if local.rows is None else local.rows.repeat(2)
    return LocalBatch(both, microbatches, rows)


@dataclass(frozen=True)
class MaskedCopies:
    """A batch with its copies behind it. ``num_tokens``: the response tokens without them."""

    batch: LocalBatch
    num_tokens: int

    @classmethod
    def of(cls, local: LocalBatch, ratio: float, seed: int) -> MaskedCopies:
        return cls(_with_copies(local, ratio, seed), int(local.batch.response_lengths.sum()))

    def without(self, scores: TokenScores) -> TokenScores:
        return scores.map(lambda values: values[: self.num_tokens])

    def split(self, view: TokenView) -> tuple[TokenView, Columns]:
        """See ``Extension``: each token gets what its copy has."""
        half = len(view.index) // 2
        assert torch.equal(view.index[half:], view.index[:half] + self.num_tokens), (
            "tokens and their copies lie on different ranks"
        )
        plain = view.select(view.index[:half], lambda values: values[:half])
        columns = {**plain.columns, "masked_logprobs": view.logprobs[half:]}
        return replace(plain, columns=columns), {}
