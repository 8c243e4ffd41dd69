"""What a signal is: a quantity that functions of the loss read by its name."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_rl.config.schema import Config
from megatron_rl.data.reading import Data
from megatron_rl.loss import Credit
from megatron_rl.passes import LocalBatch, Outputs, TokenScores, TokenView
from megatron_rl.protocols import ImageProcessor, Policy, Teacher
from megatron_rl.rollouts.rows.experience import Experience
from megatron_rl.rollouts.rows.partials import response_sums
from megatron_rl.runtime.launch import World
from megatron_rl.types import Prompt

Columns = Mapping[str, Tensor]


class RowGathering(Protocol):
    """Gives every rank what each rank knows of the rows that it works on; equal on all ranks."""

    def of_all_rows(
        self, rows: Int[np.ndarray, " rows"], values: np.ndarray, num_rows: int
    ) -> Float[np.ndarray, "all_rows columns"]:
        """Collective: the table of all rows of the step, 0 for those that no rank has given."""

    def of_all_tokens(self, values: Float[Tensor, " tokens"]) -> Float[Tensor, " all_tokens"]:
        """Collective: ``values`` of all ranks, each token once, in the order of the ranks."""


@dataclass(frozen=True)
class StepView:
    """What a signal is shown of a step: all of it, or one of its minibatches.

    Attributes:
        experience: with ``old`` and ``ref`` as far as they are computed.
        rows: those of the minibatch; after the rollout all rows of the step.
        local: the part of them that this rank works on.
        tokens: columns of its tokens, by name: ``sampler_logprobs``, and ``old_logprobs`` and
            ``ref_logprobs`` where they are computed.
    """

    experience: Experience
    rows: Sequence[int]
    local: LocalBatch
    tokens: Mapping[str, np.ndarray]
    policy: Policy
    ranks: RowGathering
    teachers: Sequence[Teacher] = ()

    @property
    def num_responses(self) -> int:
        """Responses of the step."""
        return len(self.experience.responses)

    @property
    def loss_mask(self) -> Tensor:
        """True for the tokens on this rank that the sampler drew."""
        sampled = self.tokens.get("sampled")
        if sampled is None:
            return torch.ones(int(self.local.batch.response_lengths.sum()), dtype=torch.bool)
        return torch.from_numpy(sampled)

    def score(self, outputs: Outputs = (), batch: LocalBatch | None = None) -> TokenScores:
        """Collective: a pass of the policy as it is, over the rows or ``batch``; on the host."""
        return self.policy.score(self.local if batch is None else batch, outputs).map(Tensor.cpu)

    def response_sums(self, values: Float[np.ndarray, " tokens"]) -> Float[Tensor, " responses"]:
        """Collective: the float64 sum over each response of the step, summed by its owner in the
        order of its tokens; 0 for responses that are not in ``rows``."""
        lengths = self.local.batch.response_lengths.numpy()
        return self._of_all_rows(response_sums(values, lengths)[:, None])[:, 0]

    def of_all_rows(self, values: Columns) -> dict[str, Tensor]:
        """Collective: ``values``, one number for each row of this rank, for all rows, in their own
        format (float64 holds what every smaller format holds)."""
        # [rows of this rank, values]; the table is [all rows, values].
        partials = torch.stack([each.double() for each in values.values()], 1).numpy()
        columns = zip(values.items(), self._of_all_rows(partials).unbind(1), strict=True)
        return {name: column.to(each.dtype) for (name, each), column in columns}

    def _of_all_rows(self, values: np.ndarray) -> Tensor:
        assert self.local.rows is not None
        rows = self.local.rows.numpy()
        return torch.from_numpy(self.ranks.of_all_rows(rows, values, self.num_responses))


@dataclass(frozen=True)
class SignalSetup:
    """What a signal may use before the policy is built."""

    model_path: Path
    run_dir: Path
    images: ImageProcessor | None
    world: World


class Extension(Protocol):
    """A batch of an update with tokens added to those of the step, and how to take these out."""

    @property
    def batch(self) -> LocalBatch: ...

    def split(self, view: TokenView) -> tuple[TokenView, Columns]:
        """The view of the original batch, and what was computed for the added tokens: one value per
        original token in ``view.columns``, anything else in the second value."""

    def without(self, scores: TokenScores) -> TokenScores:
        """The scores of the original batch; on the host."""


class Signal:
    """A quantity that functions of the loss read by its name; subclasses override these methods.

    It is made once per run, when a function of the method reads one of its columns. The parameters
    of its constructor are keywords, found among the knobs of those functions, ``seed`` (of the run)
    and ``kl_estimator`` (of the method). All ranks call all methods, so they may be collective.

    Attributes:
        about: what it takes, for the cards of methods (examples/methods).
        columns: the names that it gives, one value for each response of the step, or in a shape of
            their own.
        token_columns: those that have one value, or row, for each token.
        scores: the passes over the rollout that have to be there before ``after_rollout``.
        score_outputs: what the pass with the old policy is to give.
        update_outputs: what the passes of updates are to give; they become token columns.
        extra_tokens: how much ``extend`` lengthens a sequence.
        over_turns: whether it is correct where environments append to responses.
        num_likely: how many of its most likely tokens the sampler is to name with each sampled one.
    """

    about: ClassVar[str] = ""
    columns: ClassVar[tuple[str, ...]] = ()
    token_columns: ClassVar[tuple[str, ...]] = ()
    scores: ClassVar[tuple[Literal["old", "ref"], ...]] = ()
    score_outputs: Outputs = ()
    update_outputs: Outputs = ()
    extra_tokens: int = 0
    num_likely: int = 0
    over_turns: ClassVar[bool] = False

    def check(self, prompts: Iterable[Prompt], config: Config) -> None:
        """Raises ValueError where the training prompts or the configuration do not allow it."""

    def prepare(self, data: Data, setup: SignalSetup) -> Data:
        """Before the policy is built: ``data`` with what it adds to the prompts."""
        return data

    def after_rollout(self, view: StepView) -> Columns:
        """Columns that the credit reads, or that last for all updates of the step."""
        return {}

    def after_credit(self, view: StepView, credit: Credit) -> None:
        """Takes note of the credit of the step."""

    def before_minibatch(self, view: StepView) -> Columns:
        """Columns of one update, with the weights before it."""
        return {}

    def extend(self, batch: LocalBatch, step: int) -> Extension | None:
        """The batch that an update works on in place of ``batch``; None: ``batch`` itself."""
        return None

    def state(self) -> dict[str, Any]:
        """A copy for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
