"""The policy restricted to kept tokens against transformers and autograd: values and gradients of
the pass over a packed batch with shared prompts, in layouts that cut the vocabulary, the layers or
the sequences, and in cuts into micro-batches (float32)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.passes import LocalBatch
from megatron_rl.types import SequenceBatch
from tests import zoo
from tests.numerics.policy_reference import (
    ENTROPY,
    TEMPERATURE,
    make_batch,
    sequences,
)
from tests.numerics.test_annealed_policy import (
    BOUND,
    MODEL,
    PROMPTS,
    ROWS,
    check_cuts,
    cuts,
    differentiated,
    of_cuts,
)
from tests.ranks import call

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "prompts shared": (1, dict(share_prompts=True)),
    "prompts repeated": (1, dict(share_prompts=False)),
    "tensor": (2, dict(tensor=2, sequence=True)),
    "pipeline": (2, dict(pipeline=2)),
    "context": (2, dict(context=2)),
}
NUM_KEPT = 9


def kept_batch() -> SequenceBatch:
    """Every third token is of the whole vocabulary; the others keep theirs and some more, in random
    order and with free places."""
    batch = make_batch(rows=ROWS)
    draw = torch.Generator().manual_seed(8)
    pairs = zip(sequences(batch), batch.prompt_lengths.tolist(), strict=True)
    sampled = torch.cat([tokens[prompt:] for tokens, prompt in pairs])
    kept = []
    for number, token in enumerate(sampled.tolist()):
        ids = torch.randperm(100, generator=draw)[:NUM_KEPT].int()
        ids[torch.randperm(NUM_KEPT, generator=draw)[:3]] = -1
        place = int(torch.randint(NUM_KEPT, (1,), generator=draw))
        ids[ids == token] = -1
        ids[place] = token
        kept.append(torch.full_like(ids, -1) if number % 3 == 0 else ids)
    return replace(batch, kept=torch.stack(kept))


def plain_scores(model: torch.nn.Module, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) of all response tokens, with their graph, of lists of logits."""
    assert batch.kept is not None
    logprobs, entropies = [], []
    of_rows = batch.kept.split(batch.response_lengths.tolist())
    for tokens, prompt, kept in zip(
        sequences(batch), batch.prompt_lengths.tolist(), of_rows, strict=True
    ):
        logits = model(tokens[None]).logits[0, prompt - 1 : -1].float() / TEMPERATURE
        for x, token, row in zip(logits, tokens[prompt:].tolist(), kept.tolist(), strict=True):
            ids = [one for one in row if one >= 0] or list(range(len(x)))
            logp = x[ids].log_softmax(0)
            logprobs.append(logp[ids.index(token)])
            entropies.append(-(logp.exp() * logp).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def scores_and_gradients(path: Path, layout: dict[str, Any], base: Tensor) -> dict[str, Any]:
    """Logprobs, entropies, and for each cut (loss, gradient); with kept tokens and without."""
    batch = kept_batch()
    share = layout.pop("share_prompts", True)
    policy = zoo.tiny_policy(path, layout, share_prompts=share)
    found: dict[str, Any] = {"cuts": of_cuts(policy, batch, base)}
    (rows, *_) = cuts(policy)
    without = replace(batch, kept=None)
    for name, one in (("", batch), ("all ", without)):
        scores = policy.score(LocalBatch(one, rows), [*ENTROPY, PROMPTS])
        found |= {f"{name}logprobs": scores.logprobs, f"{name}entropy": scores.columns["entropy"]}
        found[f"{name}prompts"] = scores.columns["prompt_logprobs"]
    found["reference"] = policy.score(LocalBatch(batch, rows), reference=True).logprobs
    policy.close()
    return found


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    batch = kept_batch()
    model = zoo.tiny_model(MODEL)
    logprobs, entropy = plain_scores(model, batch)
    return differentiated(model, batch, logprobs, entropy)


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_gradients(name: str, hf_models: Path, wanted: dict[str, Any]) -> None:
    processes, layout = LAYOUTS[name]
    path = hf_models / MODEL
    base = wanted["logprobs"]
    for found in call(processes, scores_and_gradients, path, layout, base, timeout=250):
        assert (found["logprobs"] - base).abs().max() <= BOUND
        assert (found["entropy"] - wanted["entropy"]).abs().max() <= BOUND
        assert torch.equal(found["reference"], found["logprobs"]), "of the same kept tokens"
        check_cuts(found, wanted)
        moved = (found["all logprobs"] - found["logprobs"]).abs()
        assert moved[::3].max() <= BOUND and moved.max() > 0.5
        assert torch.equal(found["prompts"], found["all prompts"]), "a prompt keeps everything"
