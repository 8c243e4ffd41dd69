"""A minibatch on disk, with all that its loss and gradient depend on; tools/replay_step.py computes them again.

``run_dir/nonfinite/step_NNNNNN``: ``batch.safetensors`` (tokens, lengths, logprobs, rewards, credit), ``bundle.json`` (rows,
micro-batches, what the run saw), ``config.json``, ``random_states.pt`` (one a rank) and ``weights/`` (a HF directory: the policy's
weights when the minibatch came).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.config.load import validate
from megatron_rl.config.schema import Config
from megatron_rl.loss import Credit
from megatron_rl.protocols import Entropy, Policy
from megatron_rl.runtime import random_state
from megatron_rl.runtime.launch import World
from megatron_rl.trainer.health import Minibatch
from megatron_rl.trainer.objective import Scored
from megatron_rl.trainer.rollouts import Experience
from megatron_rl.types import SequenceBatch, TokenScores, UpdateResult

BATCH, FACTS, CONFIG, RANDOM, WEIGHTS = "batch.safetensors", "bundle.json", "config.json", "random_states.pt", "weights"


@dataclass(frozen=True)
class Bundle:
    """What ``read_bundle`` finds. ``splits``: the micro-batches of every data-parallel rank. ``loss`` and ``grad_norm``: those of the
    run; None where the bundle was written before the step."""

    config: Config
    step: int
    number: int
    world_size: int
    scored: Scored
    credit: Credit
    rows: list[int]
    splits: list[list[list[int]]]
    entropy: Entropy
    uids: list[str]
    loss: float | None
    grad_norm: float | None


def write_bundle(config: Config, world: World, policy: Policy, minibatch: Minibatch, result: UpdateResult | None) -> Path:
    """Collective: writes the bundle of ``minibatch`` with the weights as they are now; returns its folder."""
    path = Path(config.run_dir) / "nonfinite" / f"step_{minibatch.step:06d}"
    by_rank = world.all_gather((policy.data_parallel_rank, [list(rows) for rows in minibatch.microbatches]))
    states = world.all_gather(random_state.capture())

    def write() -> None:
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        facts = _facts(minibatch, result, world.size, dict(by_rank))
        (path / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="ascii")
        (path / CONFIG).write_text(json.dumps(config.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
        torch.save(states, path / RANDOM)
        save_file(_tensors(minibatch), path / BATCH)

    world.from_main(write)
    policy.export(path / WEIGHTS)
    return path


def _facts(
    minibatch: Minibatch, result: UpdateResult | None, world_size: int, splits: dict[int, list[list[int]]]
) -> dict[str, Any]:
    responses = minibatch.scored.experience.responses
    return {
        "step": minibatch.step,
        "minibatch": minibatch.number,
        "world_size": world_size,
        "rows": list(minibatch.rows),
        "splits": [splits[rank] for rank in sorted(splits)],
        "entropy": minibatch.entropy,
        "uids": [response.prompt.uid for response in responses],
        "loss": None if result is None else repr(result.loss),  # "nan" and "inf" are not JSON
        "grad_norm": None if result is None else repr(result.grad_norm),
    }


def _tensors(minibatch: Minibatch) -> dict[str, Tensor]:
    scored, credit = minibatch.scored, minibatch.credit
    experience, sequences = scored.experience, scored.experience.sequences
    tensors = {
        "token_ids": sequences.token_ids,
        "prompt_lengths": sequences.prompt_lengths,
        "response_lengths": sequences.response_lengths,
        "prompt_ids": sequences.prompt_ids,
        "group_ids": experience.group_ids,
        "rewards": experience.rewards,
        "correct": experience.correct,
        "truncated": experience.truncated,
        "sampler_logprobs": experience.sampler_logprobs,
        "old_logprobs": None if scored.old is None else scored.old.logprobs,
        "ref_logprobs": None if scored.ref is None else scored.ref.logprobs,
        "advantages": credit.advantages,
        "kl_weights": credit.kl_weights,
        "keep": credit.keep,
    }
    # A copy each: safetensors refuses tensors that share memory.
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items() if tensor is not None}


def read_bundle(path: Path) -> Bundle:
    """The inverse of ``write_bundle``, but for the weights, whose folder becomes ``config.model.path``.

    Raises:
        ValueError: ``path`` is not a whole bundle.
    """
    missing = [name for name in (BATCH, FACTS, CONFIG, WEIGHTS) if not (path / name).exists()]
    if missing:
        raise ValueError(f"{path}: no {', '.join(missing)} in it; give a folder run_dir/nonfinite/step_NNNNNN")
    facts = json.loads((path / FACTS).read_text(encoding="ascii"))
    values = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    values["model"]["path"] = str(path / WEIGHTS)
    scored, credit = _restored(load_file(path / BATCH))
    return Bundle(
        config=validate(Config, values, str(path / CONFIG)),
        step=facts["step"],
        number=facts["minibatch"],
        world_size=facts["world_size"],
        scored=scored,
        credit=credit,
        rows=facts["rows"],
        splits=facts["splits"],
        entropy=facts["entropy"],
        uids=facts["uids"],
        loss=None if facts["loss"] is None else float(facts["loss"]),
        grad_norm=None if facts["grad_norm"] is None else float(facts["grad_norm"]),
    )


def _restored(tensors: dict[str, Tensor]) -> tuple[Scored, Credit]:
    sequences = SequenceBatch(
        tensors["token_ids"], tensors["prompt_lengths"], tensors["response_lengths"], tensors.get("prompt_ids")
    )
    experience = Experience(
        responses=(),
        sequences=sequences,
        group_ids=tensors["group_ids"],
        rewards=tensors["rewards"],
        correct=tensors["correct"],
        truncated=tensors["truncated"],
        sampler_logprobs=tensors["sampler_logprobs"],
        discarded_groups=0,
        tries=1,
    )
    old, ref = (
        TokenScores(tensors[name], None) if name in tensors else None for name in ("old_logprobs", "ref_logprobs")
    )
    credit = Credit(tensors["advantages"], tensors["kl_weights"], tensors["keep"], {})
    return Scored(experience, old, ref), credit

