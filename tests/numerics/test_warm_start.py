"""A supervised step on real megatron-core, in several layouts, against the cross entropy of
transformers with its labels of the prompt masked (float32)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config.method import load_method
from megatron_rl.data.loader import PromptLoader
from megatron_rl.loss import Credit, LossOutput
from megatron_rl.passes import LocalBatch
from megatron_rl.runtime.launch import World
from megatron_rl.signals import signals_of
from megatron_rl.trainer.minibatch_loss import MinibatchLoss
from megatron_rl.trainer.placement import Placement
from megatron_rl.trainer.warm_start import GivenRows
from megatron_rl.types import Prompt
from tests import zoo
from tests.numerics.policy_reference import LAYOUTS, NUM_ROWS, gradients, make_batch, relative_error
from tests.ranks import call
from tools.replay.gradients import gathered_gradients

MODEL = "qwen3"
ROWS = [
    ((5, 6, 7), "ab"),
    ((8,), "c"),
    ((5, 6, 7), "defgh"),
    ((9, 9), "ij"),
    ((4, 3), "klmno"),
    ((7,), "p"),
]
END = 2


def encode(text: str) -> list[int]:
    return [*(ord(letter) - 90 for letter in text), END]


def plain_answer() -> dict[str, Any]:
    """The mean over response tokens, by transformers' own loss."""
    model = zoo.tiny_model(MODEL)
    total = torch.zeros(())
    num_tokens = 0
    for prompt, response in ROWS:
        ids = torch.tensor([[*prompt, *encode(response)]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        num_here = len(encode(response))
        total = total + model(ids, labels=labels).loss * num_here
        num_tokens += num_here
    (total / num_tokens).backward()
    return {"loss": total.item() / num_tokens, "gradients": gradients(model)}


def compare(path: Path, layout: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The policy samples at temperature 0.7, and learns the model at temperature 1."""
    policy = zoo.tiny_policy(path, layout)
    temperature = policy.settings.temperature
    assert temperature != 1
    rank = dist.get_rank()
    world = World(rank, dist.get_world_size(), rank, "test", dist.group.WORLD)
    prompts = [
        Prompt(f"row:{number}", ids, answer, "rows") for number, (ids, answer) in enumerate(ROWS)
    ]
    loader = PromptLoader(prompts, seed=1, shuffle=True)
    experience = GivenRows(prompts, loader, encode, len(ROWS), temperature, world).next()
    method = load_method("sft")
    signals = signals_of(method)
    placement = Placement(policy.batching, world)
    experience = placement.to_owners(experience)
    given = torch.from_numpy(experience.responses.is_demonstration)
    ones = torch.ones(len(ROWS))
    credit = Credit(ones, ones, given, {})
    experience = replace(experience, credit=credit, columns={"is_demonstration": given})
    rows = range(len(ROWS))
    placed = placement.rebalanced_for(experience, rows)
    loss = MinibatchLoss(method, signals, experience, rows, placed.tokens, placed.local)
    totals = policy.backward(loss.batch, loss)
    assert totals.loss == pytest.approx(wanted["loss"], rel=1e-6)
    assert totals.metrics["loss/policy"] == pytest.approx(wanted["loss"], rel=1e-6)
    error = relative_error(dict(gathered_gradients(policy)), wanted["gradients"])
    assert error <= 2e-6, f"gradients off by {error}"
    policy.close()


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    return plain_answer()


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "tensor" else pytest.mark.full) for name in LAYOUTS],
)
def test_a_supervised_step_has_the_cross_entropy_of_transformers(
    layout: str, hf_models: Path, answer: dict[str, Any]
) -> None:
    processes, fields = LAYOUTS[layout]
    call(processes, compare, hf_models / MODEL, fields, answer)


def renew(path: Path, layout: dict[str, Any]) -> None:
    """The reference of the steps after a warm start is what it has made."""
    policy = zoo.tiny_policy(path, layout, warm_start_steps=1, warm_start_rate=0.2)
    batch = make_batch()
    local = LocalBatch(batch, [list(range(NUM_ROWS))])
    start = policy.score(local, reference=True).logprobs
    result = policy.update(local, lambda view: LossOutput(-view.logprobs.mean(), {}))
    assert result.learning_rate == 0.2
    made = policy.score(local).logprobs
    assert (made - start).abs().max() > 0.1
    assert torch.equal(policy.score(local, reference=True).logprobs, start)
    policy.renew_reference()
    result = policy.update(local, lambda view: LossOutput(view.logprobs.mean(), {}))
    assert result.learning_rate == policy.optim.learning_rate == 0.1
    assert torch.equal(policy.score(local, reference=True).logprobs, made)
    policy.close()


def test_the_reference_is_renewed(hf_models: Path) -> None:
    call(1, renew, hf_models / MODEL, {})
