"""Loss and gradient of real methods do not depend on the layout: layouts x aggregations x methods x
cuts, float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.config.method import load_method
from megatron_rl.loss import Method, ResponseBatch, TokenBatch
from megatron_rl.passes import LocalBatch, LossOutput, TokenView
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.types import SequenceBatch
from tests.numerics.policy_cases import AGGREGATIONS, METHOD_NAMES, TABLE
from tests.numerics.policy_reference import make_batch, relative_error
from tests.ranks import call
from tests.zoo import tiny_policy
from tools.replay.gradients import gathered_gradients

ROWS = 8
RESPONSE_LIMIT = 16


class MethodLoss:
    """A method on fixed data: two groups of four responses, old logprobs near the policy's,
    reference logprobs further off (so that the loss is no small difference of large terms)."""

    def __init__(self, method: Method, batch: SequenceBatch, base: Tensor) -> None:
        generator = torch.Generator().manual_seed(5)
        self.old = base + 0.1 * torch.randn(base.shape, generator=generator)
        self.ref = base + 1.0 * torch.randn(base.shape, generator=generator)
        self.ids, self.lengths, self.method = batch.response_index, batch.response_lengths, method
        self.correct = torch.tensor([True, False, True, True, False, False, True, False])
        self.groups = torch.arange(ROWS) // (ROWS // 2)
        rewards = self.correct.float() + 0.5 * torch.tensor(
            [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0]
        )
        self.credit = method.credit(
            ResponseBatch(
                rewards=rewards,
                correct=self.correct,
                group_ids=self.groups,
                response_tokens=self.lengths,
            )
        )

    def __call__(self, view: TokenView) -> LossOutput:
        index = view.index
        batch = TokenBatch(
            logprobs=view.logprobs,
            old_logprobs=self.old[index],
            response_index=self.ids[index],
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

    return {
        f"{method}/{aggregation}": make(method, aggregation)
        for method in METHOD_NAMES
        for aggregation in AGGREGATIONS
    }


def cuts(policy: MegatronPolicy) -> dict[str, list[list[int]]]:
    rows = list(range(ROWS))[policy.ranks.data_rank :: policy.ranks.data]
    multiple = policy.batching.rule.multiple
    thirds = [rows[:1], rows[1:2], [], rows[2:]]
    return {
        "few": [rows] + [[]] * (multiple - 1),
        "many": thirds + [[]] * (-len(thirds) % multiple),
    }


ALL = tuple(itertools.product(variants(), ("few", "many")))
# One cut of each variant, such that each method and each aggregation meets both.
ALTERNATING = tuple(
    (f"{method}/{aggregation}", ("few", "many")[(row + column) % 2])
    for row, method in enumerate(METHOD_NAMES)
    for column, aggregation in enumerate(AGGREGATIONS)
)


def logprobs_of_one_rank(path: Path) -> Tensor:
    """What the old and the reference logprobs are made from."""
    batch = make_batch(seed=8, rows=ROWS)
    return (
        tiny_policy(path, {}, keep_reference=False)
        .score(LocalBatch(batch, [list(range(ROWS))]))
        .logprobs
    )


def losses_and_gradients(
    path: Path, layout: dict[str, Any], base: Tensor, chosen: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """(loss, gradient) of the (variant, cut) that are chosen, under "method/aggregation/cut"."""
    batch = make_batch(seed=8, rows=ROWS)
    policy = tiny_policy(path, layout, keep_reference=False)
    results: dict[str, Any] = {}
    for variant, make in variants().items():
        loss = MethodLoss(make(), batch, base)
        for cut, split in cuts(policy).items():
            if (variant, cut) not in chosen:
                continue
            totals = policy.backward(LocalBatch(batch, split), loss)
            gradient = {key: value.clone() for key, value in gathered_gradients(policy)}
            results[f"{variant}/{cut}"] = (totals.loss, gradient)
    policy.close()
    return results


@pytest.fixture(scope="module")
def one_rank(hf_models: Path) -> Callable[[str], Any]:
    """Logprobs of a model, and the losses and gradients of all variants, on one rank."""

    @cache
    def answer(model: str) -> tuple[Tensor, dict[str, Any]]:
        (base,) = call(1, logprobs_of_one_rank, hf_models / model)
        (results,) = call(1, losses_and_gradients, hf_models / model, {}, base, ALL, timeout=250)
        return base, results

    return answer


def model_of(name: str) -> str:
    return "qwen3_moe" if name.startswith("experts") else "llama"


def layouts() -> list[Any]:
    """(layout, chosen). On one rank, whose answers all are compared with, both cuts of everything;
    the layouts of the core tier have both cuts in the full one."""
    params = []
    for name, (processes, _, full) in TABLE.items():
        if full or processes == 1:
            params.append(pytest.param(name, ALL, marks=pytest.mark.full if full else (), id=name))
        else:
            params.append(pytest.param(name, ALTERNATING, id=name))
            params.append(pytest.param(name, ALL, marks=pytest.mark.full, id=f"{name}-both_cuts"))
    return params


@pytest.mark.parametrize(("name", "chosen"), layouts())
def test_a_layout_changes_neither_loss_nor_gradient(
    name: str,
    chosen: Sequence[tuple[str, str]],
    hf_models: Path,
    one_rank: Callable[[str], Any],
) -> None:
    processes, layout, _ = TABLE[name]
    base, wanted = one_rank(model_of(name))
    ranks = [wanted]
    if processes > 1:
        path = hf_models / model_of(name)
        ranks = call(processes, losses_and_gradients, path, layout, base, chosen, timeout=250)
    for rank in ranks:
        assert len(rank) == len(chosen)
        for key, (loss, gradient) in rank.items():
            # Both cuts are compared with one of them, on one rank.
            wanted_loss, wanted_gradient = wanted[f"{key.rpartition('/')[0]}/few"]
            assert abs(loss - wanted_loss) / abs(wanted_loss) <= 1e-6, key
            assert relative_error(gradient, wanted_gradient) <= 2e-6, key


def test_the_variants_differ(one_rank: Callable[[str], Any]) -> None:
    """Twelve different losses, so that an axis that is ignored would show."""
    _, results = one_rank("llama")
    values = sorted(loss for key, (loss, _) in results.items() if key.endswith("/few"))
    assert len(values) == len(METHOD_NAMES) * len(AGGREGATIONS)
    # apo's loss has grpo's value where the lengths do not trigger its two factors; these responses
    # do.
    assert all(b - a > 1e-6 for a, b in zip(values, values[1:], strict=False))
