"""What the loss module takes and gives. All tensors are flat: over responses, or over tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class ResponseBatch:
    """All responses of a rollout step, in canonical (prompt, rollout) order.

    ``correct``: the accuracy reward is 1 (not derived from ``rewards``, which may hold a format
    part). ``group_ids``: which prompt. ``mean_logprobs`` / ``sum_logprobs``: of the old policy over
    loss tokens. ``prompt_confidence``, ``response_confidence``: ``tail_confidence`` under the old
    policy of the prompt's tokens but the first, and of the loss tokens. ``visual_entropy``: of the
    prompt's image, nats. ``kl``: sum over loss tokens of the KL estimator at (old, ref).
    ``progress``: share of the run's steps that there are up to this one, in [0, 1]. ``visits``,
    ``history_mean``, ``history_var``: of the prompt, before this step (``histories.py``).
    Example: two prompts with two responses each::

        ResponseBatch(rewards=tensor([1., 0., 0., 0.]), correct=tensor([True, False, False, False]),
                      group_ids=tensor([0, 0, 1, 1]), response_tokens=tensor([12, 30, 7, 9]))
    """

    rewards: Float[Tensor, " responses"]
    correct: Bool[Tensor, " responses"]
    group_ids: Int[Tensor, " responses"]
    response_tokens: Int[Tensor, " responses"]
    truncated: Bool[Tensor, " responses"] | None = None
    mean_logprobs: Float[Tensor, " responses"] | None = None
    sum_logprobs: Float[Tensor, " responses"] | None = None
    prompt_confidence: Float[Tensor, " responses"] | None = None
    response_confidence: Float[Tensor, " responses"] | None = None
    visual_entropy: Float[Tensor, " responses"] | None = None
    kl: Float[Tensor, " responses"] | None = None
    progress: float | None = None
    visits: Int[Tensor, " responses"] | None = None
    history_mean: Float[Tensor, " responses"] | None = None
    history_var: Float[Tensor, " responses"] | None = None


@dataclass(frozen=True)
class Credit:
    """What a rollout step gives its update: one row for each response.

    ``kl_weights`` multiplies kl.coef. Rows with ``keep`` False take no part in the update and leave
    all denominators. ``metrics`` are values of the whole batch (equal on every rank, not
    contributions). ``history``: what the fields of that name of ResponseBatch are the next time,
    where the method reads them.
    """

    advantages: Float[Tensor, " responses"]
    kl_weights: Float[Tensor, " responses"]
    keep: Bool[Tensor, " responses"]
    metrics: Mapping[str, Tensor]
    history: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of one micro-batch on one rank; ``response_index`` points into per-response vectors.

    ``logprobs`` carries the gradient; so do ``topk_logprobs``, of the most likely tokens, and
    ``entropy`` when the entropy coefficient is not 0. ``is_argmax``: no token is more likely than
    the sampled one. The denominators are those of the minibatch (one optimizer step, all ranks):
    ``response_loss_tokens`` per response (0 for one that is not in it), ``num_responses`` kept
    responses, ``num_tokens`` loss tokens. Default: those of this batch alone, where every row
    counts as a response. ``group_accuracy``: share of correct responses of the response's prompt,
    over all of the rollout step (``segments.group_accuracy``). ``log_ratio_sums``: logprobs minus
    old_logprobs summed over a response, of all responses of the minibatch, without gradient.
    ``given``: the response came with the prompt and was not sampled. ``nucleus_entropy``: of the
    most likely tokens that reach a probability, nats, with gradient; ``peaks``: see
    ``Method.peaks``. ``end_logprobs``: of one fixed token after the last of a response, with
    gradient, for the responses ``end_index`` alone; ``end_start``: their mean at the run's start.
    ``masked_logprobs``: of the same tokens, given the prompt with masked images; with gradient
    where they are of the current policy.
    """

    logprobs: Float[Tensor, " tokens"]
    old_logprobs: Float[Tensor, " tokens"]
    response_index: Int[Tensor, " tokens"]
    loss_mask: Bool[Tensor, " tokens"]
    advantages: Float[Tensor, " responses"]
    kl_weights: Float[Tensor, " responses"]
    ref_logprobs: Float[Tensor, " tokens"] | None = None
    sampler_logprobs: Float[Tensor, " tokens"] | None = None
    entropy: Float[Tensor, " tokens"] | None = None
    topk_logprobs: Float[Tensor, "tokens top_k"] | None = None
    is_argmax: Bool[Tensor, " tokens"] | None = None
    correct: Bool[Tensor, " responses"] | None = None
    group_ids: Int[Tensor, " responses"] | None = None
    group_accuracy: Float[Tensor, " responses"] | None = None
    log_ratio_sums: Float[Tensor, " responses"] | None = None
    given: Bool[Tensor, " responses"] | None = None
    nucleus_entropy: Float[Tensor, " tokens"] | None = None
    peaks: Float[Tensor, "4"] | None = None
    end_logprobs: Float[Tensor, " ends"] | None = None
    end_index: Int[Tensor, " ends"] | None = None
    end_start: Float[Tensor, ""] | None = None
    masked_logprobs: Float[Tensor, " tokens"] | None = None
    response_loss_tokens: Int[Tensor, " responses"] | None = None
    num_responses: int | None = None
    num_tokens: int | None = None


@dataclass(frozen=True)
class LossResult:
    """loss = policy_loss + kl_loss - entropy.coef * entropy + entropy anchor + self reward
    + perception, as a contribution.

    Its sum over micro-batches and data x context parallel ranks is the minibatch value. So is every
    metric but those whose key ends in ``_max`` (reduced by maximum).
    """

    loss: Float[Tensor, ""]
    policy_loss: Float[Tensor, ""]
    kl_loss: Float[Tensor, ""]
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True)
class EstimatorNeeds:
    """What an estimator asks of the batch, beyond rewards, correctness, lengths and groups.

    The three functions are given the knobs as keywords. ``reads_by_knob`` gives, for each optional
    field that is read, the knob that must be above 0 for it. ``check_knobs`` says what is wrong
    with the knobs together, ``check_rewards`` (with the largest total reward first) what is wrong
    and which ``knob=value`` mends it; None: nothing.
    Example: ``EstimatorNeeds(min_group=4, reads=("mean_logprobs",))``.
    """

    min_group: int | str = 2  # responses per prompt; a text names the knob that says it
    unit_rewards: bool = False  # rewards in [0, 1]: neither shift nor scale invariant
    reads: tuple[str, ...] = ()  # optional fields of ResponseBatch, e.g. mean_logprobs
    reads_by_knob: Callable[..., Mapping[str, str]] | None = None
    check_knobs: Callable[..., str | None] | None = None
    check_rewards: Callable[..., tuple[str, str] | None] | None = None


@dataclass(frozen=True)
class Needs:
    """What a method asks of the trainer, so that the trainer has no case distinction of its own."""

    ref_logprobs: bool  # of the frozen reference, over the response tokens
    entropy: Literal["none", "metric", "value", "grad"]  # "value": TokenBatch.entropy, detached
    top_k: int  # columns of TokenBatch.topk_logprobs, 0 without; is_argmax goes with them
    visual_entropy: bool  # ResponseBatch.visual_entropy
    history: bool  # ResponseBatch.visits, history_mean and history_var
    progress: bool  # ResponseBatch.progress
    response_statistics: bool  # anything of Method.response_statistics before credit
    prompt_logprobs: bool  # Method.prompt_statistics before credit
    correct: bool  # TokenBatch.correct
    group_accuracy: bool  # TokenBatch.group_accuracy
    log_ratio_sums: bool  # TokenBatch.log_ratio_sums, by a pass over the minibatch before it
    nucleus: float  # the probability that TokenBatch.nucleus_entropy is of, 0 without; with peaks
    end_token: int | None  # the token that TokenBatch.end_logprobs are of, None without
    mask_ratio: float | None  # of the images that TokenBatch.masked_logprobs see, None without
    masked_in_update: bool  # they are of the current policy, with gradient; else scored before
    given: bool  # TokenBatch.given: responses that prompts carry
    dynamic_sampling: bool  # see Method.wants_group and max_sampling_tries
    max_sampling_tries: int  # 1 without dynamic sampling
    token_ids: bool  # Method.shape_rewards reads the response tokens
    min_group: int  # responses per prompt
