"""A method: named choices of one yaml, composed into credit and loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.config.load import compose, validate
from megatron_rl.config.method import MethodConfig
from megatron_rl.loss.batch import Credit, LossResult, Needs, ResponseBatch, TokenBatch
from megatron_rl.loss.choices import ESTIMATORS
from megatron_rl.loss.per_response import filters
from megatron_rl.loss.per_response.credit import CreditPlan, credit, reads_of, tail_of
from megatron_rl.loss.per_response.tails import FIELDS as CONFIDENCES
from megatron_rl.loss.per_response.tails import tail_confidence
from megatron_rl.loss.per_token import kl
from megatron_rl.loss.per_token.entropy_anchor import find_peaks
from megatron_rl.loss.per_token.terms import SequenceSum
from megatron_rl.loss.per_token.token_loss import LossPlan, token_loss, token_reads_of
from megatron_rl.loss.per_token.whole_responses import SequenceGather
from megatron_rl.loss.segments import lifted, segments_of

OF_OLD_LOGPROBS = {"mean_logprobs", "sum_logprobs", "kl", *CONFIDENCES}


def load_method(
    name: str, overrides: Sequence[str] = (), response_limit: int | None = None
) -> Method:
    """The method of ``conf/method/<name>.yaml``.

    Args:
        name: a file of conf/method without ``.yaml``.
        overrides: ``key=value``, relative to the method, e.g. ``kl.coef=0.001`` or
            ``shaping.ass.alpha=0.5``.
        response_limit: longest response in tokens; see ``Method``.

    Raises:
        ConfigError: no such method, or wrong keys or values (all of them in one message).
    """
    values = compose(f"method/{name}", [_prefixed(text) for text in overrides])
    return Method(validate(MethodConfig, values, f"method {name}"), response_limit=response_limit)


class Method:
    """A method's two functions, ``credit`` (per response) and ``loss`` (per token), and its needs.

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
        self.needs = _needs(config, self._credit_plan, self._loss_plan)

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
        """``wants_groups`` of one group with these responses."""
        one_group = torch.zeros(len(correct), dtype=torch.int64)
        return bool(self.wants_groups(torch.tensor(correct), one_group).all())

    def response_statistics(
        self,
        old_logprobs: Float[Tensor, " tokens"],
        ref_logprobs: Float[Tensor, " tokens"] | None,
        response_index: Int[Tensor, " tokens"],
        loss_mask: Bool[Tensor, " tokens"],
        num_responses: int,
    ) -> dict[str, Float[Tensor, " responses"]]:
        """The fields of ResponseBatch that come from logprobs, as far as the method reads them.

        They go in by name: ``ResponseBatch(..., **method.response_statistics(...))``. The tokens
        are those of all responses. Asked for where ``needs.response_statistics``.
        """

        reads = reads_of(self._credit_plan)
        old = lifted(old_logprobs.detach())

        def total(values: Tensor) -> Tensor:
            kept = torch.where(loss_mask, values, torch.zeros_like(values))
            # [responses], from [tokens].
            sums = torch.zeros(num_responses, dtype=values.dtype, device=values.device)
            return sums.index_add(0, response_index, kept)

        statistics: dict[str, Tensor] = {}
        if {"mean_logprobs", "sum_logprobs"} & reads.keys():
            sums = total(old)
            # Of a response without kept tokens the mean is 0 / 1.
            num_tokens = total(torch.ones_like(old)).clamp(min=1)
            statistics = {"sum_logprobs": sums, "mean_logprobs": sums / num_tokens}
        if "response_confidence" in reads:
            tail = tail_of(self._credit_plan)
            kept, rows = old[loss_mask], response_index[loss_mask]
            confidence = tail_confidence(kept, rows, num_responses, tail=tail)
            statistics["response_confidence"] = confidence
        if "kl" in reads and ref_logprobs is not None:
            estimate = kl.ESTIMATORS[self.config.kl.estimator]
            statistics["kl"] = total(estimate(old, lifted(ref_logprobs.detach()).to(old.dtype)))
        return statistics

    def prompt_statistics(
        self,
        logprobs: Float[Tensor, " tokens"],
        response_index: Int[Tensor, " tokens"],
        num_responses: int,
    ) -> dict[str, Float[Tensor, " responses"]]:
        """The fields of ResponseBatch that come from the old policy's logprobs of prompts.

        The tokens are those of the prompts of all responses, but the first of each, which nothing
        predicts. Asked for where ``needs.prompt_logprobs``.
        """
        tail = tail_of(self._credit_plan)
        logprobs = lifted(logprobs.detach())
        confidence = tail_confidence(logprobs, response_index, num_responses, tail=tail)
        return {"prompt_confidence": confidence}

    def peaks(
        self, nucleus_entropies: Float[Tensor, " tokens"], anchor: float | None
    ) -> Float[Tensor, "4"]:
        """TokenBatch.peaks of a minibatch, from the entropies of all its loss tokens under the
        current weights: threshold, number and mean of the peak tokens, and the ``anchor``, where
        None stands for that mean. Asked for where ``needs.nucleus``, before each update."""
        knobs = self.config.entropy_anchor
        assert knobs is not None
        found = find_peaks(nucleus_entropies, knobs.quantile)
        start = found.mean if anchor is None else anchor
        return torch.tensor([*found, start], dtype=torch.float64)


def _prefixed(override: str) -> str:
    """The override below the key ``method``, keeping Hydra's prefix."""
    key = override.lstrip("+~")
    return f"{override[: len(override) - len(key)]}method.{key}"


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
    anchor = config.entropy_anchor
    of_self = config.self_reward
    perception = None
    if config.perception is not None:
        # These two say how images are masked and which policy sees them: not of the loss.
        perception = config.perception.model_dump(exclude={"mask_ratio", "masked"})
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
        entropy_anchor=None if anchor is None else anchor.coef,
        self_reward=None if of_self is None else (of_self.alpha, of_self.beta),
        perception=perception,
    )


def _needs(config: MethodConfig, plan: CreditPlan, loss_plan: LossPlan) -> Needs:
    coefficients = _kl_coef(config)
    reads = reads_of(plan).keys()
    dynamic = config.filters.dynamic_sampling
    entropy: Literal["none", "metric", "value", "grad"] = "none"
    # The most that anything asks for: a gradient, a value, or only a figure.
    if config.entropy.coef:
        entropy = "grad"
    elif "entropy" in token_reads_of(loss_plan):
        entropy = "value"
    elif config.entropy.metric:
        entropy = "metric"
    min_group = ESTIMATORS[plan.estimator].needs.min_group
    # The name of the knob that has the number.
    if isinstance(min_group, str):
        min_group = plan.estimator_knobs[min_group]
    token_reads = token_reads_of(loss_plan)
    perception = config.perception
    # The policy tells ``is_argmax`` only with the most likely tokens: one is enough.
    top_k = int("is_argmax" in token_reads)
    if "topk_logprobs" in token_reads:
        top_k = loss_plan.policy_knobs["top_k"]
    return Needs(
        ref_logprobs=any(coefficients) or "kl" in reads or "ref_logprobs" in token_reads,
        entropy=entropy,
        top_k=top_k,
        visual_entropy="visual_entropy" in reads,
        history="visits" in reads,
        progress="progress" in reads,
        response_statistics=bool(reads & OF_OLD_LOGPROBS),
        prompt_logprobs="prompt_confidence" in reads,
        correct=coefficients[0] != coefficients[1] or "correct" in token_reads,
        group_accuracy="group_accuracy" in token_reads,
        log_ratio_sums="log_ratio_sums" in token_reads,
        nucleus=0.0 if config.entropy_anchor is None else config.entropy_anchor.top_p,
        end_token=None if config.self_reward is None else config.self_reward.token_id,
        mask_ratio=None if perception is None else perception.mask_ratio,
        masked_in_update=perception is not None and perception.masked == "current",
        given="given" in token_reads,
        dynamic_sampling=dynamic is not None,
        max_sampling_tries=1 if dynamic is None else dynamic.max_tries,
        token_ids=config.reward_shaping.repetition is not None,
        min_group=min_group,
    )
