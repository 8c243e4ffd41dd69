"""Policies of tiny models in any layout, and a course of training that is the same in all of
them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_rl.config.load import compose
from megatron_rl.config.schema import OptimConfig, PrecisionConfig
from megatron_rl.passes import LocalBatch, LossOutput, TokenView
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.types import SequenceBatch
from tests import zoo
from tests.numerics.policy_cases import parallel
from tests.numerics.policy_state import record

SHARDED = {"distributed_optimizer": True}
OVERLAPPED = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
COURSE: dict[str, Any] = dict(
    learning_rate=3e-3,
    min_learning_rate=1e-4,
    schedule="cosine",
    warmup_steps=2,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    clip_grad=1.0,
)
OPTIM = OptimConfig(**(compose("optim/adam") | COURSE))


@dataclass(frozen=True)
class Case:
    """A policy: its layout (what differs from one rank), its number format, the model, whether a
    reference is kept."""

    name: str
    layout: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    model: str = "llama"
    reference: bool = False
    lora: dict[str, Any] = field(default_factory=dict)


def precision(case: Case) -> PrecisionConfig:
    return PrecisionConfig(**{**compose("precision/fp32"), "params": case.dtype})


def build(models: Path, case: Case) -> MegatronPolicy:
    run: Any = SimpleNamespace(
        model=zoo.model_config(models / case.model, make_vocab_divisible_by=8, lora=case.lora),
        parallel=parallel(**case.layout),
        precision=precision(case),
        optim=OPTIM,
    )
    chosen = dict(temperature=0.9, keep_reference=case.reference, total_optimizer_steps=6)
    return zoo.configured_policy(run, 64, **chosen)


def batch(step: int) -> SequenceBatch:
    g = torch.Generator().manual_seed(100 + step)
    prompts = torch.randint(2, 6, (8,), generator=g)
    responses = torch.randint(3, 12, (8,), generator=g)
    num_tokens = int((prompts + responses).sum())
    token_ids = torch.randint(3, 123, (num_tokens,), generator=g)
    return SequenceBatch(prompts, responses, token_ids=token_ids)


def shares(policy: MegatronPolicy, count: int) -> list[list[int]]:
    """The 8 rows of a batch, shared by the data-parallel ranks in ``count`` micro-batches each."""
    rows = torch.arange(8).chunk(policy.ranks.data)[policy.ranks.data_rank]
    return [part.tolist() for part in rows.chunk(count)]


def update(policy: MegatronPolicy, step: int) -> float:
    """One optimizer step on ``batch(step)``."""
    data = batch(step)
    weights = torch.randn(
        int(data.response_lengths.sum()), generator=torch.Generator().manual_seed(step)
    )

    def loss(view: TokenView) -> LossOutput:
        value = -(view.logprobs * weights[view.index]).sum() / weights.numel()
        return LossOutput(value, {})

    result = policy.update(LocalBatch(data, shares(policy, 4)), loss)
    assert not result.skipped
    return result.grad_norm


def trajectory(policy: MegatronPolicy, steps: range) -> dict[str, Any]:
    norms = [update(policy, step) for step in steps]
    logprobs = zoo.of_all_rows(policy.score(LocalBatch(batch(9), shares(policy, 2)))).logprobs
    return {
        "norms": norms,
        "logprobs": logprobs,
        "state": record(policy),
        "optimizer_steps": policy.optimizer_steps,
    }
