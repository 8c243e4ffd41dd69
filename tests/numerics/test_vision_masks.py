"""A method that looks at masked images, on the real policy: loss, metrics and gradients of every
layout and cut into micro-batches are those of transformers, asked once for each image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_rl.config.method import load_method
from megatron_rl.data.multimodal.masks import masked
from megatron_rl.loss import Method, TokenBatch
from megatron_rl.passes import LocalBatch
from megatron_rl.signals import masked_images, signals_of
from megatron_rl.signals.masked_images import mask_seed, with_masked_images
from megatron_rl.trainer.minibatch_loss import MinibatchLoss
from megatron_rl.types import Image, SequenceBatch
from tests import zoo
from tests.numerics.host_waits_worker import near, scored
from tests.numerics.policy_reference import NUM_ROWS, TEMPERATURE, relative_error, sequences
from tests.numerics.policy_worker import splits
from tests.numerics.seeing import hf_logits, published_name, seeing_batch, seeing_policy
from tests.ranks import call
from tools.replay.gradients import gathered_gradients

MODEL = "qwen2_5_vl"
RUN_SEED, STEP = 11, 3
SEED = mask_seed(RUN_SEED, STEP)
# Terms large enough that none hides behind another; an entropy of the policy's own beside them.
TERMS = ["perception.gamma=0.5", "perception.eta=0.3", "perception.eta_masked=0.2"]
CASES = {
    "current": [*TERMS, "entropy.coef=0.1"],
    "old": [*TERMS, "perception.masked=old"],
    "unmasked": [*TERMS, "perception.mask_ratio=0"],
}


def papo(case: str) -> Method:
    return load_method("papo", CASES[case], response_limit=16)


def plain_logp(model: Any, batch: SequenceBatch, ratio: float | None) -> Tensor:
    """``[tokens, vocabulary]`` at every response token, in float64, of one whole sequence after the
    other; ``ratio``: given the masked images."""
    assert batch.images is not None
    found = []
    rows = zip(sequences(batch), batch.prompt_lengths.tolist(), batch.images, strict=True)
    for tokens, prompt, images in rows:
        seen: tuple[Image, ...] = images
        if ratio is not None:
            seen = tuple(masked(image, ratio, SEED) for image in images)
        logits = hf_logits(model, tokens, prompt, seen)[prompt - 1 : -1].double()
        found.append(torch.log_softmax(logits / TEMPERATURE, -1))
    return torch.cat(found)


def plain_answer(case: str) -> dict[str, Any]:
    """Loss, metrics and gradients of one case, and the experience to start from."""
    batch = seeing_batch()
    model = zoo.tiny_model(MODEL)
    method = papo(case)
    logp = plain_logp(model, batch, None)
    hidden = plain_logp(model, batch, method.config.perception.mask_ratio)
    tokens = torch.from_numpy(scored(batch).responses.tokens.columns["token_ids"]).long()
    logprobs = logp.gather(1, tokens[:, None])[:, 0]
    of_masked = hidden.gather(1, tokens[:, None])[:, 0]
    columns = {"masked_logprobs": of_masked.detach().float()}
    scores = near(batch, logprobs.detach().float(), torch.Generator().manual_seed(2))
    experience = replace(scores, token_columns=columns, step=STEP)
    assert experience.old is not None and experience.ref is not None and experience.credit
    result = method.loss(
        TokenBatch(
            logprobs=logprobs,
            old_logprobs=experience.old.logprobs.double(),
            response_index=batch.response_index,
            loss_mask=torch.ones_like(logprobs, dtype=torch.bool),
            advantages=experience.credit.advantages.double(),
            kl_weights=torch.ones(NUM_ROWS, dtype=torch.float64),
            ref_logprobs=experience.ref.logprobs.double(),
            token_columns={
                "entropy": -(logp.exp() * logp).sum(-1),
                "masked_logprobs": of_masked.detach() if case == "old" else of_masked,
            },
        )
    )
    result.loss.backward()
    return {
        "experience": experience if case == "old" else replace(experience, token_columns={}),
        "logprobs": logprobs.detach(),
        "masked": of_masked.detach(),
        "loss": result.loss.item(),
        "metrics": {key: value.item() for key, value in result.metrics.items()},
        "gradients": {published_name(key): each.grad for key, each in model.named_parameters()},
    }


def compare(path: Path, layout: dict[str, Any], answers: dict[str, dict[str, Any]]) -> None:
    """On every rank: each case, each cut into micro-batches."""
    batch = seeing_batch()
    for case, wanted in answers.items():
        method = papo(case)
        signals = signals_of(method, RUN_SEED)
        policy = seeing_policy(path, layout)
        for cut, split in splits(policy).items():
            what = f"{case}, {cut}"
            assert method.config.perception is not None
            ratio = method.config.perception.mask_ratio
            hidden = with_masked_images(LocalBatch(batch, split), ratio, SEED)
            scores = zoo.of_all_rows(policy.score(hidden))
            torch.testing.assert_close(
                scores.logprobs.double(), wanted["masked"], rtol=0, atol=5e-6, msg=what
            )
            experience = wanted["experience"]
            local = LocalBatch(batch, split, torch.arange(NUM_ROWS))
            tokens = experience.scored_tokens
            loss = MinibatchLoss(method, signals, experience, range(NUM_ROWS), tokens, local)
            totals = policy.backward(loss.batch, loss, signals.update_outputs)
            assert totals.loss == pytest.approx(wanted["loss"], rel=1e-6, abs=1e-6), what
            for key, value in totals.metrics.items():
                assert value == pytest.approx(wanted["metrics"][key], rel=5e-6, abs=1e-6), (
                    f"{what}: {key}"
                )
            error = relative_error(dict(gathered_gradients(policy)), wanted["gradients"])
            assert error <= 2e-6, f"{what}: gradients off by {error}"
        policy.close()


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tensor": (2, {"tensor": 2, "sequence": True}),
    "context": (2, {"context": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "data": (2, {}),
    "all": (4, {"tensor": 2, "sequence": True, "pipeline": 2}),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    return {case: plain_answer(case) for case in CASES}


def test_the_case_is_one_where_masks_matter(answers: dict[str, dict[str, Any]]) -> None:
    """Or what follows would say nothing; the last row has no image."""
    moved = (answers["current"]["masked"] - answers["current"]["logprobs"]).abs()
    assert moved[:-3].min() > 1e-4 and moved.max() > 0.05 and not moved[-3:].any()
    assert not (answers["unmasked"]["masked"] - answers["unmasked"]["logprobs"]).any()
    assert answers["unmasked"]["metrics"]["kl/perception_mean"] == 0
    with_gradient, without = (answers[case]["gradients"] for case in ("current", "old"))
    assert relative_error(with_gradient, without) > 0.01


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "one rank" else pytest.mark.full) for name in LAYOUTS],
)
def test_layouts_agree_with_transformers(
    layout: str, seeing_models: Path, answers: dict[str, dict[str, Any]]
) -> None:
    processes, fields = LAYOUTS[layout]
    call(processes, compare, seeing_models / MODEL, fields, answers, timeout=200)


def differ_with_one_prompt(path: Path, answers: dict[str, dict[str, Any]]) -> None:
    plain = masked_images._with_copies

    def same_prompts(share: LocalBatch, ratio: float, seed: int) -> LocalBatch:
        """The planted bug: a copy behind its row borrows the prompt that sees the image."""
        both = plain(share, ratio, seed)
        assert share.batch.prompt_index is not None
        prompt_index = share.batch.prompt_index.repeat(2)
        return LocalBatch(replace(both.batch, prompt_index=prompt_index), both.microbatches)

    with (
        mock.patch.object(masked_images, "_with_copies", same_prompts),
        pytest.raises(AssertionError, match="current, each"),
    ):
        compare(path, {}, answers)


@pytest.mark.full
def test_copies_that_borrow_a_plain_prompt_are_noticed(
    seeing_models: Path, answers: dict[str, dict[str, Any]]
) -> None:
    """The comparison above can fail."""
    case = {"current": answers["current"]}
    call(1, differ_with_one_prompt, seeing_models / MODEL, case, timeout=200)
