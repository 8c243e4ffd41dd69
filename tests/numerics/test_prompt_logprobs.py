"""Logprobs of the prompts' tokens come with those of the responses, in every layout and cut into
micro-batches, and ARM's credit is made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.config.method import load_method
from megatron_rl.loss import ResponseBatch
from megatron_rl.passes import LocalBatch, Output
from megatron_rl.signals import signals_of
from tests import zoo
from tests.distributed.owned_rows_worker import ONE_ROW, parts
from tests.numerics.policy_reference import TEMPERATURE, make_batch, sequences
from tests.numerics.policy_worker import splits
from tests.ranks import call

MODEL = "qwen3"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "data": (2, {}),
}
EVERY = [
    pytest.param(name, marks=() if name in ("one rank", "context") else pytest.mark.full)
    for name in LAYOUTS
]

PROMPTS = [Output("prompt_logprobs")]


def plain_logprobs(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Of all tokens but the first, by transformers."""
    logp = torch.log_softmax(model(ids[None]).logits[0, :-1].double() / TEMPERATURE, -1)
    return logp.gather(1, ids[1:, None])[:, 0].detach()


def compare(path: Path, layout: dict[str, Any]) -> None:
    """On every rank: each cut, with prompts computed once and for every response."""
    batch = make_batch(seed=5)
    hf = zoo.tiny_model(MODEL)
    whole = [plain_logprobs(hf, ids) for ids in sequences(batch)]
    lengths = batch.prompt_lengths.tolist()
    wanted = torch.cat(
        [values[: prompt - 1] for values, prompt in zip(whole, lengths, strict=True)]
    )
    responses = torch.cat(
        [values[prompt - 1 :] for values, prompt in zip(whole, lengths, strict=True)]
    )
    first = batch.prompt_lengths.cumsum(0) - batch.prompt_lengths
    predicted = torch.ones(int(batch.prompt_lengths.sum()), dtype=torch.bool)
    predicted[first] = False
    assert len(wanted) > 12
    for share in (True, False):
        policy = zoo.tiny_policy(path, layout, share_prompts=share)
        for cut, split in splits(policy).items():
            what = f"{cut}, shared {share}"
            found = zoo.of_all_rows(policy.score(LocalBatch(batch, split), PROMPTS))
            error = (found.columns["prompt_logprobs"][predicted] - wanted).abs().max()
            assert error < 1e-5, f"{what}: prompts off by {error}"
            error = (found.logprobs - responses).abs().max()
            assert error < 1e-5, f"{what}: responses off by {error}"
        assert not policy.score(LocalBatch(batch, split)).columns
        policy.close()


@pytest.mark.parametrize("layout", EVERY)
def test_layouts_agree_with_transformers(layout: str, hf_models: Path) -> None:
    processes, fields = LAYOUTS[layout]
    call(processes, compare, hf_models / MODEL, fields, timeout=200)


def credits(path: Path, layout: dict[str, Any]) -> list[float]:
    """ARM's advantages of a step, by the real learner; rank 0 checks them by hand."""
    rollouts, learner, policy = parts(path, layout, 1, ONE_ROW)
    method = load_method("arm")
    scored = replace(learner, method=method, signals=signals_of(method)).score(rollouts.collect(1))
    policy.close()
    assert scored.credit is not None
    return scored.credit.advantages.tolist()


def plain_credits(path: Path) -> Tensor:
    """The same from the tokens of the step, by transformers, one sequence after another."""
    rollouts, learner, policy = parts(path, {}, 1, ONE_ROW)
    experience = learner.score(rollouts.collect(1))
    policy.close()
    assert experience.local is not None
    batch = experience.local.batch
    hf = zoo.tiny_model(MODEL, layers=2)

    def confidence(logprobs: Tensor) -> float:
        tail = logprobs.sort().values[: max(1, -(-len(logprobs) // 5))]
        return tail.mean().exp().item()

    def of_rows(rows: list[Tensor]) -> Tensor:
        return torch.tensor([confidence(row) for row in rows])

    whole = [plain_logprobs(hf, ids) for ids in sequences(batch)]
    by_row = list(zip(whole, batch.prompt_lengths.tolist(), strict=True))
    credit = load_method("arm").credit(
        ResponseBatch(
            rewards=experience.rewards,
            correct=experience.correct,
            group_ids=experience.group_ids,
            response_tokens=experience.sequences.response_lengths,
            columns={
                "prompt_confidence": torch.tensor([confidence(row[: p - 1]) for row, p in by_row]),
                "response_confidence": torch.tensor(
                    [confidence(row[p - 1 :]) for row, p in by_row]
                ),
            },
        )
    )
    return credit.advantages


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    path = zoo.save_tiny_model(MODEL, tmp_path_factory.mktemp("model"), layers=2)
    (plain,) = call(1, plain_credits, path)
    return path, plain.tolist()


@pytest.mark.parametrize("layout", EVERY)
def test_credit_is_that_of_transformers(layout: str, small: tuple[Path, list[float]]) -> None:
    path, plain = small
    processes, fields = LAYOUTS[layout]
    for found in call(processes, credits, path, fields, timeout=200):
        assert found == pytest.approx(plain, abs=1e-6)


def test_the_gap_is_felt(small: tuple[Path, list[float]]) -> None:
    """The comparison above can fail: without confidences the advantages are others."""
    path, plain = small
    (found,) = call(1, without_gap, path)
    assert max(abs(one - other) for one, other in zip(found, plain, strict=True)) > 1e-3


def without_gap(path: Path) -> list[float]:
    rollouts, learner, policy = parts(path, {}, 1, ONE_ROW)
    method = load_method("arm", ["shaping.confidence_gap=null"])
    scored = replace(learner, method=method, signals=signals_of(method)).score(rollouts.collect(1))
    policy.close()
    assert scored.credit is not None
    return scored.credit.advantages.tolist()
