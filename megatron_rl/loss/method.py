"""A method: named choices of one yaml, composed into credit and loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.knobs import Piece
from megatron_rl.loss.batch import (
    Credit,
    Knobs,
    LossResult,
    MethodRequirements,
    Readings,
    ResponseBatch,
    TokenBatch,
)
from megatron_rl.loss.choices import ESTIMATORS
from megatron_rl.loss.config import MethodConfig
from megatron_rl.loss.per_response import filters
from megatron_rl.loss.per_response.credit import CreditPlan, credit, reads_of
from megatron_rl.loss.per_token.terms import SequenceSum
from megatron_rl.loss.per_token.token_loss import LossPlan, token_loss, token_reads_of
from megatron_rl.loss.per_token.whole_responses import SequenceGather
from megatron_rl.loss.segments import lifted, segments_of

# What every run gives, or makes room for by ``MethodRequirements``: no signals.
FIELDS = {field.name for field in fields(TokenBatch)}


class Method:
    """A method's two functions, ``credit`` (per response) and ``loss`` (per token).

    ``reads``: the columns that they read, which signals give, each with who reads it. ``needs``:
    what else the method asks of a run.

    ``response_limit`` (tokens) stands in for ``aggregate.norm_len: null`` and
    ``reward_shaping.overlong.max_tokens: null``; without either a ValueError comes from ``loss``
    and ``shape_rewards``, not before.
    """

    def __init__(self, config: MethodConfig, *, response_limit: int | None = None) -> None:
        self.config = config
        self.name = config.name
        self.response_limit = response_limit
        self._credit_plan = _credit_plan(config)
        self._loss_plan = _loss_plan(config, response_limit)
        reads = [*reads_of(self._credit_plan).items(), *token_reads_of(self._loss_plan).items()]
        self.reads: Readings = {}
        for name, readings in reads:
            if name not in FIELDS:
                self.reads.setdefault(name, []).extend(readings)
        self.needs = _requirements(config, {name for name, _ in reads})

    def credit(self, batch: ResponseBatch) -> Credit:
        """Advantages, KL weights and kept rows of a whole rollout step.

        Raises:
            ValueError: the batch lacks what the method reads, or lies outside its domain.
        """
        return credit(batch, self._credit_plan)

    def loss(
        self,
        batch: TokenBatch,
        sequence_sum: SequenceSum = lambda sums: sums,
        sequence_gather: SequenceGather = lambda columns: columns,
    ) -> LossResult:
        """The contribution of ``batch`` to the minibatch loss.

        Args:
            batch: tokens of one micro-batch on one rank.
            sequence_sum: differentiable sum over the ranks that share a response (context
                parallelism).
            sequence_gather: what those ranks hold, see ``WholeResponses``.

        Raises:
            ValueError: the batch lacks what the method reads, or the length of Dr. GRPO's divisor
                is not known.
        """
        return token_loss(batch, self._loss_plan, sequence_sum, sequence_gather)

    def shape_rewards(
        self,
        rewards: Float[Tensor, " responses"],
        response_tokens: Int[Tensor, " responses"],
        truncated: Bool[Tensor, " responses"],
        token_ids: Int[Tensor, " tokens"] | None = None,
    ) -> Float[Tensor, " responses"]:
        """Rewards plus the method's penalties (overlong, repetition), if it has any.

        ``token_ids``: all response tokens, one response after another; read when
        ``needs.token_ids``.
        """
        shaping = self.config.reward_shaping
        shaped = lifted(rewards)
        if shaping.overlong is not None:
            shaped = shaped + self._overlong(response_tokens, shaped.dtype)
        if shaping.repetition is not None:
            if token_ids is None:
                raise ValueError(
                    "shape_rewards needs token_ids: reward_shaping.repetition compares the tails of"
                    " responses"
                )
            shaped = shaped + filters.repetition_penalty(
                token_ids,
                response_tokens,
                truncated,
                shaped.dtype,
                penalty=shaping.repetition.penalty,
                min_block=shaping.repetition.min_block_tokens,
                max_block=shaping.repetition.max_block_tokens,
            )
        return shaped

    def _overlong(self, response_tokens: Tensor, dtype: torch.dtype) -> Tensor:
        knobs = self.config.reward_shaping.overlong
        assert knobs is not None
        limit = knobs.max_tokens or self.response_limit
        if limit is None:
            raise ValueError(
                "reward_shaping.overlong.max_tokens is null: set it or pass response_limit"
            )
        penalty = filters.overlong_penalty(
            response_tokens, dtype, max_tokens=limit, buffer_tokens=knobs.buffer_share * limit
        )
        return knobs.factor * penalty

    def wants_groups(
        self, correct: Bool[Tensor, " responses"], group_ids: Int[Tensor, " responses"]
    ) -> Bool[Tensor, " responses"]:
        """Rows whose group dynamic sampling keeps; all rows of a method without it."""
        if not self.needs.dynamic_sampling:
            return torch.ones_like(correct)
        groups = segments_of(group_ids)
        return groups.broadcast(filters.informative_groups(correct, groups))

    def wants_group(self, correct: Sequence[bool]) -> bool:
        """``wants_groups`` of one group with these responses; under dynamic sampling one that is
        too small for the method is not wanted."""
        if not self.needs.dynamic_sampling:
            return True
        if len(correct) < self.needs.min_group:
            return False
        one_group = torch.zeros(len(correct), dtype=torch.int64)
        return bool(self.wants_groups(torch.tensor(correct), one_group).all())


def _kl_coef(config: MethodConfig) -> tuple[float, float]:
    """The coefficient of correct and of incorrect responses."""
    if config.kl.coef_positive is None or config.kl.coef_negative is None:
        return config.kl.coef, config.kl.coef
    return config.kl.coef_positive, config.kl.coef_negative


def _credit_plan(config: MethodConfig) -> CreditPlan:
    curiosity = config.reward_shaping.curiosity
    return CreditPlan(
        estimator=config.estimator.name,
        estimator_knobs=config.estimator.knobs,
        shaping=tuple((name, choice.knobs) for name, choice in config.shaping.items()),
        kl_weights=(config.kl.weights.name, config.kl.weights.knobs),
        kl_in_reward=config.kl.placement == "reward" and any(_kl_coef(config)),
        kl_coef=_kl_coef(config),
        drop_all_correct=config.filters.drop_all_correct,
        eps=config.eps,
        ddof=config.std_ddof,
        curiosity=None if curiosity is None else curiosity.model_dump(),
    )


def _loss_plan(config: MethodConfig, response_limit: int | None) -> LossPlan:
    kl_aggregate = config.kl.aggregate or config.aggregate
    return LossPlan(
        policy_loss=config.policy_loss.name,
        policy_knobs=config.policy_loss.knobs,
        aggregate=(config.aggregate.name, config.aggregate.knobs),
        kl_aggregate=(kl_aggregate.name, kl_aggregate.knobs),
        kl_estimator=config.kl.estimator,
        # A KL in the reward is in the credit, see ``_credit_plan``, and not here once more.
        kl_coef=_kl_coef(config) if config.kl.placement == "loss" else (0.0, 0.0),
        entropy_coef=config.entropy.coef,
        mismatch=config.mismatch.kind,
        mismatch_cap=config.mismatch.cap,
        response_limit=response_limit,
        token_shaping=tuple((name, choice.knobs) for name, choice in config.token_shaping.items()),
        entropy_anchor=_knobs(config.entropy_anchor),
        self_reward=_knobs(config.self_reward),
        perception=_knobs(config.perception),
    )


def _knobs(section: Piece | None) -> Knobs | None:
    return None if section is None else section.model_dump()


def _requirements(config: MethodConfig, reads: Collection[str]) -> MethodRequirements:
    dynamic = config.filters.dynamic_sampling
    min_group = ESTIMATORS[config.estimator.name].needs.min_group
    # The name of the knob that has the number.
    if isinstance(min_group, str):
        min_group = config.estimator.knobs[min_group]
    return MethodRequirements(
        ref_logprobs=any(_kl_coef(config)) or bool({"kl", "ref_logprobs"} & {*reads}),
        dynamic_sampling=dynamic is not None,
        max_sampling_tries=1 if dynamic is None else dynamic.max_tries,
        token_ids=config.reward_shaping.repetition is not None,
        min_group=min_group,
    )
