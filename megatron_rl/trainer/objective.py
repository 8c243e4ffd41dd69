"""The bridge from the flat token layout to ``Method``: credit of a rollout, loss of a minibatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_rl.loss import Credit, Method, ResponseBatch, TokenBatch
from megatron_rl.runtime.transfer import to_device
from megatron_rl.trainer.experience import Experience
from megatron_rl.types import LossOutput, Prompt, SequenceBatch, TokenScores, TokenView


def on_cpu(scores: TokenScores) -> TokenScores:
    """``scores`` on the host."""
    entropy = scores.entropy
    return TokenScores(scores.logprobs.cpu(), None if entropy is None else entropy.cpu())


def credit_of(experience: Experience, method: Method) -> Credit:
    """Advantages, KL weights and kept rows of a whole rollout.

    The prompts have passed ``check_visual_entropy``; ``experience`` has its old logprobs where the
    method reads statistics of them.
    """
    sequences = experience.sequences
    rewards = method.shape_rewards(
        experience.rewards,
        sequences.response_lengths,
        experience.truncated,
        _response_tokens(sequences),
    )
    return method.credit(
        ResponseBatch(
            rewards=rewards,
            correct=experience.correct,
            group_ids=experience.group_ids,
            response_tokens=sequences.response_lengths,
            truncated=experience.truncated,
            visual_entropy=_visual_entropy(experience) if method.needs.visual_entropy else None,
            **_statistics(experience, method),
        )
    )


def _statistics(experience: Experience, method: Method) -> dict[str, Tensor]:
    """What the method wants to know of each response's old logprobs."""
    if not method.needs.response_statistics:
        return {}
    old = experience.old_logprobs
    ref = None if experience.ref is None else experience.ref.logprobs
    sequences = experience.sequences
    mask = torch.ones_like(old, dtype=torch.bool)
    return method.response_statistics(
        old, ref, sequences.response_index, mask, sequences.num_responses
    )


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


def _visual_entropy(experience: Experience) -> Float[Tensor, " responses"]:
    return torch.tensor(
        [float(response.prompt.extra["visual_entropy"]) for response in experience.responses]
    )


def _response_tokens(sequences: SequenceBatch) -> Int[Tensor, " tokens"]:
    """The response tokens of all sequences, in the response-token layout."""
    row = sequences.response_index
    first = sequences.offsets[:-1] + sequences.prompt_lengths
    num_tokens = int(sequences.response_lengths.sum())
    within = torch.arange(num_tokens) - sequences.response_offsets[row]
    return sequences.token_ids[first[row] + within]


class MinibatchLoss:
    """The loss of one optimizer step over ``rows`` of a scored experience.

    The denominators are those of all rows, fixed before the first backward.
    """

    def __init__(self, method: Method, experience: Experience, rows: Sequence[int]) -> None:
        credit = experience.credit
        assert credit is not None, "a loss needs a scored experience"
        lengths = experience.sequences.response_lengths
        self._method = method
        self._experience = experience
        self._response_index = experience.sequences.response_index
        self._per_response = {
            "advantages": credit.advantages,
            "kl_weights": credit.kl_weights,
            "correct": experience.correct,
            "group_ids": experience.group_ids,
            "response_loss_tokens": lengths,
        }
        self._on_device: dict[str, Tensor] = {}
        self._num_responses = len(rows)
        self._num_tokens = int(lengths[list(rows)].sum())

    def __call__(self, view: TokenView) -> LossOutput:
        """Between a forward and its backward: nothing here waits for the device."""
        device = view.logprobs.device
        if not self._on_device:
            self._on_device = {
                name: to_device(values, device) for name, values in self._per_response.items()
            }

        def tokens(values: Tensor) -> Tensor:
            return to_device(values[view.index], device)

        experience = self._experience
        if experience.on_policy:
            old_logprobs = view.logprobs.detach()
        else:
            old_logprobs = tokens(experience.old_logprobs)
        result = self._method.loss(
            TokenBatch(
                logprobs=view.logprobs,
                old_logprobs=old_logprobs,
                response_index=tokens(self._response_index),
                loss_mask=torch.ones_like(view.logprobs, dtype=torch.bool),
                ref_logprobs=None if experience.ref is None else tokens(experience.ref.logprobs),
                sampler_logprobs=tokens(experience.sampler_logprobs),
                entropy=view.entropy,
                num_responses=self._num_responses,
                num_tokens=self._num_tokens,
                **self._on_device,
            ),
            sequence_sum=view.sequence_sum,
        )
        return LossOutput(loss=result.loss, metrics=result.metrics)
