"""A minibatch on disk, with all that its loss and gradient depend on; tools/replay_step.py computes
them again.

``run_dir/nonfinite/step_NNNNNN``: ``batch.safetensors`` (tokens, lengths, logprobs, rewards,
credit), ``bundle.json`` (rows, micro-batches, what the run saw), ``config.json``,
``random_states.pt`` (one a rank), ``weights/`` (a HF directory: the policy's weights when the
minibatch came), and ``images/``, the files of images by digest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.config.load import validate
from megatron_rl.config.schema import Config
from megatron_rl.data.sequences import response_tokens, sequence_batch
from megatron_rl.data.token_rows import TokenRows
from megatron_rl.loss import Credit
from megatron_rl.passes import LocalBatch, TokenScores, UpdateResult
from megatron_rl.protocols import BatchSharding
from megatron_rl.rollouts.rows.annealed import policy_temperatures
from megatron_rl.rollouts.rows.exchange import gathered_on_main
from megatron_rl.rollouts.rows.experience import Experience, Responses
from megatron_rl.runtime import random_state
from megatron_rl.runtime.launch import World
from megatron_rl.trainer.health import Minibatch
from megatron_rl.types import Image, SequenceBatch, SequenceLengths

BATCH = "batch.safetensors"
FACTS = "bundle.json"
CONFIG = "config.json"
RANDOM = "random_states.pt"
WEIGHTS = "weights"
IMAGES = "images"
# What signals have given stands under these names in the tensors.
COLUMN = "column."
TOKEN_COLUMN = "token_column."


class BundledPolicy(Protocol):
    """What a bundle asks of the policy."""

    @property
    def batching(self) -> BatchSharding: ...

    def export(self, path: Path) -> None:
        """See protocols.Policy."""


@dataclass(frozen=True)
class Bundle:
    """What ``read_bundle`` finds. ``experience``: as it was scored, without responses. ``splits``:
    the micro-batches of every data-parallel rank. ``loss`` and ``grad_norm``: those of the run;
    None where the bundle was written before the update."""

    config: Config
    step: int
    number: int
    world_size: int
    experience: Experience
    rows: list[int]
    splits: list[list[list[int]]]
    uids: list[str]
    loss: float | None
    grad_norm: float | None

    @property
    def credit(self) -> Credit:
        assert self.experience.credit is not None
        return self.experience.credit


def write_bundle(
    config: Config,
    world: World,
    policy: BundledPolicy,
    minibatch: Minibatch,
    result: UpdateResult | None,
) -> Path:
    """Collective: writes the bundle of ``minibatch`` with the weights as they are now; returns its
    folder."""
    path = Path(config.run_dir) / "nonfinite" / f"step_{minibatch.step:06d}"
    experience = minibatch.experience
    splits = policy.batching.plan(experience.sequences, minibatch.rows)
    tokens = gathered_on_main(experience.scored_tokens, experience.responses, world)
    states = world.all_gather(random_state.capture())

    def write() -> None:
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        facts = _facts(minibatch, result, world.size, splits)
        (path / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="ascii")
        values = json.dumps(config.model_dump(mode="json"), indent=1)
        (path / CONFIG).write_text(values + "\n", encoding="utf-8")
        torch.save(states, path / RANDOM)
        save_file(_tensors(experience, tokens), path / BATCH)
        _write_images(path / IMAGES, [prompt.images for prompt in experience.responses.prompts])

    world.from_main(write)
    policy.export(path / WEIGHTS)
    return path


def _facts(
    minibatch: Minibatch,
    result: UpdateResult | None,
    world_size: int,
    splits: Sequence[Sequence[Sequence[int]]],
) -> dict[str, Any]:
    return {
        "step": minibatch.step,
        "minibatch": minibatch.number,
        "world_size": world_size,
        "rows": list(minibatch.rows),
        "splits": splits,
        "uids": [prompt.uid for prompt in minibatch.experience.responses.prompts],
        "images": [_described(prompt.images) for prompt in minibatch.experience.responses.prompts],
        "loss": None if result is None else repr(result.loss),  # "nan" and "inf" are not JSON
        "grad_norm": None if result is None else repr(result.grad_norm),
    }


def _tensors(experience: Experience, tokens: TokenRows) -> dict[str, Tensor]:
    """``tokens``: all of them."""
    prompts = [prompt.token_ids for prompt in experience.responses.prompts]
    sequences = sequence_batch(
        list(zip(prompts, tokens.views("token_ids"), strict=True)), experience.group_ids
    )
    credit = experience.credit
    assert credit is not None
    of_tokens = {
        (TOKEN_COLUMN if name in experience.token_columns else "") + name: torch.from_numpy(values)
        for name, values in tokens.columns.items()
        if name != "token_ids"
    }
    tensors = {
        "token_ids": sequences.token_ids,
        "prompt_lengths": sequences.prompt_lengths,
        "response_lengths": sequences.response_lengths,
        "prompt_index": sequences.prompt_index,
        "group_ids": experience.group_ids,
        "rewards": experience.rewards,
        "correct": experience.correct,
        "truncated": experience.truncated,
        **of_tokens,
        **{COLUMN + name: values for name, values in experience.columns.items()},
        "advantages": credit.advantages,
        "kl_weights": credit.kl_weights,
        "keep": credit.keep,
        "temperatures": policy_temperatures(experience.annealing, experience.responses.lengths),
        "num_sampled": experience.num_sampled,
        "weight_versions": torch.from_numpy(experience.responses.weight_versions),
    }
    # A copy each: safetensors refuses tensors that share memory.
    return {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in tensors.items()
        if tensor is not None
    }


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
    return Bundle(
        config=validate(Config, values, str(path / CONFIG)),
        step=facts["step"],
        number=facts["minibatch"],
        world_size=facts["world_size"],
        experience=_restored(load_file(path / BATCH), _read_images(path, facts), facts["step"]),
        rows=facts["rows"],
        splits=facts["splits"],
        uids=facts["uids"],
        loss=None if facts["loss"] is None else float(facts["loss"]),
        grad_norm=None if facts["grad_norm"] is None else float(facts["grad_norm"]),
    )


def _described(images: Sequence[Image]) -> list[tuple[str, int, int]]:
    """What ``_read_images`` needs beside the files."""
    return [(image.digest, image.width, image.height) for image in images]


def _write_images(folder: Path, rows: Sequence[tuple[Image, ...]]) -> None:
    """The file of each image, once."""
    for images in rows:
        for image in images:
            file = folder / image.digest
            if not file.exists():
                folder.mkdir(exist_ok=True)
                file.write_bytes(image.read())


def _read_images(path: Path, facts: dict[str, Any]) -> tuple[tuple[Image, ...], ...] | None:
    """The inverse; bundles without images may lack the key."""
    rows = facts.get("images") or ()
    if not any(rows):
        return None
    return tuple(
        tuple(Image(digest, *size, source=path / IMAGES / digest) for digest, *size in row)
        for row in rows
    )


def _restored(
    tensors: dict[str, Tensor], images: tuple[tuple[Image, ...], ...] | None, step: int
) -> Experience:
    """On every rank with the tokens of all rows; ``splits`` says which micro-batches its ``local``
    has."""
    sequences = SequenceBatch(
        tensors["token_ids"],
        tensors["prompt_lengths"],
        tensors["response_lengths"],
        tensors.get("prompt_index"),
        images,
        tensors.get("temperatures"),
    )
    num_rows = sequences.num_responses
    lengths = sequences.response_lengths.numpy()
    columns = {
        "token_ids": response_tokens(sequences).numpy(),
        "sampler_logprobs": tensors["sampler_logprobs"].numpy(),
    }
    if "sampled" in tensors:
        columns["sampled"] = tensors["sampled"].numpy()
    responses = Responses(
        prompts=(),
        group_ids=tensors["group_ids"].numpy(),
        lengths=lengths,
        truncated=tensors["truncated"].numpy(),
        weight_versions=tensors.get("weight_versions", torch.full((num_rows,), -1)).numpy(),
        scores=(),
        tokens=TokenRows(np.arange(num_rows), lengths, columns),
        holders=np.zeros(num_rows, dtype=np.int64),
    )

    def scores(name: str) -> TokenScores | None:
        return TokenScores(tensors[name]) if name in tensors else None

    return Experience(
        responses=responses,
        sequences=SequenceLengths(
            sequences.prompt_lengths, sequences.response_lengths, sequences.prompt_index
        ),
        group_ids=tensors["group_ids"],
        rewards=tensors["rewards"],
        correct=tensors["correct"],
        truncated=tensors["truncated"],
        step=step,
        local=LocalBatch(sequences, [], torch.arange(num_rows)),
        credit=Credit(tensors["advantages"], tensors["kl_weights"], tensors["keep"], {}),
        ref=scores("ref_logprobs"),
        old=scores("old_logprobs"),
        num_sampled=tensors.get("num_sampled"),
        token_columns=_below(TOKEN_COLUMN, tensors),
        columns=_below(COLUMN, tensors),
    )


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): values
        for name, values in tensors.items()
        if name.startswith(prefix)
    }
