"""The inverse of ``megatron_rl/trainer/bundle.py``: a minibatch off the disk, as it was scored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.config.load import validate
from megatron_rl.config.schema import Config
from megatron_rl.data.token_rows import TokenRows
from megatron_rl.loss import Credit
from megatron_rl.passes import LocalBatch, TokenScores
from megatron_rl.rollouts.rows.experience import Experience, Responses
from megatron_rl.trainer.bundle import (
    BATCH,
    COLUMN,
    CONFIG,
    FACTS,
    IMAGES,
    OF_CREDIT,
    OF_EXPERIENCE,
    OF_SEQUENCES,
    OF_TOKENS,
    TOKEN_COLUMN,
    WEIGHTS,
    BundleFacts,
    Images,
)
from megatron_rl.types import Image, SequenceBatch, Sequences


@dataclass(frozen=True, kw_only=True)
class Bundle(BundleFacts):
    """What ``read_bundle`` finds. ``experience``: as it was scored, without responses."""

    config: Config
    experience: Experience

    @property
    def credit(self) -> Credit:
        assert self.experience.credit is not None
        return self.experience.credit


def response_tokens(batch: SequenceBatch) -> Int[Tensor, " tokens"]:
    """The token ids of all responses, in the response-token layout."""
    # With prompts of 2 and 1 and responses of 1 and 2 tokens, [p p r | p r r]: rows 0 1 1, whose
    # responses begin at 2, 4 and 4, and within them the tokens 0 0 1, so the places are 2 4 5.
    row = batch.response_index
    first = batch.offsets[:-1] + batch.prompt_lengths
    within = torch.arange(len(row)) - batch.response_offsets[row]
    return batch.token_ids[first[row] + within]


def read_bundle(path: Path) -> Bundle:
    """The inverse of ``write_bundle``, but for the weights, whose folder becomes
    ``config.model.path``.

    Raises:
        ValueError: ``path`` is not a whole bundle.
    """
    missing = [name for name in (BATCH, FACTS, CONFIG, WEIGHTS) if not (path / name).exists()]
    if missing:
        raise ValueError(
            f"{path}: no {', '.join(missing)} in it; give a folder run_dir/nonfinite/step_NNNNNN,"
            " or a run_dir with --step N"
        )
    facts = json.loads((path / FACTS).read_text(encoding="ascii"))
    values = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    values["model"]["path"] = str(path / WEIGHTS)
    images = _read_images(path / IMAGES, facts["images"])
    return Bundle(
        **facts,
        config=validate(Config, values, str(path / CONFIG)),
        experience=_restored(load_file(path / BATCH), images, facts["step"]),
    )


def _read_images(folder: Path, rows: Images) -> tuple[tuple[Image, ...], ...] | None:
    """The inverse; None where no row has any."""
    if not any(rows):
        return None
    return tuple(
        tuple(Image(digest, *size, source=folder / digest) for digest, *size in row) for row in rows
    )


def _restored(
    tensors: dict[str, Tensor], images: tuple[tuple[Image, ...], ...] | None, step: int
) -> Experience:
    """On every rank with the tokens of all rows; ``splits`` says which micro-batches its ``local``
    has."""

    def some(names: Sequence[str]) -> dict[str, Any]:
        return {name: tensors[name] for name in names if name in tensors}

    def below(prefix: str) -> dict[str, Tensor]:
        names = [name for name in tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): tensors[name] for name in names}

    def scores(name: str) -> TokenScores | None:
        return TokenScores(tensors[name]) if name in tensors else None

    sequences = SequenceBatch(**some(OF_SEQUENCES), images=images)
    num_rows = sequences.num_responses
    lengths = sequences.response_lengths.numpy()
    columns = {name: values.numpy() for name, values in some(OF_TOKENS).items()}
    columns["token_ids"] = response_tokens(sequences).numpy()
    responses = Responses(
        prompts=(),
        group_ids=tensors["group_ids"].numpy(),
        lengths=lengths,
        truncated=tensors["truncated"].numpy(),
        weight_versions=tensors["weight_versions"].numpy(),
        scores=(),
        tokens=TokenRows(np.arange(num_rows), lengths, columns),
        holders=np.zeros(num_rows, dtype=np.int64),
    )
    return Experience(
        **some(OF_EXPERIENCE),
        responses=responses,
        sequences=Sequences(
            sequences.prompt_lengths, sequences.response_lengths, sequences.prompt_index
        ),
        step=step,
        local=LocalBatch(sequences, [], torch.arange(num_rows)),
        credit=Credit(**some(OF_CREDIT), metrics={}),
        ref=scores("ref_logprobs"),
        old=scores("old_logprobs"),
        token_columns=below(TOKEN_COLUMN),
        columns=below(COLUMN),
    )
