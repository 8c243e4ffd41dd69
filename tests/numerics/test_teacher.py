"""Teachers on real megatron-core, of another size and in several layouts, against transformers and
plain torch (float32)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.config.method import load_method
from megatron_rl.passes import LocalBatch, TokenScores
from megatron_rl.signals import StepView, signals_of
from megatron_rl.trainer.minibatch_loss import MinibatchLoss
from megatron_rl.types import Prompt, SequenceBatch
from tests import zoo
from tests.numerics.host_waits_worker import near
from tests.numerics.policy_reference import (
    LAYOUTS,
    NUM_ROWS,
    TEMPERATURE,
    gradients,
    make_batch,
    relative_error,
    sequences,
)
from tests.numerics.policy_worker import splits
from tests.numerics.test_method_layouts import plain_logits
from tests.ranks import call
from tools.replay.gradients import gathered_gradients

MODEL = "qwen3"
# Family, seed and layers of the teacher of each data source; the policy has 4 layers.
TEACHERS = {"sums": ("qwen3", 5, 2), "words": ("qwen2", 6, 4)}
SOURCES = ["sums", "words", "words", "sums", "words", "sums"]
TOP_K = 6


def batch_with_likely() -> SequenceBatch:
    """With ``TOP_K`` tokens beside each response token; of every fifth there are four."""
    batch = make_batch()
    draw = torch.Generator().manual_seed(4)
    num_tokens = int(batch.response_lengths.sum())
    ids = torch.rand(num_tokens, 100, generator=draw).argsort(1)[:, :TOP_K].int()
    ids[::5, 4:] = -1
    return replace(batch, likely=ids)


def plain(model: torch.nn.Module, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Logprobs of the sampled tokens, and of the likely ones, by transformers; in float64."""
    logp = (plain_logits(model, batch) / TEMPERATURE).log_softmax(1)
    prompts = batch.prompt_lengths.tolist()
    rows = zip(sequences(batch), prompts, strict=True)
    sampled = torch.cat([ids[prompt:] for ids, prompt in rows])
    assert batch.likely is not None
    likely = logp.gather(1, batch.likely.clamp(min=0).long())
    return logp.gather(1, sampled[:, None])[:, 0], likely.masked_fill(batch.likely < 0, -torch.inf)


def plain_loss(name: str, p: Tensor, head: Tensor, old: Tensor, q: Tensor, other: Tensor) -> Tensor:
    """The mean over all tokens of the step, by the definition."""
    if name == "opd":
        advantages = q - p.detach()
        ratio = (p - old).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    total = p.new_zeros(())
    for own, teachers in zip(head, other, strict=True):
        there = teachers.isfinite()
        u, v = own[there].exp(), teachers[there].exp()
        u, v = torch.cat([u, 1 - u.sum()[None]]), torch.cat([v, 1 - v.sum()[None]])
        total = total + (u * (u / v).log()).sum()
    return total / len(p)


def plain_answers(folder: Path) -> dict[str, Any]:
    """What the teachers say, by source; old logprobs; loss and gradients of each method."""
    batch = batch_with_likely()
    each = {}
    for source, (family, seed, layers) in TEACHERS.items():
        zoo.save_tiny_model(family, folder / source, seed, layers)
        with torch.no_grad():
            each[source] = plain(zoo.tiny_model(family, seed, layers), batch)
    of_words = torch.tensor([source == "words" for source in SOURCES])[batch.response_index]
    (q, other), words = each["sums"], each["words"]
    assert (q - words[0]).abs().min() > 1e-3, "one teacher is not the other"
    q = torch.where(of_words, words[0], q)
    other = torch.where(of_words[:, None], words[1], other)
    found: dict[str, Any] = {"q": q, "other": other}
    for name in ("opd", "opd_top_k"):
        model = zoo.tiny_model(MODEL)
        p, head = plain(model, batch)
        experience = near(batch, p.detach().float(), torch.Generator().manual_seed(2))
        assert experience.old is not None
        loss = plain_loss(name, p, head, experience.old.logprobs.double(), q, other)
        loss.backward()
        found[name] = {"loss": loss.item(), "gradients": gradients(model)}
        found["experience"] = experience
    return found


def compare(path: Path, folder: Path, layout: dict[str, Any], wanted: dict[str, Any]) -> None:
    teacher = {source: str(folder / source) for source in TEACHERS}
    policy = zoo.tiny_policy(path, layout, teacher=teacher)
    batch = batch_with_likely()
    held = [
        one for each in policy.teachers for module in each._modules for one in module.parameters()
    ]
    for (cut, split), name in zip(splits(policy).items(), ("opd", "opd_top_k", "opd"), strict=True):
        method = load_method(name, ["policy_loss.top_k=6"] if name == "opd_top_k" else [])
        signals = signals_of(method)
        experience = wanted["experience"]
        prompts = [Prompt(f"row {row}", (1,), "", source) for row, source in enumerate(SOURCES)]
        experience = replace(experience, responses=replace(experience.responses, prompts=prompts))
        credit = replace(experience.credit, advantages=torch.zeros(NUM_ROWS))
        experience = replace(experience, credit=credit)
        rows = range(NUM_ROWS)
        local = LocalBatch(batch, split, torch.arange(NUM_ROWS))
        unasked: Any = None
        view = StepView(experience, rows, local, {}, policy, unasked, policy.teachers)
        of_tokens, others = signals.after_rollout(view)
        assert not others
        assert not any(tensor.untyped_storage().nbytes() for tensor in held), "away after a pass"
        everywhere = zoo.of_all_rows(TokenScores(of_tokens["teacher_logprobs"], of_tokens))
        close = {"rtol": 0, "atol": 1e-5}
        torch.testing.assert_close(everywhere.logprobs, wanted["q"].float(), **close)
        if name == "opd_top_k":
            found = everywhere.columns["teacher_likely_logprobs"]
            torch.testing.assert_close(found, wanted["other"].float(), **close)
        experience = replace(experience, token_columns=of_tokens)
        loss = MinibatchLoss(method, signals, experience, rows, experience.scored_tokens, local)
        totals = policy.backward(loss.batch, loss, signals.update_outputs)
        assert totals.loss == pytest.approx(wanted[name]["loss"], rel=2e-6, abs=1e-6), cut
        error = relative_error(dict(gathered_gradients(policy)), wanted[name]["gradients"])
        assert error <= 2e-6, f"{name}, {cut}: gradients off by {error}"
    policy.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teachers")


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    return plain_answers(folder)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "tensor" else pytest.mark.full) for name in LAYOUTS],
)
def test_teachers_and_what_is_learned_equal_plain_torch(
    layout: str, hf_models: Path, folder: Path, answers: dict[str, Any]
) -> None:
    """Each row by the teacher of its source, whole and cut; loss and gradient of both forms."""
    processes, fields = LAYOUTS[layout]
    call(processes, compare, hf_models / MODEL, folder, fields, answers, timeout=200)
