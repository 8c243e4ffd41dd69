"""The bridge from the flat token layout to ``Method.loss``: one object per minibatch, called once per micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_rl.loss import Method, ResponseBatch, TokenBatch
from megatron_rl.loss.method import Credit
from megatron_rl.trainer.rollouts import Experience
from megatron_rl.types import LossOutput, TokenScores, TokenView


@dataclass(frozen=True)
class Scored:
    """A rollout phase with the trainer's own probabilities of it."""

    experience: Experience
    old: TokenScores
    ref: TokenScores | None


def response_batch(scored: Scored, method: Method) -> ResponseBatch:
    """What the credit is computed from; ``visual_entropy`` comes with the prompts (``extra.visual_entropy``) when the method asks.

    Raises:
        ValueError: the method needs visual_entropy and a prompt does not carry it.
    """
    experience = scored.experience
    rows, total = experience.sequences.response_ids, experience.sequences.num_responses
    sums = _row_sums(scored.old.logprobs, rows, total)
    visual = None
    if method.needs.visual_entropy:
        missing = [response.prompt.uid for response in experience.responses if "visual_entropy" not in response.prompt.extra]
        if missing:
            raise ValueError(
                f"prompt {missing[0]}: the method needs extra.visual_entropy; compute it with tools/visual_entropy.py, "
                "or set the perceptual coefficient to 0 (method=durian_reasoning)"
            )
        visual = torch.tensor([float(response.prompt.extra["visual_entropy"]) for response in experience.responses])
    kl = None
    if method.needs.response_kl:
        assert scored.ref is not None
        kl = _row_sums(method.kl_estimate(scored.old.logprobs, scored.ref.logprobs), rows, total)
    return ResponseBatch(
        rewards=experience.rewards,
        correct=experience.correct,
        group_ids=experience.group_ids,
        response_tokens=experience.sequences.response_lengths,
        truncated=experience.truncated,
        mean_logprobs=sums / experience.sequences.response_lengths,
        sum_logprobs=sums,
        visual_entropy=visual,
        kl=kl,
    )


def _row_sums(values: Float[Tensor, " tokens"], rows: Int[Tensor, " tokens"], num_rows: int) -> Float[Tensor, " rows"]:
    return torch.zeros(num_rows, dtype=values.dtype).index_add(0, rows, values)


class MinibatchLoss:
    """The loss of one optimizer step, with the denominators of all its kept responses fixed before the first backward."""

    def __init__(self, method: Method, scored: Scored, credit: Credit, rows: Sequence[int]) -> None:
        lengths = scored.experience.sequences.response_lengths
        self._method, self._scored, self._credit = method, scored, credit
        self._response_ids = scored.experience.sequences.response_ids
        self._num_responses = len(rows)
        self._num_tokens = int(lengths[list(rows)].sum())

    def __call__(self, view: TokenView) -> LossOutput:
        device, experience = view.logprobs.device, self._scored.experience
        index = view.index.cpu()

        def tokens(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index].to(device)

        result = self._method.loss(
            TokenBatch(
                logprobs=view.logprobs,
                old_logprobs=tokens(self._scored.old.logprobs),
                response_ids=tokens(self._response_ids),
                loss_mask=torch.ones_like(view.logprobs, dtype=torch.bool),
                advantages=self._credit.advantages.to(device),
                kl_weights=self._credit.kl_weights.to(device),
                ref_logprobs=None if self._scored.ref is None else tokens(self._scored.ref.logprobs),
                sampler_logprobs=tokens(experience.sampler_logprobs),
                entropy=view.entropy,
                correct=experience.correct.to(device),
                group_ids=experience.group_ids.to(device),
                response_loss_tokens=experience.sequences.response_lengths.to(device),
                num_responses=self._num_responses,
                num_tokens=self._num_tokens,
            ),
            sequence_sum=view.sequence_sum,
        )
        return LossOutput(loss=result.loss, metrics=result.metrics)
