"""A minibatch on disk, with all that tools/replay_step.py needs to compute its gradient again.

``run_dir/nonfinite/step_NNNNNN``: ``batch.safetensors`` (tokens, lengths, logprobs, rewards,
credit), ``bundle.json`` (rows, micro-batches, what the run saw), ``config.json``,
``random_states.pt`` (one a rank), ``weights/`` (a HF directory: the policy's weights when the
minibatch came), and ``images/``, the files of images by digest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.config.schema import Config
from megatron_rl.data.token_rows import TokenRows
from megatron_rl.passes import EXPERTS, UpdateResult
from megatron_rl.rollouts.rows.exchange import gathered_on_main
from megatron_rl.rollouts.rows.experience import Experience
from megatron_rl.runtime import random_state
from megatron_rl.runtime.launch import World
from megatron_rl.trainer.health import Minibatch
from megatron_rl.types import PLACES, Image

if TYPE_CHECKING:  # a class of megatron, which takes long to import
    from megatron_rl.policy.megatron_policy import MegatronPolicy

BATCH = "batch.safetensors"
FACTS = "bundle.json"
CONFIG = "config.json"
RANDOM = "random_states.pt"
WEIGHTS = "weights"
IMAGES = "images"
# Prefixes of the names of the columns that signals have given.
COLUMN = "column."
TOKEN_COLUMN = "token_column."
# Fields of a SequenceBatch, an Experience and a Credit that are stored under their own names.
OF_SEQUENCES = (
    *("token_ids", "prompt_lengths", "response_lengths"),
    *("prompt_index", "temperatures", "kept", "likely", EXPERTS),
)
OF_EXPERIENCE = ("group_ids", "rewards", "correct", "truncated", "num_sampled")
OF_CREDIT = ("advantages", "kl_weights", "keep")
OF_TOKENS = ("sampler_logprobs", "sampled", *PLACES)

Images = Sequence[Sequence[tuple[str, int, int]]]  # of each row: digest, width, height


@dataclass(frozen=True, kw_only=True)
class BundleFacts:
    """The contents of ``bundle.json``."""

    step: int
    number: int  # of the minibatch within its step, from 1
    world_size: int
    rows: Sequence[int]  # those of the minibatch
    splits: Sequence[Sequence[Sequence[int]]]  # the micro-batches of every data-parallel rank
    uids: Sequence[str]
    images: Images
    # ``loss`` and ``grad_norm`` as in the run; None where it was written before the update.
    loss: float | None
    grad_norm: float | None


def write_bundle(
    config: Config,
    world: World,
    policy: MegatronPolicy,
    minibatch: Minibatch,
    result: UpdateResult | None,
) -> Path:
    """Collective: writes ``minibatch`` with the weights as they are now; returns the folder."""
    path = Path(config.run_dir) / "nonfinite" / f"step_{minibatch.step:06d}"
    experience = minibatch.experience
    responses = experience.responses
    prompts = responses.prompts
    tokens = gathered_on_main(experience.scored_tokens, responses, world)
    experts = responses.experts
    if experts is not None:
        experts = gathered_on_main(experts, responses, world, experience.sequences.lengths.numpy())
    states = world.all_gather(random_state.capture())
    facts = BundleFacts(
        step=minibatch.step,
        number=minibatch.number,
        world_size=world.size,
        rows=minibatch.rows,
        splits=policy.batching.plan(experience.sequences, minibatch.rows),
        uids=[prompt.uid for prompt in prompts],
        images=[[(each.digest, each.width, each.height) for each in one.images] for one in prompts],
        loss=None if result is None else result.loss,
        grad_norm=None if result is None else result.grad_norm,
    )

    def write() -> None:
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        (path / FACTS).write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="ascii")
        values = json.dumps(config.model_dump(mode="json"), indent=1)
        (path / CONFIG).write_text(values + "\n", encoding="utf-8")
        torch.save(states, path / RANDOM)
        save_file(_tensors(experience, tokens, experts), path / BATCH)
        _write_images(path / IMAGES, [prompt.images for prompt in prompts])

    world.from_main(write)
    policy.export(path / WEIGHTS)
    return path


def _tensors(
    experience: Experience, tokens: TokenRows, experts: TokenRows | None
) -> dict[str, Tensor]:
    """``tokens`` and ``experts``: all of them."""
    responses = experience.responses
    sequences = experience.batch_of(np.arange(len(responses)), tokens, experts)
    tensors: dict[str, Tensor | None] = {
        (TOKEN_COLUMN if name in experience.token_columns else "") + name: torch.from_numpy(values)
        for name, values in tokens.columns.items()
    }
    tensors |= {name: getattr(sequences, name) for name in OF_SEQUENCES}
    tensors |= {name: getattr(experience, name) for name in OF_EXPERIENCE}
    tensors |= {name: getattr(experience.credit, name) for name in OF_CREDIT}
    tensors |= {COLUMN + name: values for name, values in experience.columns.items()}
    tensors["weight_versions"] = torch.from_numpy(responses.weight_versions)
    # A copy each: safetensors refuses tensors that share memory.
    return {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in tensors.items()
        if tensor is not None
    }


def _write_images(folder: Path, rows: Sequence[tuple[Image, ...]]) -> None:
    """The file of each image, once."""
    for image in {image.digest: image for images in rows for image in images}.values():
        folder.mkdir(exist_ok=True)
        (folder / image.digest).write_bytes(image.read())
