"""The bridge from the flat token layout to ``Method``: credit of a rollout, loss of a minibatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from megatron_rl.config.schema import BatchConfig
from megatron_rl.data.token_rows import TokenRows
from megatron_rl.loss import Credit, Method, ResponseBatch, TokenBatch
from megatron_rl.loss.segments import group_accuracy
from megatron_rl.protocols import Entropy
from megatron_rl.rollouts.experience import Experience
from megatron_rl.rollouts.partials import of_all_rows
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.transfer import to_device
from megatron_rl.signals.end_token import EndTokens, with_end_token
from megatron_rl.signals.histories import Histories
from megatron_rl.signals.masked_images import MaskedCopies, with_masked_copies
from megatron_rl.types import (
    LossOutput,
    Prompt,
    Share,
    TokenScores,
    TokenView,
    UpdateResult,
)

# What a method wants entropies for, and what the policy then computes.
ENTROPY: dict[str, Entropy] = {"none": "none", "metric": "value", "value": "value", "grad": "grad"}


def token_settings(method: Method) -> dict[str, Any]:
    """The settings of a policy that say what it computes of a token beside its logprob."""
    wanted = method.needs.entropy
    return {
        "entropy": ENTROPY[wanted],
        "entropy_in_loss": wanted in ("value", "grad"),
        "top_k": method.needs.top_k,
        "nucleus": method.needs.nucleus,
    }


def tokens_per_microbatch(config: BatchConfig, method: Method) -> int:
    """The tokens of plain sequences that a micro-batch may have: half of its tokens where each is
    seen once more."""
    return config.tokens_per_microbatch // method.config.sequences_per_response


def on_cpu(scores: TokenScores) -> TokenScores:
    """``scores`` on the host."""
    moved: dict[str, Any] = {}
    for field in fields(scores):
        values = getattr(scores, field.name)
        moved[field.name] = None if values is None else values.cpu()
    return TokenScores(**moved)


def credit_of(experience: Experience, method: Method, world: World, histories: Histories) -> Credit:
    """Collective where the method reads tokens or logprobs: advantages, KL weights and kept rows of
    a whole rollout. What the method remembers of the prompts is noted in ``histories``.

    The prompts have passed ``check_visual_entropy``; ``experience`` has its old logprobs where the
    method reads statistics of them.
    """
    uids = [prompt.uid for prompt in experience.responses.prompts]
    credit = method.credit(
        ResponseBatch(
            rewards=_shaped_rewards(experience, method, world),
            correct=experience.correct,
            group_ids=experience.group_ids,
            response_tokens=experience.sequences.response_lengths,
            truncated=experience.truncated,
            visual_entropy=_visual_entropy(experience) if method.needs.visual_entropy else None,
            progress=experience.progress,
            **_statistics(experience, method, world),
            **(histories.fields(uids) if method.needs.history else {}),
        )
    )
    if credit.history is not None:
        histories.note(uids, credit.history)
    return credit


def _shaped_rewards(
    experience: Experience, method: Method, world: World
) -> Float[Tensor, " responses"]:
    """Where the method reads token ids, each response is judged by its holder."""
    lengths = experience.sequences.response_lengths
    if not method.needs.token_ids:
        return method.shape_rewards(experience.rewards, lengths, experience.truncated)
    tokens = experience.responses.tokens
    here = torch.from_numpy(tokens.rows)
    shaped = method.shape_rewards(
        experience.rewards[here],
        lengths[here],
        experience.truncated[here],
        torch.from_numpy(tokens.columns["token_ids"]),
    )
    return _of_all_rows(experience, {"rewards": shaped}, world)["rewards"]


def _statistics(experience: Experience, method: Method, world: World) -> dict[str, Tensor]:
    """What the method wants to know of each response's old logprobs."""
    if not method.needs.response_statistics:
        return {}
    assert experience.share is not None
    assert experience.old is not None, "statistics are of old logprobs"
    old = experience.old.logprobs
    ref = None if experience.ref is None else experience.ref.logprobs
    batch = experience.share.batch
    # The layout has response tokens alone: all of them count.
    mask = torch.ones_like(old, dtype=torch.bool)
    statistics = method.response_statistics(
        old, ref, batch.response_index, mask, batch.num_responses
    )
    if method.needs.prompt_logprobs:
        assert experience.old.prompt_logprobs is not None
        row = torch.repeat_interleave(torch.arange(batch.num_responses), batch.prompt_lengths)
        # [prompt tokens]: all but the first of each row, which nothing predicts.
        predicted = torch.nn.functional.pad(row[1:] == row[:-1], (1, 0))
        logprobs = experience.old.prompt_logprobs[predicted]
        statistics |= method.prompt_statistics(logprobs, row[predicted], batch.num_responses)
    return _of_all_rows(experience, statistics, world)


def _of_all_rows(
    experience: Experience, values: Mapping[str, Tensor], world: World
) -> dict[str, Tensor]:
    """Collective: ``values``, one number for each row of this rank, for all rows, in their own
    format (float64 holds what every smaller format holds)."""
    # [rows of this rank, values]; the table is [all rows, values].
    partials = torch.stack([each.double() for each in values.values()], 1).numpy()
    table = torch.from_numpy(of_all_rows(experience.responses, partials, world))
    columns = zip(values.items(), table.unbind(1), strict=True)
    return {name: column.to(each.dtype) for (name, each), column in columns}


def check_visual_entropy(prompts: Iterable[Prompt], method: Method) -> None:
    """Raises ValueError where the method needs visual_entropy and a prompt neither carries it nor
    has images to compute it from (``trainer.visual_entropies``)."""
    if not method.needs.visual_entropy:
        return
    for prompt in prompts:
        if "visual_entropy" not in prompt.extra and not prompt.images:
            raise ValueError(
                f"prompt {prompt.uid}: the method needs extra.visual_entropy; compute it with"
                " tools/visual_entropy.py, or use a method without the perceptual part"
                " (method=durian_reasoning)"
            )


def check_prompt_logprobs(prompts: Iterable[Prompt], method: Method) -> None:
    """Raises ValueError where the method reads logprobs of prompts and one has none that mean
    something: a prompt of a single token, or with images."""
    if not method.needs.prompt_logprobs:
        return
    for prompt in prompts:
        if prompt.images or len(prompt.token_ids) < 2:
            what = "has images" if prompt.images else "is a single token"
            raise ValueError(
                f"prompt {prompt.uid} {what}: method {method.name} reads how likely the tokens of a"
                " prompt are (shaping.confidence_gap); drop the row, or choose another method"
            )


def _visual_entropy(experience: Experience) -> Float[Tensor, " responses"]:
    return torch.tensor(
        [float(prompt.extra["visual_entropy"]) for prompt in experience.responses.prompts]
    )


class MinibatchLoss:
    """The loss of one optimizer step over ``rows`` of a scored experience, of which this rank works
    on those in ``tokens`` (``Experience.scored_tokens`` has the columns).

    The denominators are those of all rows, fixed before the first backward.
    """

    def __init__(
        self, method: Method, experience: Experience, rows: Sequence[int], tokens: TokenRows
    ) -> None:
        credit = experience.credit
        assert credit is not None, "a loss needs a scored experience"
        lengths = experience.sequences.response_lengths
        own = torch.tensor(list(rows), dtype=torch.int64)
        # 1 for the rows of this minibatch: the denominators count no other tokens.
        here = torch.zeros_like(lengths).index_fill(0, own, 1)
        self._method = method
        self._columns = {name: torch.from_numpy(values) for name, values in tokens.columns.items()}
        # [tokens on this rank]: the row of each, by its number among those of the experience.
        self._response_index = torch.from_numpy(np.repeat(tokens.rows, tokens.lengths))
        self._per_response = {
            "advantages": credit.advantages,
            "kl_weights": credit.kl_weights,
            "correct": experience.correct,
            "group_ids": experience.group_ids,
            "response_loss_tokens": lengths * here,
        }
        if method.needs.group_accuracy:
            shares = group_accuracy(experience.correct, experience.group_ids)
            self._per_response["group_accuracy"] = shares
        if method.needs.given:
            self._per_response["given"] = torch.from_numpy(experience.responses.given)
        self._ends = None
        if method.needs.end_token is not None:
            self._ends = EndTokens.of(tokens.lengths)
            self._rows = torch.from_numpy(tokens.rows)
        self._copies = None
        self._mask_seed = experience.mask_seed
        if method.needs.masked_in_update:
            # The tokens of the plain half: with one more behind each response where end tokens are.
            more = len(tokens.lengths) if method.needs.end_token is not None else 0
            self._copies = MaskedCopies(int(tokens.lengths.sum()) + more)
        if experience.end_start is not None:
            self._per_response["end_start"] = experience.end_start
        if experience.peaks is not None:
            self._per_response["peaks"] = experience.peaks
        if experience.log_ratio_sums is not None:
            self._per_response["log_ratio_sums"] = experience.log_ratio_sums
        self._on_device: dict[str, Tensor] = {}
        self._num_responses = len(rows)
        self._num_tokens = int(lengths[list(rows)].sum())

    def share(self, plain: Share) -> Share:
        """What the policy is to work on: ``plain``, with a token behind each response and with all
        of it once more behind masked images, where the method asks for them."""
        needs = self._method.needs
        share = plain if needs.end_token is None else with_end_token(plain, needs.end_token)
        if self._copies is None:
            return share
        assert needs.mask_ratio is not None and self._mask_seed is not None
        return with_masked_copies(share, needs.mask_ratio, self._mask_seed)

    def of_responses(self, result: UpdateResult) -> UpdateResult:
        """``result`` with the scores of ``plain``."""
        if result.scores is None or (self._ends is None and self._copies is None):
            return result
        scores = on_cpu(result.scores)
        if self._copies is not None:
            scores = self._copies.without(scores)
        if self._ends is not None:
            scores = self._ends.without(scores)
        return replace(result, scores=scores)

    def __call__(self, view: TokenView) -> LossOutput:
        """Between a forward and its backward: nothing here waits for the device."""
        device = view.logprobs.device
        copies: TokenView | None = None
        if self._copies is not None:
            # What ``share`` did is undone from its end: copies were made of what had end tokens.
            view, copies = self._copies.split(view)
        ends: dict[str, Tensor] = {}
        if self._ends is not None:
            view, logprobs, rows = self._ends.split(view)
            ends = {"end_logprobs": logprobs, "end_index": to_device(self._rows[rows], device)}
            # The end tokens of copies are in no loss.
            copies = None if copies is None else self._ends.split(copies)[0]
        if not self._on_device:
            # Put there by the first micro-batch, found there by the others of the minibatch.
            self._on_device = {
                name: to_device(values, device) for name, values in self._per_response.items()
            }

        def tokens(values: Tensor) -> Tensor:
            # Columns and index are on the host: choosing there waits for nothing.
            return to_device(values[view.index], device)

        columns = self._columns
        if "old_logprobs" in columns:
            old_logprobs = tokens(columns["old_logprobs"])
        else:
            old_logprobs = view.logprobs.detach()  # of an on-policy step
        ref_logprobs = None
        if "ref_logprobs" in columns:
            ref_logprobs = tokens(columns["ref_logprobs"])
        masked_logprobs = None if copies is None else copies.logprobs
        if "masked_logprobs" in columns:
            masked_logprobs = tokens(columns["masked_logprobs"])
        result = self._method.loss(
            TokenBatch(
                logprobs=view.logprobs,
                old_logprobs=old_logprobs,
                response_index=tokens(self._response_index),
                loss_mask=torch.ones_like(view.logprobs, dtype=torch.bool),
                ref_logprobs=ref_logprobs,
                sampler_logprobs=tokens(columns["sampler_logprobs"]),
                entropy=view.entropy,
                topk_logprobs=view.topk_logprobs,
                is_argmax=view.is_argmax,
                nucleus_entropy=view.nucleus_entropy,
                masked_logprobs=masked_logprobs,
                num_responses=self._num_responses,
                num_tokens=self._num_tokens,
                **ends,
                **self._on_device,
            ),
            sequence_sum=view.sequence_sum,
            sequence_gather=view.sequence_gather,
        )
        return LossOutput(loss=result.loss, metrics=result.metrics)
