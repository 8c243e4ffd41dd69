"""torchrun program: loss and gradient of real methods in one layout after another, against those of one rank.

Arguments: a working folder (models, and the one-rank results in it), the file for the figures, names of layouts. With one
process the layouts are "dense" and "experts", whose results the other launches read.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.loss import Method, ResponseBatch, TokenBatch, load_method
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.types import LossOutput, SequenceBatch, TokenView
from tests.numerics import models
from tests.numerics.policy_cases import AGGREGATIONS, METHOD_NAMES, TABLE
from tests.numerics.policy_reference import make_batch, relative_error
from tests.numerics.policy_worker import build

ROWS = 8
RESPONSE_LIMIT = 16


class MethodLoss:
    """A method on fixed data: two groups of four responses, old logprobs near the policy's, reference logprobs further off (so that
    the loss is no small difference of large terms)."""

    def __init__(self, method: Method, batch: SequenceBatch, base: Tensor) -> None:
        generator = torch.Generator().manual_seed(5)
        self.old = base + 0.1 * torch.randn(base.shape, generator=generator)
        self.ref = base + 1.0 * torch.randn(base.shape, generator=generator)
        self.ids, self.lengths, self.method = batch.response_ids, batch.response_lengths, method
        self.correct = torch.tensor([True, False, True, True, False, False, True, False])
        self.groups = torch.arange(ROWS) // (ROWS // 2)
        rewards = self.correct.float() + 0.5 * torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
        self.credit = method.credit(
            ResponseBatch(rewards=rewards, correct=self.correct, group_ids=self.groups, response_tokens=self.lengths)
        )

    def __call__(self, view: TokenView) -> LossOutput:
        index = view.index
        batch = TokenBatch(
            logprobs=view.logprobs,
            old_logprobs=self.old[index],
            response_ids=self.ids[index],
            loss_mask=torch.ones_like(index, dtype=torch.bool),
            advantages=self.credit.advantages,
            kl_weights=self.credit.kl_weights,
            ref_logprobs=self.ref[index],
            correct=self.correct,
            group_ids=self.groups,
            response_loss_tokens=self.lengths,
            num_responses=ROWS,
            num_tokens=int(self.lengths.sum()),
        )
        result = self.method.loss(batch, sequence_sum=view.sequence_sum)
        return LossOutput(result.loss, result.metrics)


def variants() -> dict[str, Callable[[], Method]]:
    def make(method: str, aggregation: str) -> Callable[[], Method]:
        overrides = [f"aggregate.name={aggregation}", "kl.coef=0.5"]
        return lambda: load_method(method, overrides, response_limit=RESPONSE_LIMIT)

    return {f"{method}/{aggregation}": make(method, aggregation) for method in METHOD_NAMES for aggregation in AGGREGATIONS}


def cuts(policy: MegatronPolicy) -> dict[str, list[list[int]]]:
    rows = list(range(ROWS))[policy.data_parallel_rank :: policy.data_parallel_size]
    multiple = policy.microbatch_multiple
    thirds = [rows[:1], rows[1:2], [], rows[2:]]
    return {"few": [rows] + [[]] * (multiple - 1), "many": thirds + [[]] * (-len(thirds) % multiple)}


def run(name: str, folder: Path) -> dict[str, Any]:
    kind = "experts" if name.startswith("experts") else "dense"
    model = "qwen3_moe" if kind == "experts" else "llama"
    path, stored = folder / model, folder / f"{kind}.pt"
    if dist.get_rank() == 0 and not path.exists():
        models.save(model, path)
    dist.barrier()
    batch = make_batch(seed=8, rows=ROWS)
    policy = build(path, TABLE[name][1], keep_reference=False)
    results: dict[str, Any] = {} if not stored.exists() else torch.load(stored)
    if name == kind:
        results = {"base": policy.logprobs(batch, [list(range(ROWS))]).logprobs}
    figures: dict[str, Any] = {}
    for variant, make in variants().items():
        loss = MethodLoss(make(), batch, results["base"])
        for cut, split in cuts(policy).items():
            totals = policy.backward(batch, split, loss)
            gradient = {key: value.clone() for key, value in policy.gathered_gradients()}
            if name == kind and cut == "few":
                results[variant] = {"loss": totals.loss, "gradient": gradient}
            one = results[variant]
            figures[f"{variant}/{cut}"] = {
                "loss": abs(totals.loss - one["loss"]) / abs(one["loss"]),
                "gradient": relative_error(gradient, one["gradient"]),
                "value": totals.loss,
            }
    if name == kind:
        torch.save(results, stored)
    policy.close()
    del policy
    gc.collect()
    return figures


def main() -> None:
    folder, out, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = {}
    for name in names:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, run(name, folder))
        figures[name] = gathered
    if dist.get_rank() == 0:
        out.write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
