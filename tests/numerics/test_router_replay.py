"""Given experts in every layout of the policy: values and gradients against transformers with the
same experts frozen, and the record of a pass against what transformers chooses (float32)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.models.experts import NOT_GIVEN
from megatron_rl.passes import LocalBatch, Output
from megatron_rl.types import SequenceBatch
from tests import zoo
from tests.numerics.policy_reference import (
    TEMPERATURE,
    make_batch,
    sequences,
)
from tests.numerics.test_annealed_policy import (
    BOUND,
    ROWS,
    check_cuts,
    cuts,
    differentiated,
    of_cuts,
)
from tests.ranks import call

MODEL = "qwen3_moe"
LAYERS, K, EXPERTS = 2, 2, 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "prompts shared": (1, dict(share_prompts=True)),
    "prompts repeated": (1, dict(share_prompts=False)),
    "tensor": (2, dict(tensor=2, sequence=True)),
    "expert": (2, dict(expert=2)),
    "context": (2, dict(context=2)),
    "pipeline": (2, dict(pipeline=2)),
    # Several micro-batches are on their way when the first is run again.
    "pipeline, full": (2, dict(pipeline=2, recompute="full")),
    "pipeline, selective": (2, dict(pipeline=2, recompute="selective")),
    "tensor, full": (2, dict(tensor=2, sequence=True, recompute="full")),
}


def given_batch() -> SequenceBatch:
    """Each fifth token chooses itself; the others have two random experts in each layer. Responses
    to one prompt have those of its tokens in common."""
    batch = make_batch(rows=ROWS)
    draw = torch.Generator().manual_seed(4)
    scores = torch.rand(len(batch.token_ids), LAYERS, EXPERTS, generator=draw)
    experts = scores.topk(K, dim=-1).indices.to(torch.uint8).flatten(1)
    experts[::5] = NOT_GIVEN
    offsets = batch.offsets.tolist()
    for row, length in enumerate(batch.prompt_lengths.tolist()):
        first = offsets[row // 3 * 3]
        experts[offsets[row] : offsets[row] + length] = experts[first : first + length].clone()
    return replace(batch, experts=experts)


@contextmanager
def frozen(model: torch.nn.Module, experts: Tensor | None) -> Iterator[list[Tensor]]:
    """Inside, the routers of the model take ``experts`` ``[tokens, layers, k]``, where given; the
    list gets what each layer has taken."""
    taken: list[Tensor] = []

    def choose(layer: int, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, _, chosen = output
        if experts is not None:
            given = experts[:, layer].long()
            chosen = torch.where(given != NOT_GIVEN, given, chosen)
        weights = logits.softmax(-1).gather(1, chosen)
        taken.append(chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    handles = [
        gate.register_forward_hook(lambda _, __, output, layer=layer: choose(layer, output))
        for layer, gate in enumerate(gates)
    ]
    yield taken
    for handle in handles:
        handle.remove()


def plain_scores(model: torch.nn.Module, batch: SequenceBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs, entropy) of all response tokens, with their graph, and the experts of all."""
    logprobs, entropies, experts = [], [], []
    given = batch.experts
    of_rows = [None] * ROWS if given is None else given.split(batch.lengths.tolist())
    for tokens, prompt, own in zip(
        sequences(batch), batch.prompt_lengths.tolist(), of_rows, strict=True
    ):
        own = None if own is None else own.view(-1, LAYERS, K)
        with frozen(model, own) as taken:
            logits = model(tokens[None]).logits[0, prompt - 1 : -1].float() / TEMPERATURE
        experts.append(torch.cat(taken, 1))
        logp = logits.log_softmax(-1)
        logprobs.append(logp.gather(1, tokens[prompt:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(experts)


def passes(path: Path, layout: dict[str, Any], base: Tensor) -> dict[str, Any]:
    """With given experts: logprobs, and for each cut (loss, gradient). Without them: logprobs and
    the record; then the logprobs of other weights, which choose or repeat the record."""
    batch = given_batch()
    free = replace(batch, experts=None)
    share = layout.pop("share_prompts", True)
    policy = zoo.tiny_policy(path, layout, share_prompts=share)
    found: dict[str, Any] = {"cuts": of_cuts(policy, batch, base)}
    (rows, split) = cuts(policy)

    def score(one: SequenceBatch, cut: list[list[int]], **more: Any) -> Tensor:
        return zoo.of_all_rows(policy.score(LocalBatch(one, cut), **more)).logprobs

    found["logprobs"] = score(batch, rows)
    found["reference"] = score(batch, rows, reference=True)
    recorded = zoo.of_all_rows(policy.score(LocalBatch(free, rows), [Output("experts")]))
    found["free"] = recorded.logprobs
    found["record"] = recorded.columns["experts"]
    # Each data-parallel rank has the record of its own rows, as in a run.
    replayed = replace(batch, experts=found["record"])
    found["again"] = score(replayed, rows)
    for held in policy.held:
        if "router" in held.name:
            held.tensor.data.neg_()
    found["moved"] = score(free, rows)
    found["moved, replayed"] = score(replayed, rows)
    found["moved, replayed, cut"] = score(replayed, split)
    policy.close()
    return found


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    batch = given_batch()
    model = zoo.tiny_model(MODEL)
    logprobs, entropy, _ = plain_scores(model, batch)
    given = differentiated(model, batch, logprobs, entropy)
    free, _, record = plain_scores(model, replace(batch, experts=None))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.neg_()
    replayed = replace(batch, experts=record.to(torch.uint8))
    return given | {
        "free": free.detach(),
        "record": record,
        "moved, replayed": plain_scores(model, replayed)[0].detach(),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_given_experts(name: str, hf_models: Path, wanted: dict[str, Any]) -> None:
    processes, layout = LAYOUTS[name]
    base = wanted["logprobs"]
    for found in call(processes, passes, hf_models / MODEL, {**layout}, base, timeout=250):
        assert (found["logprobs"] - base).abs().max() <= BOUND
        assert (base - wanted["free"]).abs().max() > 0.1, "these experts matter"
        assert torch.equal(found["reference"], found["free"]), "a reference chooses itself"
        check_cuts(found, wanted)
        # An order within a token's experts is no part of a choice.
        record = found["record"].view(-1, LAYERS, K).long().sort(-1).values
        assert torch.equal(record, wanted["record"].view(-1, LAYERS, K).sort(-1).values)
        assert torch.equal(found["again"], found["free"])
        assert (found["moved"] - found["free"]).abs().max() > 0.1
        for key in ("moved, replayed", "moved, replayed, cut"):
            assert (found[key] - wanted["moved, replayed"]).abs().max() <= BOUND
