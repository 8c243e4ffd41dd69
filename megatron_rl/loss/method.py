"""A method: named choices of one yaml, composed into credit and loss."""

from collections.abc import Sequence
from dataclasses import fields

from megatron_rl.loss.batch import Credit, LossOutput, Readings, ResponseBatch, TokenBatch
from megatron_rl.loss.config import MethodConfig
from megatron_rl.loss.per_response.credit import credit, response_reads
from megatron_rl.loss.per_token.terms import SequenceSum
from megatron_rl.loss.per_token.token_loss import token_loss, token_reads
from megatron_rl.loss.segments import lifted
from megatron_rl.loss.shapes import PerResponse, ResponseCounts, ResponseFlags, TokenIndex
from megatron_rl.loss.whole_responses import SequenceGather

FIELDS = {field.name for field in fields(TokenBatch)}  # what every run gives: no signals


class Method:
    """A method's two functions, ``credit`` (per response) and ``loss`` (per token).

    ``response_limit`` (tokens) stands in for ``aggregate.norm_len: null`` and
    ``reward_shaping.overlong.max_tokens: null``; without either a ValueError comes from ``loss``
    and ``shape_rewards``, not before.

    Attributes:
        reads: the columns that they read and signals give, each with its readers.
        reads_reference: whether the loss reads logprobs of the frozen reference.
    """

    def __init__(self, config: MethodConfig, *, response_limit: int | None = None) -> None:
        self.config = config
        self.name = config.name
        self.response_limit = response_limit
        self.reads: Readings = {}
        reads = [*response_reads(config), *token_reads(config)]
        self.reads_reference = "ref_logprobs" in dict(reads)
        for column, reading in reads:
            if column not in FIELDS:
                self.reads.setdefault(column, []).append(reading)

    def credit(self, batch: ResponseBatch) -> Credit:
        """Advantages, KL weights and kept rows of a whole rollout step.

        Raises:
            ValueError: the batch lacks what the method reads, or lies outside its domain.
        """
        return credit(batch, self.config)

    def loss(
        self,
        batch: TokenBatch,
        sequence_sum: SequenceSum = lambda sums: sums,
        sequence_gather: SequenceGather = lambda columns: columns,
    ) -> LossOutput:
        """The contribution of ``batch`` to the minibatch loss.

        Args:
            batch: tokens of one micro-batch on one rank.
            sequence_sum: differentiable sum over the context ranks, which share a response.
            sequence_gather: what those ranks hold, see ``WholeResponses``.

        Raises:
            ValueError: the batch lacks what the method reads, or Dr. GRPO's length is not known.
        """
        return token_loss(batch, self.config, self.response_limit, sequence_sum, sequence_gather)

    @property
    def reads_token_ids(self) -> bool:
        """Whether ``shape_rewards`` reads the response tokens."""
        return self.config.reward_shaping.repetition is not None

    @property
    def max_sampling_tries(self) -> int:
        """1 without dynamic sampling."""
        dynamic = self.config.filters.dynamic_sampling
        return 1 if dynamic is None else dynamic.max_tries

    def shape_rewards(
        self,
        rewards: PerResponse,
        response_tokens: ResponseCounts,
        truncated: ResponseFlags,
        token_ids: TokenIndex | None = None,
    ) -> PerResponse:
        """Rewards plus the method's penalties (overlong, repetition), if it has any.

        ``token_ids``: all response tokens, one response after another; needed when
        ``reads_token_ids``.
        """
        shaping = self.config.reward_shaping
        shaped = lifted(rewards)
        dtype = shaped.dtype
        if shaping.overlong is not None:
            shaped = shaped + shaping.overlong.penalty(response_tokens, dtype, self.response_limit)
        if shaping.repetition is not None:
            if token_ids is None:
                raise ValueError(
                    "shape_rewards needs token_ids: reward_shaping.repetition compares the tails of"
                    " responses"
                )
            shaped = shaped + shaping.repetition.of(token_ids, response_tokens, truncated, dtype)
        return shaped

    def wants_group(self, correct: Sequence[bool]) -> bool:
        """Whether dynamic sampling keeps a group: 0 < sum(correct) < G, both outcomes seen (DAPO,
        arXiv 2503.14476, eq. 11), and not too small for the method; always without it."""
        if self.config.filters.dynamic_sampling is None:
            return True
        return 0 < sum(correct) < len(correct) and len(correct) >= self.config.min_group
