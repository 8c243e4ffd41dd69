"""From the flat token layout to ``Method.loss``: the loss of one optimizer step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.data.token_rows import TokenRows
from megatron_rl.loss import LossOutput, Method, TokenBatch
from megatron_rl.passes import LocalBatch, TokenView, UpdateResult
from megatron_rl.rollouts.rows.experience import Experience
from megatron_rl.runtime.device import to_device
from megatron_rl.signals import Signals


class MinibatchLoss:
    """The loss of one optimizer step over ``rows`` of a scored experience, of which this rank works
    on those in ``tokens`` (``Experience.scored_tokens`` has the columns), which form ``local``.

    The denominators are those of all rows, fixed before the first backward.
    """

    def __init__(
        self,
        method: Method,
        signals: Signals,
        experience: Experience,
        rows: Sequence[int],
        tokens: TokenRows,
        local: LocalBatch,
    ) -> None:
        credit = experience.credit
        assert credit is not None, "a loss needs a scored experience"
        lengths = experience.loss_tokens
        own = torch.tensor(list(rows), dtype=torch.int64)
        # 1 for the rows of this minibatch: the denominators count no other tokens.
        here = torch.zeros_like(lengths).index_fill(0, own, 1)
        self._method = method
        self._tokens = {name: torch.from_numpy(values) for name, values in tokens.columns.items()}
        # [tokens on this rank]: the row of each, by its number among those of the experience.
        self._response_index = torch.from_numpy(np.repeat(tokens.rows, tokens.lengths))
        self._fields = {
            "advantages": credit.advantages,
            "kl_weights": credit.kl_weights,
            "correct": experience.correct,
            "group_ids": experience.group_ids,
            "response_loss_tokens": lengths * here,
        }
        of_all, of_tokens = experience.columns.items(), self._tokens.items()
        self._columns = {name: values for name, values in of_all if name in method.reads}
        self._token_columns = {name: values for name, values in of_tokens if name in method.reads}
        self._extended = signals.extended(local, experience.step)
        self._on_device: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        self._num_responses = len(rows)
        self._num_tokens = int(lengths[list(rows)].sum())

    @property
    def batch(self) -> LocalBatch:
        """The batch of the update: ``local`` with the sequences that signals add to it."""
        return self._extended.batch

    def of_responses(self, result: UpdateResult) -> UpdateResult:
        """``result`` with the scores of ``local`` alone."""
        if result.scores is None or not self._extended.extensions:
            return result
        return replace(result, scores=self._extended.without(result.scores.map(Tensor.cpu)))

    def __call__(self, view: TokenView) -> LossOutput:
        """Called between a forward and its backward, so nothing here may wait for the device."""
        device = view.logprobs.device
        view, found = self._extended.split(view)
        if self._on_device is None:
            # Copied for the first micro-batch, reused for the others of the minibatch.
            self._on_device = (_to(device, self._fields), _to(device, self._columns))
        fields, columns = self._on_device

        def tokens(values: Tensor) -> Tensor:
            # Columns and index are on the host: indexing there does not wait for the device.
            return to_device(values[view.index], device)

        def optional(name: str) -> Tensor | None:
            return tokens(self._tokens[name]) if name in self._tokens else None

        old_logprobs = optional("old_logprobs")
        if old_logprobs is None:
            old_logprobs = view.logprobs.detach()  # an on-policy step
        loss_mask = optional("sampled")
        if loss_mask is None:
            loss_mask = torch.ones_like(view.logprobs, dtype=torch.bool)
        of_tokens = {name: tokens(values) for name, values in self._token_columns.items()}
        return self._method.loss(
            TokenBatch(
                logprobs=view.logprobs,
                old_logprobs=old_logprobs,
                response_index=tokens(self._response_index),
                loss_mask=loss_mask,
                ref_logprobs=optional("ref_logprobs"),
                sampler_logprobs=optional("sampler_logprobs"),
                num_responses=self._num_responses,
                num_tokens=self._num_tokens,
                token_columns={**of_tokens, **view.columns},
                columns={**columns, **found},
                **fields,
            ),
            sequence_sum=view.sequence_sum,
            sequence_gather=view.sequence_gather,
        )


def _to(device: torch.device, columns: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: to_device(values, device) for name, values in columns.items()}
