"""What the loss module takes and gives. All tensors are flat: over responses, or over tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from megatron_rl.loss.shapes import (
    PerResponse,
    PerToken,
    ResponseCounts,
    ResponseFlags,
    Scalar,
    TokenIndex,
    TokenMask,
)

Columns = Mapping[str, Tensor]
Knobs = Mapping[str, Any]


@dataclass(frozen=True)
class ResponseBatch:
    """All responses of a rollout step, in canonical (prompt, rollout) order.

    Example: two prompts with two responses each::

        ResponseBatch(rewards=tensor([1., 0., 0., 0.]), correct=tensor([True, False, False, False]),
                      group_ids=tensor([0, 0, 1, 1]), response_tokens=tensor([12, 30, 7, 9]),
                      columns={"mean_logprobs": tensor([-0.7, -0.2, -1.1, -0.4])})
    """

    rewards: PerResponse
    # The accuracy reward is 1 (not derived from ``rewards``, which may hold a format part).
    correct: ResponseFlags
    group_ids: ResponseCounts  # which prompt
    response_tokens: ResponseCounts
    # What signals give (``megatron_rl/signals``), by the names that functions read.
    columns: Columns = field(default_factory=dict)

    def take(self, rows: ResponseFlags) -> ResponseBatch:
        """The batch of these rows; a column that has no value per row stays as it is."""
        columns = {
            name: values[rows] if values.shape[:1] == rows.shape else values
            for name, values in self.columns.items()
        }
        fields = (self.rewards, self.correct, self.group_ids, self.response_tokens)
        return ResponseBatch(*[values[rows] for values in fields], columns)


def given(values: Tensor | None, batch: str, name: str) -> Tensor:
    """``values``. Raises ValueError where a batch lacks them."""
    if values is None:
        raise ValueError(
            f"{batch} has no {name}, but the method reads it; give it, or choose a method without"
            " it (Method.reads)"
        )
    return values


@dataclass(frozen=True)
class Credit:
    """What a rollout step gives its update: one row for each response."""

    advantages: PerResponse
    kl_weights: PerResponse  # factor of kl.coef
    keep: ResponseFlags  # rows with False take no part in the update and leave all denominators
    metrics: Columns  # values of the whole batch (equal on every rank, not contributions)
    # The rewards that the estimator has seen; None where it was not computed.
    rewards: PerResponse | None = None


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of one micro-batch on one rank; ``response_index`` points into per-response vectors.

    The denominators are those of the minibatch (one optimizer step, all ranks). Default: those of
    this batch alone, where every row counts as a response.

    Attributes:
        logprobs: with gradient.
        response_loss_tokens: of each response; 0 for one that is not in the minibatch.
        num_responses: kept responses of the minibatch; ``num_tokens``: its loss tokens.
        token_columns: what signals give of each token, by the names that functions read; some with
            gradient.
        columns: what they give of each response of the step, or in a shape of their own.
    """

    logprobs: PerToken
    old_logprobs: PerToken
    response_index: TokenIndex
    loss_mask: TokenMask
    advantages: PerResponse
    kl_weights: PerResponse
    ref_logprobs: PerToken | None = None
    sampler_logprobs: PerToken | None = None
    correct: ResponseFlags | None = None
    group_ids: ResponseCounts | None = None
    response_loss_tokens: ResponseCounts | None = None
    num_responses: int | None = None
    num_tokens: int | None = None
    token_columns: Columns = field(default_factory=dict)
    columns: Columns = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """What one micro-batch contributes to the loss of its minibatch.

    The sum over micro-batches and data x context parallel ranks is the minibatch value. The same
    holds for every metric but those whose key ends in ``_max``, which are reduced by maximum.

    Example: ``LossOutput(tensor(0.03), {"loss/kl": tensor(0.01), "ratio_max": tensor(1.2)})``.
    """

    loss: Scalar
    metrics: Columns


class Reading(NamedTuple):
    """A reader of a column, e.g. "estimator durian", and its knobs: the signal that gives the
    column takes those that it has too."""

    reader: str
    knobs: Knobs


Readings = dict[str, list[Reading]]  # by column


@dataclass(frozen=True)
class EstimatorNeeds:
    """What an estimator asks of the batch, beyond what it names as inputs.

    The three functions are given the knobs as keywords. ``reads_by_knob`` gives, for each further
    column that is read, the knob that must be above 0 for it. ``check_knobs`` says what is wrong
    with the knobs together, ``check_rewards`` (with the largest total reward first) what is wrong
    and which ``knob=value`` fixes it; None: nothing.
    """

    min_group: int | str = 2  # responses per prompt; a text names the knob that says it
    unit_rewards: bool = False  # rewards in [0, 1]: neither shift nor scale invariant
    reads_by_knob: Callable[..., Mapping[str, str]] | None = None
    check_knobs: Callable[..., str | None] | None = None
    check_rewards: Callable[..., tuple[str, str] | None] | None = None
