"""The policy with a temperature for each response token against transformers and autograd: values
and gradients, in layouts that cut the vocabulary, the layers or the sequences, and in cuts into
micro-batches (float32)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.annealing import Annealing
from megatron_rl.passes import LocalBatch, Output
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.types import SequenceBatch
from tests import zoo
from tests.numerics.policy_reference import (
    ENTROPY,
    TEMPERATURE,
    ClippedLoss,
    gradients,
    make_batch,
    relative_error,
    scores,
)
from tests.ranks import call
from tools.replay.gradients import gathered_gradients

MODEL = "llama"
ROWS = 6
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor": (2, dict(tensor=2, sequence=True)),
    "pipeline": (2, dict(pipeline=2)),
    "context": (2, dict(context=2)),
}
BOUND = 1e-5  # nats of one token
RELATIVE = 2e-6

PROMPTS = Output("prompt_logprobs")


def annealed_batch() -> SequenceBatch:
    batch = make_batch(rows=ROWS)
    annealing = Annealing(1.3, 0.4, decay_tokens=8.0, plain_tokens=2)
    return replace(batch, temperatures=annealing.of_lengths(batch.response_lengths))


def cuts(policy: MegatronPolicy) -> list[list[list[int]]]:
    rows = list(range(ROWS))[policy.ranks.data_rank :: policy.ranks.data]
    return [[rows], [rows[:1], [], rows[1:3], rows[3:]]]


def of_cuts(
    policy: MegatronPolicy, batch: SequenceBatch, base: Tensor
) -> list[tuple[float, dict[str, Tensor]]]:
    """(loss, gradient) of each cut."""
    loss = ClippedLoss(batch, base)
    found = []
    for cut in cuts(policy):
        totals = policy.backward(LocalBatch(batch, cut), loss, ENTROPY)
        gradient = {key: value.clone() for key, value in gathered_gradients(policy)}
        found.append((totals.loss, gradient))
    return found


def differentiated(
    model: torch.nn.Module, batch: SequenceBatch, logprobs: Tensor, entropy: Tensor
) -> dict[str, Any]:
    """The scores of ``model`` without their graph, the loss of them and its gradient."""
    index = torch.arange(len(logprobs))
    loss = ClippedLoss(batch, logprobs).contribution(index, logprobs, entropy, lambda x: x)
    loss.backward()
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "loss": loss.item(),
        "gradient": gradients(model),
    }


def check_cuts(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Every cut has the loss and the gradient that are wanted."""
    for loss, gradient in found["cuts"]:
        assert abs(loss - wanted["loss"]) / abs(wanted["loss"]) <= RELATIVE
        assert relative_error(gradient, wanted["gradient"]) <= RELATIVE


def scores_and_gradients(path: Path, layout: dict[str, Any], base: Tensor) -> dict[str, Any]:
    """Logprobs, entropies, and for each cut (loss, gradient); and the logprobs of the same batch
    without temperatures, and with the policy's own for each token."""
    batch = annealed_batch()
    policy = zoo.tiny_policy(path, layout)
    found: dict[str, Any] = {"cuts": of_cuts(policy, batch, base)}
    (rows, *_) = cuts(policy)
    own = policy.score(LocalBatch(batch, rows), [*ENTROPY, PROMPTS])
    found |= {"logprobs": own.logprobs, "entropy": own.columns["entropy"]}
    found["prompts"] = own.columns["prompt_logprobs"]
    reference = policy.score(LocalBatch(batch, rows), reference=True)
    found["reference"] = reference.logprobs
    without = replace(batch, temperatures=None)
    found["without"] = policy.score(LocalBatch(without, rows)).logprobs
    constant = replace(batch, temperatures=torch.full_like(batch.temperatures, TEMPERATURE))
    found["constant"] = policy.score(LocalBatch(constant, rows)).logprobs
    at_1 = policy.score(LocalBatch(without, rows), [PROMPTS], temperature=1.0)
    found["prompts_at_1"] = at_1.columns["prompt_logprobs"]
    policy.close()
    return found


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    batch = annealed_batch()
    model = zoo.tiny_model(MODEL)
    logprobs, entropy = scores(model, batch)
    return differentiated(model, batch, logprobs, entropy)


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_gradients(name: str, hf_models: Path, wanted: dict[str, Any]) -> None:
    processes, layout = LAYOUTS[name]
    ranks = call(
        processes,
        scores_and_gradients,
        hf_models / MODEL,
        layout,
        wanted["logprobs"],
        timeout=250,
    )
    for found in ranks:
        assert (found["logprobs"] - wanted["logprobs"]).abs().max() <= BOUND
        assert (found["entropy"] - wanted["entropy"]).abs().max() <= BOUND
        assert torch.equal(found["reference"], found["logprobs"]), "the same weights"
        check_cuts(found, wanted)
        assert torch.equal(found["constant"], found["without"]), "one temperature is the plain one"
        assert (found["without"] - found["logprobs"]).abs().max() > 0.1
        assert torch.equal(found["prompts"], found["prompts_at_1"]), "a prompt is not annealed"
