"""The policy of one layout against transformers: what every rank runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_rl.passes import LocalBatch, TokenScores
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.passes.forward import Passes, ScoreBuffer
from megatron_rl.runtime.device import platform
from tests import zoo
from tests.numerics.policy_cases import Case, optim
from tests.numerics.policy_reference import (
    ENTROPY,
    NUM_ROWS,
    ClippedLoss,
    gradients,
    make_batch,
    relative_error,
    scores,
    sequences,
)
from tools.replay.gradients import gathered_gradients

OPTIM = optim()


def reference(model: str, layers: int | None) -> dict[str, Any]:
    """Logits, scores, loss and gradients by transformers and torch."""
    hf = zoo.tiny_model(model, layers=layers)
    return differentiated(hf) | {"gradients": gradients(hf)}


def differentiated(hf: torch.nn.Module) -> dict[str, Any]:
    """Logits, scores and loss of a model, whose parameters get their gradients."""
    batch = make_batch()
    logits = [hf(tokens[None]).logits[0].detach() for tokens in sequences(batch)]
    logprobs, entropy = scores(hf, batch)
    loss = ClippedLoss(batch, logprobs)
    value = loss.contribution(torch.arange(len(logprobs)), logprobs, entropy, lambda sums: sums)
    value.backward()
    return dict(
        batch=batch,
        logits=logits,
        logprobs=logprobs.detach(),
        entropy=entropy.detach(),
        loss=loss,
        value=value.item(),
    )


def splits(policy: MegatronPolicy) -> dict[str, list[list[int]]]:
    """Ways to cut this rank's rows into micro-batches; every rank has the same number, some are
    empty."""
    rows = list(range(NUM_ROWS))[policy.ranks.data_rank :: policy.ranks.data]
    multiple = policy.batching.rule.multiple
    whole = [rows] + [[]] * (multiple - 1)
    most = math.ceil(NUM_ROWS / policy.ranks.data)
    num_each = most + -most % multiple
    each = [[row] for row in rows] + [[]] * (num_each - len(rows))
    uneven = [[], rows[:1], rows[1:], []] if policy.ranks.data_rank % 2 == 0 else [rows, [], [], []]
    return {"whole": whole, "each": each, "uneven": uneven}


class Logits(Passes):
    """Collects the logits of whole sequences instead of logprobs."""

    def _finish(
        self, chunk: Any, microbatch: Any, consume: Any, outputs: Any, output: torch.Tensor
    ) -> Any:
        module = chunk
        while hasattr(module, "module"):
            module = module.module
        local = output.squeeze(1) @ module.head_weight().T
        shards = [torch.empty_like(local) for _ in range(self.ranks.tensor)]
        dist.all_gather(shards, local.contiguous(), group=self.ranks.tensor_group)
        logits = torch.cat(shards, 1)[:, : self.vocab_size]
        return (
            logits.sum() * 0,
            torch.tensor(0, dtype=torch.int),
            (microbatch.position_ids[0], logits),
        )


def logits_error(policy: MegatronPolicy, wanted: dict[str, Any]) -> float:
    """Largest difference over all rows and positions that ranks of the last stage hold."""
    passes = Logits(policy.chunks, policy.ranks, policy.arch.vocab_size, 1.0, policy._routing)
    with platform():
        rows = [[row] for row in range(NUM_ROWS)] + [[]] * (
            -NUM_ROWS % policy.batching.rule.multiple
        )
        collected = passes.run(policy.batching.packed(wanted["batch"], rows), None, backward=False)
    worst = 0.0
    for (positions, logits), want in zip(collected, wanted["logits"], strict=False):
        real = positions < len(want)
        worst = max(worst, float((logits[real] - want[positions[real]]).abs().max()))
    return worst


def compare(case: Case, path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Distances between the policy and ``wanted``, which is what ``reference`` returned."""
    policy = zoo.tiny_policy(path, case.layout, **wanted.get("settings", {}))
    figures: dict[str, Any] = {}
    stored = load_file(path / "model.safetensors")
    gathered = dict(policy.gathered_weights())
    figures["round_trip"] = set(gathered) == set(stored) and all(
        torch.equal(gathered[key], stored[key]) for key in stored
    )
    figures["logits"] = logits_error(policy, wanted)
    batch, ways = wanted["batch"], splits(policy)
    first = None
    for name, split in ways.items():
        got = zoo.of_all_rows(policy.score(LocalBatch(batch, split), ENTROPY))
        figures[f"logprobs_{name}"] = float((got.logprobs - wanted["logprobs"]).abs().max())
        figures[f"entropy_{name}"] = float((got.columns["entropy"] - wanted["entropy"]).abs().max())
        totals = policy.backward(LocalBatch(batch, split), wanted["loss"], ENTROPY)
        figures[f"loss_{name}"] = abs(totals.loss - wanted["value"]) / abs(wanted["value"])
        figures[f"metrics_{name}"] = totals.metrics
        if not case.sharded_gradients:
            found = dict(gathered_gradients(policy))
            figures[f"gradients_{name}"] = relative_error(found, wanted["gradients"])
            for part, names in parts(found).items():
                figures[f"gradients_{part}_{name}"] = relative_error(
                    {key: found[key] for key in names},
                    {key: wanted["gradients"][key] for key in names},
                )
            first = found if first is None else first
            figures[f"split_{name}"] = relative_error(found, first)
    figures.update(after_update(policy, wanted, ways["uneven"], got, stored))
    policy.close()
    return figures


def parts(tensors: dict[str, Any]) -> dict[str, list[str]]:
    """The names of a vision-language model, apart; nothing of another."""
    tower = [name for name in tensors if "visual." in name]
    rest = [name for name in tensors if "visual." not in name]
    return {"tower": tower, "language": rest} if tower else {}


def same(mine: TokenScores, other: TokenScores) -> bool:
    pairs = [(mine.logprobs, other.logprobs), (mine.columns["entropy"], other.columns["entropy"])]
    return all(torch.equal(*pair) for pair in pairs)


def after_update(
    policy: MegatronPolicy,
    wanted: dict[str, Any],
    split: Any,
    before: TokenScores,
    stored: dict[str, Any],
) -> dict[str, Any]:
    """One optimizer step against torch's AdamW on the same gradients; the reference weights must
    not move. ``before``: the scores of a pass of their own over ``split``."""
    batch = wanted["batch"]
    result = policy.update(LocalBatch(batch, split), wanted["loss"], ENTROPY, scores=ENTROPY)
    weights = {
        key: torch.nn.Parameter(value.clone())
        for key, value in stored.items()
        if key in wanted["gradients"]
    }
    for key, weight in weights.items():
        weight.grad = wanted["gradients"][key].clone()
    is_plain = {key: weight.dim() == 1 or key.endswith("bias") for key, weight in weights.items()}
    decayed = [weight for key, weight in weights.items() if not is_plain[key]]
    plain = [weight for key, weight in weights.items() if is_plain[key]]
    settings = dict(lr=OPTIM.learning_rate, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps)
    groups = [
        {"params": decayed, "weight_decay": OPTIM.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, **settings).step()
    got = dict(policy.gathered_weights())
    moved = {key: got[key] - stored[key] for key in weights}
    expected = {key: weight.detach() - stored[key] for key, weight in weights.items()}
    norm = sum(float(g.square().sum()) for g in wanted["gradients"].values()) ** 0.5
    kept = policy.score(LocalBatch(batch, split), reference=True)
    kept = zoo.of_all_rows(kept).logprobs
    now = zoo.of_all_rows(policy.score(LocalBatch(batch, split), ENTROPY))
    buffer = ScoreBuffer(len(now.logprobs), ENTROPY, policy.ranks, policy.device)
    policy.backward(LocalBatch(batch, split), wanted["loss"], ENTROPY, buffer=buffer)
    again = zoo.of_all_rows(buffer.read())
    assert result.scores is not None
    own = zoo.of_all_rows(result.scores)
    return dict(
        update=relative_error(moved, expected),
        grad_norm=abs(result.grad_norm - norm) / norm,
        skipped=result.skipped,
        own_scores=same(own, before) and same(again, now),
        reference_kept=torch.equal(kept, before.logprobs),
        policy_moved=float((now.logprobs - before.logprobs).abs().max()),
    )
