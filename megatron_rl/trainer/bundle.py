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

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.config.load import validate
from megatron_rl.config.schema import Config
from megatron_rl.loss import Credit
from megatron_rl.runtime import random_state
from megatron_rl.runtime.launch import World
from megatron_rl.trainer.experience import Experience
from megatron_rl.trainer.health import Minibatch
from megatron_rl.types import Image, SequenceBatch, TokenScores, UpdateResult

BATCH = "batch.safetensors"
FACTS = "bundle.json"
CONFIG = "config.json"
RANDOM = "random_states.pt"
WEIGHTS = "weights"
IMAGES = "images"


class Microbatches(Protocol):
    """How a policy cuts rows into micro-batches: what a bundle keeps of it."""

    def plan(self, batch: SequenceBatch, rows: Sequence[int]) -> list[list[int]]:
        """Those of this data-parallel rank."""


class BundledPolicy(Protocol):
    """What a bundle asks of the policy."""

    data_parallel_rank: int
    batching: Microbatches

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
    split = policy.batching.plan(minibatch.experience.sequences, minibatch.rows)
    # Tensor, context and pipeline ranks of a data-parallel rank have the same split.
    by_rank = dict(world.all_gather((policy.data_parallel_rank, split)))
    splits = [by_rank[rank] for rank in sorted(by_rank)]
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
        save_file(_tensors(minibatch.experience), path / BATCH)
        _write_images(path / IMAGES, minibatch.experience.sequences)

    world.from_main(write)
    policy.export(path / WEIGHTS)
    return path


def _facts(
    minibatch: Minibatch,
    result: UpdateResult | None,
    world_size: int,
    splits: list[list[list[int]]],
) -> dict[str, Any]:
    return {
        "step": minibatch.step,
        "minibatch": minibatch.number,
        "world_size": world_size,
        "rows": list(minibatch.rows),
        "splits": splits,
        "uids": [response.prompt.uid for response in minibatch.experience.responses],
        "images": [
            [(image.digest, image.width, image.height) for image in images]
            for images in minibatch.experience.sequences.images or ()
        ],
        "loss": None if result is None else repr(result.loss),  # "nan" and "inf" are not JSON
        "grad_norm": None if result is None else repr(result.grad_norm),
    }


def _tensors(experience: Experience) -> dict[str, Tensor]:
    sequences = experience.sequences
    credit = experience.credit
    assert credit is not None
    tensors = {
        "token_ids": sequences.token_ids,
        "prompt_lengths": sequences.prompt_lengths,
        "response_lengths": sequences.response_lengths,
        "prompt_index": sequences.prompt_index,
        "group_ids": experience.group_ids,
        "rewards": experience.rewards,
        "correct": experience.correct,
        "truncated": experience.truncated,
        "sampler_logprobs": experience.sampler_logprobs,
        "old_logprobs": None if experience.old is None else experience.old.logprobs,
        "ref_logprobs": None if experience.ref is None else experience.ref.logprobs,
        "advantages": credit.advantages,
        "kl_weights": credit.kl_weights,
        "keep": credit.keep,
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
            f"{path}: no {', '.join(missing)} in it; give a folder run_dir/nonfinite/step_NNNNNN"
        )
    facts = json.loads((path / FACTS).read_text(encoding="ascii"))
    values = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    values["model"]["path"] = str(path / WEIGHTS)
    return Bundle(
        config=validate(Config, values, str(path / CONFIG)),
        step=facts["step"],
        number=facts["minibatch"],
        world_size=facts["world_size"],
        experience=_restored(load_file(path / BATCH), _read_images(path, facts)),
        rows=facts["rows"],
        splits=facts["splits"],
        uids=facts["uids"],
        loss=None if facts["loss"] is None else float(facts["loss"]),
        grad_norm=None if facts["grad_norm"] is None else float(facts["grad_norm"]),
    )


def _write_images(folder: Path, sequences: SequenceBatch) -> None:
    """The file of each image, once."""
    for images in sequences.images or ():
        for image in images:
            file = folder / image.digest
            if not file.exists():
                folder.mkdir(exist_ok=True)
                is_path = isinstance(image.source, Path)
                file.write_bytes(image.source.read_bytes() if is_path else image.source)


def _read_images(path: Path, facts: dict[str, Any]) -> tuple[tuple[Image, ...], ...] | None:
    """The inverse; bundles without images may lack the key."""
    rows = facts.get("images") or None
    if rows is None:
        return None
    return tuple(
        tuple(Image(digest, *size, source=path / IMAGES / digest) for digest, *size in row)
        for row in rows
    )


def _restored(
    tensors: dict[str, Tensor], images: tuple[tuple[Image, ...], ...] | None
) -> Experience:
    def scores(name: str) -> TokenScores | None:
        return TokenScores(tensors[name], None) if name in tensors else None

    return Experience(
        responses=(),
        sequences=SequenceBatch(
            tensors["token_ids"],
            tensors["prompt_lengths"],
            tensors["response_lengths"],
            tensors.get("prompt_index"),
            images,
        ),
        group_ids=tensors["group_ids"],
        rewards=tensors["rewards"],
        correct=tensors["correct"],
        truncated=tensors["truncated"],
        sampler_logprobs=tensors["sampler_logprobs"],
        credit=Credit(tensors["advantages"], tensors["kl_weights"], tensors["keep"], {}),
        ref=scores("ref_logprobs"),
        old=scores("old_logprobs"),
    )
