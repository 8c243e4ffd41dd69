"""The bridge from the flat token layout to ``Method.loss``: one object per minibatch, called once per micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_rl.loss import Credit, Method, ResponseBatch, TokenBatch
from megatron_rl.runtime.transfer import to_device
from megatron_rl.trainer.rollouts import Experience
from megatron_rl.types import LossOutput, Prompt, SequenceBatch, TokenScores, TokenView


@dataclass(frozen=True)
class Scored:
    """A rollout phase with the trainer's own probabilities of it. ``old`` is None until an only update, whose own forward has the old
    logprobs, has run: they are then the current ones without gradient."""

    experience: Experience
    old: TokenScores | None
    ref: TokenScores | None


def on_cpu(scores: TokenScores) -> TokenScores:
    """Credit and bookkeeping run on the host; a micro-batch takes what it needs back to the device."""
    return TokenScores(scores.logprobs.cpu(), None if scores.entropy is None else scores.entropy.cpu())


def response_batch(scored: Scored, method: Method) -> ResponseBatch:
    """What the credit is computed from; ``visual_entropy`` comes with the prompts (``extra.visual_entropy``) when the method asks.

    The prompts have passed ``check_visual_entropy``.
    """
    experience, sequences = scored.experience, scored.experience.sequences
    statistics: dict[str, Tensor] = {}
    if method.needs.response_statistics:
        assert scored.old is not None
        mask = torch.ones_like(scored.old.logprobs, dtype=torch.bool)
        ref = None if scored.ref is None else scored.ref.logprobs
        statistics = method.response_statistics(scored.old.logprobs, ref, sequences.response_ids, mask, sequences.num_responses)
    return ResponseBatch(
        rewards=method.shape_rewards(experience.rewards, sequences.response_lengths, experience.truncated, _response_tokens(sequences)),
        correct=experience.correct,
        group_ids=experience.group_ids,
        response_tokens=sequences.response_lengths,
        truncated=experience.truncated,
        visual_entropy=_visual_entropy(experience) if method.needs.visual_entropy else None,
        **statistics,
    )


def check_visual_entropy(prompts: Iterable[Prompt], method: Method) -> None:
    """Raises ValueError where the method needs visual_entropy and a prompt does not carry it."""
    for prompt in prompts if method.needs.visual_entropy else ():
        if "visual_entropy" not in prompt.extra:
            raise ValueError(
                f"prompt {prompt.uid}: the method needs extra.visual_entropy; compute it with tools/visual_entropy.py, "
                "or use a method without the perceptual part (method=durian_reasoning)"
            )


def _visual_entropy(experience: Experience) -> Float[Tensor, " responses"]:
    return torch.tensor([float(response.prompt.extra["visual_entropy"]) for response in experience.responses])


def _response_tokens(sequences: SequenceBatch) -> Int[Tensor, " tokens"]:
    """The response tokens of all sequences, in the response-token layout."""
    starts = sequences.offsets[:-1] + sequences.prompt_lengths
    within = torch.arange(int(sequences.response_lengths.sum())) - sequences.response_offsets[sequences.response_ids]
    return sequences.token_ids[starts[sequences.response_ids] + within]


class MinibatchLoss:
    """The loss of one optimizer step, with the denominators of all its kept responses fixed before the first backward."""

    def __init__(self, method: Method, scored: Scored, credit: Credit, rows: Sequence[int]) -> None:
        experience = scored.experience
        lengths = experience.sequences.response_lengths
        self._method, self._scored = method, scored
        self._response_ids = experience.sequences.response_ids
        self._per_response = dict(
            advantages=credit.advantages,
            kl_weights=credit.kl_weights,
            correct=experience.correct,
            group_ids=experience.group_ids,
            response_loss_tokens=lengths,
        )
        self._on_device: dict[str, Tensor] = {}
        self._num_responses = len(rows)
        self._num_tokens = int(lengths[list(rows)].sum())

    def __call__(self, view: TokenView) -> LossOutput:
        """Between a forward and its backward: nothing here waits for the device."""
        device = view.logprobs.device
        if not self._on_device:
            self._on_device = {name: to_device(values, device) for name, values in self._per_response.items()}

        def tokens(values: Tensor) -> Tensor:
            return to_device(values[view.index], device)

        old, ref = self._scored.old, self._scored.ref
        result = self._method.loss(
            TokenBatch(
                logprobs=view.logprobs,
                old_logprobs=view.logprobs.detach() if old is None else tokens(old.logprobs),
                response_ids=tokens(self._response_ids),
                loss_mask=torch.ones_like(view.logprobs, dtype=torch.bool),
                ref_logprobs=None if ref is None else tokens(ref.logprobs),
                sampler_logprobs=tokens(self._scored.experience.sampler_logprobs),
                entropy=view.entropy,
                num_responses=self._num_responses,
                num_tokens=self._num_tokens,
                **self._on_device,
            ),
            sequence_sum=view.sequence_sum,
        )
        return LossOutput(loss=result.loss, metrics=result.metrics)
