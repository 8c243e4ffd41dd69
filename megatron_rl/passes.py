"""A pass of the policy: what one rank works on, what is asked for, and what comes back. The layouts
are those of ``types.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxtyping import Float, Int
from torch import Tensor

from megatron_rl.loss.batch import LossOutput
from megatron_rl.types import SequenceBatch


@dataclass(frozen=True)
class LocalBatch:
    """What one data-parallel rank does of a pass.

    Example, two micro-batches of three sequences: ``LocalBatch(batch, [[2], [0, 1]])``.

    Attributes:
        microbatches: which sequences, by their places in ``batch``, go through which micro-batch.
        rows: of each sequence the number of its response in the step; None: its place.
    """

    batch: SequenceBatch
    microbatches: Sequence[Sequence[int]]
    rows: Int[Tensor, " responses"] | None = None

    @property
    def work(self) -> tuple[SequenceBatch, Sequence[Sequence[int]]]:
        return self.batch, self.microbatches


@dataclass(frozen=True)
class Output:
    """A quantity that a pass of the policy is to give of each response token beside its logprob.

    Examples: ``Output("entropy", gradient=True)``, ``Output("topk_logprobs", 5)``.

    Attributes:
        name: of the column that it becomes.
        value: its only setting, e.g. how many tokens, or a probability.
        gradient: the loss takes a gradient through it.
        compute: ``(hidden, weight, head, value) -> [t]`` from the last hidden states ``[t, h]``,
            this rank's rows of the output layer, and ``policy.passes.logprobs.Head``; None for
            those that the policy computes with the logprobs: entropy, topk_logprobs, is_argmax,
            likely_logprobs, which are of ``SequenceBatch.likely``, prompt_logprobs, which are of
            the prompts' tokens, and experts, which are of all tokens.
    """

    name: str
    value: int | float = 0
    gradient: bool = False
    compute: Callable[..., Tensor] | None = None


Outputs = Sequence[Output]
# Not of response tokens alone.
PROMPT_LOGPROBS = "prompt_logprobs"
# Several of each token; a pass that only scores is told how many by the output's value.
LIKELY = "likely_logprobs"
EXPERTS = "experts"


@dataclass(frozen=True)
class TokenView:
    """The t response tokens of one micro-batch on one rank, as the policy gives them to the loss.

    Example, tokens 4 and 5::

        TokenView(tensor([4, 5]), tensor([-0.2, -1.1]), {"entropy": tensor([0.9, 1.3])})

    Attributes:
        index: names the tokens in the response-token layout; on the host, wherever the others are.
        columns: the outputs that were asked for, by name: ``[t]``, or rows of each token.
        sequence_sum: under context parallelism, where a rank sees a part of a response, the
            differentiable all-reduce over its ranks; else the identity.
        sequence_gather: what those ranks hold side by side, ``[k, t] -> [k, T]``, filled up with
            columns of NaN; else the identity.
    """

    index: Int[Tensor, " t"]
    logprobs: Float[Tensor, " t"]
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    sequence_sum: Callable[[Tensor], Tensor] = lambda sums: sums
    sequence_gather: Callable[[Tensor], Tensor] = lambda columns: columns

    def select(self, index: Int[Tensor, " t"], choose: Callable[[Tensor], Tensor]) -> TokenView:
        """Some of the tokens, which ``choose`` takes out of a tensor and ``index`` then names."""
        columns = {name: choose(values) for name, values in self.columns.items()}
        return replace(self, index=index, logprobs=choose(self.logprobs), columns=columns)


TokenLoss = Callable[[TokenView], LossOutput]


@dataclass(frozen=True)
class TokenScores:
    """Values over all T response tokens of a batch, on every rank that works on it. Rows that were
    not asked for hold 0.

    Example: ``TokenScores(tensor([-0.2, -1.1]), {"entropy": tensor([0.9, 1.3])})``.

    Attributes:
        columns: the outputs that were asked for, by name. ``prompt_logprobs`` are of all prompts,
            row after row; that of a prompt's first token means nothing. ``experts`` are of all
            tokens, as in ``SequenceBatch``.
    """

    logprobs: Float[Tensor, " tokens"]
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def map(self, change: Callable[[Tensor], Tensor]) -> TokenScores:
        """With ``change`` of each tensor."""
        columns = {name: change(values) for name, values in self.columns.items()}
        return TokenScores(change(self.logprobs), columns)


@dataclass(frozen=True)
class UpdateResult:
    """Outcome of one optimizer step, equal on every rank.

    ``skipped``: a loss or gradient norm was not finite, and the optimizer left the weights alone.
    ``scores``, when asked for: of the step's own forward, with the weights before the step, for the
    rank's own batch.

    Example: ``UpdateResult(loss=0.03, grad_norm=0.71, learning_rate=1e-6, skipped=False,
    metrics={"policy/ratio_max": 1.2})``.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    metrics: Mapping[str, float]
    scores: TokenScores | None = None
