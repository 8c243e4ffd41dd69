"""Methods that look inside a response, on the real policy: loss, metrics and gradients of every
layout and cut into micro-batches are those of transformers and the loss of the whole batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_rl.config.method import load_method
from megatron_rl.loss import TokenBatch
from megatron_rl.loss.per_token.entropy_anchor import find_peaks
from megatron_rl.loss.segments import group_accuracy
from megatron_rl.passes import LocalBatch, Output
from megatron_rl.policy.passes import forward
from megatron_rl.rollouts.rows.experience import Experience
from megatron_rl.signals import Signals, signals_of
from megatron_rl.trainer.minibatch_loss import MinibatchLoss
from megatron_rl.types import SequenceBatch
from tests import zoo
from tests.numerics.host_waits_worker import near
from tests.numerics.policy_reference import (
    NUM_ROWS,
    TEMPERATURE,
    gradients,
    make_batch,
    relative_error,
    sequences,
)
from tests.numerics.policy_worker import splits
from tests.ranks import call
from tools.replay.gradients import gathered_gradients

MODEL = "qwen3"
NAMES = ("archer", "rl_zvp", "entropy_advantage", "simko", "pacs", "siren", "laser")
NAMES += ("score_centered",)
LIMIT = 16
START = 0.4  # the entropy that siren goes back to
CORRECT = torch.tensor([True, False, True, True, True, True])  # one group of each kind
WAS_CUT = torch.tensor([False, False, False, True, False, False])


def batch_of(name: str) -> SequenceBatch:
    """With six tokens beside each response token where they are read; of some there are fewer."""
    batch = make_batch()
    if name != "score_centered":
        return batch
    draw = torch.Generator().manual_seed(4)
    ids = torch.rand(int(batch.response_lengths.sum()), 100, generator=draw).argsort(1)[:, :6].int()
    ids[::5, 4:] = -1
    return replace(batch, likely=ids)


def experience_of(batch: SequenceBatch, logprobs: Tensor) -> Experience:
    """With the logprobs of the sampler's likely tokens, where they are read."""
    draw = torch.Generator().manual_seed(2)
    experience = near(batch, logprobs, draw)
    token_columns = {}
    if batch.likely is not None:  # masses of about a half
        of_sampler = torch.rand(batch.likely.shape, generator=draw) - 3
        of_sampler[batch.likely < 0] = -torch.inf
        token_columns["sampler_likely_logprobs"] = of_sampler
    return replace(experience, correct=CORRECT, token_columns=token_columns)


def token_batch(
    experience: Experience, batch: SequenceBatch, logits: Tensor, ends: Tensor
) -> TokenBatch:
    """All tokens at once; ``logits``: [tokens, vocabulary] with their graph, in float64; ``ends``:
    the same behind each response."""
    logp = torch.log_softmax(logits / TEMPERATURE, -1)
    tokens = torch.from_numpy(experience.responses.tokens.columns["token_ids"]).long()
    logprobs = logp.gather(1, tokens[:, None])[:, 0]
    topk = logp.topk(3, dim=1)
    nucleus = nucleus_entropy(logp)
    of_likely = {}
    if batch.likely is not None:
        of_likely["likely_logprobs"] = logp.gather(1, batch.likely.clamp(min=0).long())
        of_likely |= {name: one.double() for name, one in experience.token_columns.items()}
    assert experience.old is not None and experience.ref is not None and experience.credit
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=experience.old.logprobs.double(),
        response_index=batch.response_index,
        loss_mask=torch.ones_like(logprobs, dtype=torch.bool),
        advantages=experience.credit.advantages.double(),
        kl_weights=torch.ones(NUM_ROWS, dtype=torch.float64),
        ref_logprobs=experience.ref.logprobs.double(),
        sampler_logprobs=torch.from_numpy(
            experience.responses.tokens.columns["sampler_logprobs"]
        ).double(),
        correct=experience.correct,
        group_ids=experience.group_ids,
        token_columns={
            "entropy": -(logp.exp() * logp).sum(-1),
            "topk_logprobs": topk.values,
            "is_argmax": topk.indices[:, 0] == tokens,
            "nucleus_entropy": nucleus,
            **of_likely,
        },
        columns={
            "log_ratio_sums": sums_of(experience, logprobs.detach()),
            "group_accuracy": group_accuracy(experience.correct, experience.group_ids),
            "peaks": plain_peaks(nucleus.detach()),
            "end_logprobs": torch.log_softmax(ends / TEMPERATURE, -1)[:, 0],
            "end_index": torch.arange(NUM_ROWS),
            "end_start": torch.tensor(START, dtype=torch.float64),
            "was_cut": WAS_CUT,
        },
    )


def nucleus_entropy(logp: Tensor) -> Tensor:
    """Of the most likely tokens up to the one with which they reach 0.8, sorted."""
    ordered, place = logp.sort(1, descending=True)
    before = ordered.exp().cumsum(1) - ordered.exp()
    kept = torch.zeros_like(logp, dtype=torch.bool).scatter(1, place, before < 0.8)
    log_q = logp.masked_fill(~kept, -torch.inf).log_softmax(1)
    return -(log_q.exp() * log_q.masked_fill(~kept, 0)).sum(1)


def plain_peaks(entropies: Tensor) -> Tensor:
    bound = torch.quantile(entropies, 0.8)
    high = entropies[entropies >= bound]
    return torch.tensor([bound - 1e-9, len(high), high.mean(), START], dtype=torch.float64)


def sums_of(experience: Experience, logprobs: Tensor) -> Tensor:
    """How far each response's logprobs are from the old ones."""
    assert experience.old is not None
    moved = logprobs.double() - experience.old.logprobs.double()
    rows = torch.arange(NUM_ROWS).repeat_interleave(experience.sequences.response_lengths)
    return torch.zeros(NUM_ROWS, dtype=torch.float64).index_add(0, rows, moved)


def plain_logits(model: torch.nn.Module, batch: SequenceBatch) -> Tensor:
    """Of every response token, by transformers on whole sequences, in float64."""
    prompts = batch.prompt_lengths.tolist()
    rows = zip(sequences(batch), prompts, strict=True)
    return torch.cat([model(ids[None]).logits[0, prompt - 1 : -1].double() for ids, prompt in rows])


def end_logits(model: torch.nn.Module, batch: SequenceBatch) -> Tensor:
    """Of what follows each response."""
    return torch.stack([model(ids[None]).logits[0, -1].double() for ids in sequences(batch)])


def plain_answers(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Of each method: loss, metrics and gradients; of all, old logprobs to start from."""
    found = {}
    for name in names:
        batch = batch_of(name)
        model = zoo.tiny_model(MODEL)
        logits = plain_logits(model, batch)
        tokens = torch.cat(
            [
                ids[prompt:]
                for ids, prompt in zip(sequences(batch), batch.prompt_lengths, strict=True)
            ]
        )
        logp = torch.log_softmax(logits.detach() / TEMPERATURE, -1)
        experience = experience_of(batch, logp.gather(1, tokens[:, None])[:, 0].float())
        method = load_method(name, response_limit=LIMIT)
        ends = end_logits(model, batch)
        result = method.loss(token_batch(experience, batch, logits, ends))
        result.loss.backward()
        found[name] = {
            "experience": experience,
            "loss": result.loss.item(),
            "metrics": {key: value.item() for key, value in result.metrics.items()},
            "gradients": gradients(model),
        }
    return found


def nucleus_of(signals: Signals) -> list[Output]:
    return [output for output in signals.update_outputs if output.name == "nucleus_entropy"]


def compare(
    path: Path, layout: dict[str, Any], answers: dict[str, dict[str, Any]], one_cut: bool = False
) -> None:
    """On every rank: each method, each cut into micro-batches; or, with ``one_cut``, one for each
    method, all of them in turn."""
    for number, (name, wanted) in enumerate(answers.items()):
        batch = batch_of(name)
        method = load_method(name, response_limit=LIMIT)
        signals = signals_of(method)
        policy = zoo.tiny_policy(path, layout)
        cuts = list(splits(policy).items())
        for cut, split in cuts[number % 3 :][:1] if one_cut else cuts:
            what = f"{name}, {cut}"
            experience = wanted["experience"]
            rows = range(NUM_ROWS)
            scores = policy.score(LocalBatch(batch, split), nucleus_of(signals))
            scores = zoo.of_all_rows(scores)
            accuracy = group_accuracy(experience.correct, experience.group_ids)
            columns = {
                "log_ratio_sums": sums_of(experience, scores.logprobs),
                "group_accuracy": accuracy,
                "end_start": torch.tensor(START, dtype=torch.float64),
                "was_cut": WAS_CUT,
            }
            if "nucleus_entropy" in scores.columns:
                found = find_peaks(scores.columns["nucleus_entropy"], 0.8)
                columns["peaks"] = torch.tensor([*found, START], dtype=torch.float64)
            placed = replace(experience, columns=columns)
            local = LocalBatch(batch, split, torch.arange(NUM_ROWS))
            loss = MinibatchLoss(method, signals, placed, rows, experience.scored_tokens, local)
            totals = policy.backward(loss.batch, loss, signals.update_outputs)
            wanted_loss = pytest.approx(wanted["loss"], rel=1e-6, abs=1e-6)
            assert totals.loss == wanted_loss, what
            for key, value in totals.metrics.items():
                assert value == pytest.approx(wanted["metrics"][key], rel=2e-6, abs=1e-6), (
                    f"{what}: {key}"
                )
            found = dict(gathered_gradients(policy))
            error = relative_error(found, wanted["gradients"])
            assert error <= 2e-6, f"{what}: gradients off by {error}"
        policy.close()


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "data": (2, {}),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    return plain_answers(NAMES)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_with_transformers(
    layout: str, hf_models: Path, answers: dict[str, dict[str, Any]]
) -> None:
    processes, fields = LAYOUTS[layout]
    call(processes, compare, hf_models / MODEL, fields, answers, timeout=200)


def test_tensor_ranks_agree_with_transformers(
    hf_models: Path, answers: dict[str, dict[str, Any]]
) -> None:
    processes, fields = LAYOUTS["tensor"]
    call(processes, compare, hf_models / MODEL, fields, answers, one_cut=True, timeout=200)


def differ_without_gathering(path: Path, answers: dict[str, dict[str, Any]]) -> None:
    with (
        mock.patch.object(forward, "sequence_gather", lambda *_: lambda columns: columns),
        pytest.raises(AssertionError, match="archer, whole"),
    ):
        compare(path, {"context": 2}, answers)


@pytest.mark.full
def test_quantiles_of_half_a_response_are_noticed(
    hf_models: Path, answers: dict[str, dict[str, Any]]
) -> None:
    """The comparison above can fail: context ranks that gather nothing gate other tokens."""
    call(2, differ_without_gathering, hf_models / MODEL, {"archer": answers["archer"]})
