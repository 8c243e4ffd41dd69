"""A method: named choices of one yaml, composed into credit and loss. The only file of the loss module that reads a config."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.config.load import compose, validate
from megatron_rl.config.method import MethodConfig
from megatron_rl.config.pieces import Named
from megatron_rl.loss import filters, kl
from megatron_rl.loss.batch import Credit, LossResult, Needs, ResponseBatch, TokenBatch
from megatron_rl.loss.credit import CreditPlan, credit, needs_of, reads_of
from megatron_rl.loss.segments import lifted, segments_of
from megatron_rl.loss.token_loss import LossPlan, SequenceSum, token_loss


def load_method(name: str, overrides: Sequence[str] = (), response_limit: int | None = None) -> Method:
    """The method of ``conf/method/<name>.yaml``.

    Args:
        name: a file of conf/method without ``.yaml``.
        overrides: ``key=value``, relative to the method, e.g. ``kl.coef=0.001`` or ``shaping.ass.alpha=0.5``.
        response_limit: longest response in tokens; see ``Method``.

    Raises:
        ConfigError: no such method, or wrong keys or values (all of them in one message).
    """
    values = compose(f"method/{name}", [_prefixed(text) for text in overrides])
    return Method(validate(MethodConfig, values, f"method {name}"), response_limit=response_limit)


class Method:
    """The two functions of a method, ``credit`` (per response) and ``loss`` (per token), and what they need.

    ``response_limit`` (tokens) stands in for ``aggregate.norm_len: null`` and ``reward_shaping.overlong.max_tokens: null``;
    without either a ValueError comes from ``loss`` and ``shape_rewards``, not before.
    """

    def __init__(self, config: MethodConfig, *, response_limit: int | None = None) -> None:
        self.config = config
        self.name = config.name
        self.response_limit = response_limit
        self._credit_plan = _credit_plan(config)
        self._loss_plan = _loss_plan(config, response_limit)
        self.needs = _needs(config)

    def credit(self, batch: ResponseBatch) -> Credit:
        """Advantages, KL weights and kept rows of a whole rollout step.

        Raises:
            ValueError: the batch lacks what the method reads, or lies outside its domain.
        """
        return credit(batch, self._credit_plan)

    def loss(self, batch: TokenBatch, sequence_sum: SequenceSum = lambda sums: sums) -> LossResult:
        """The contribution of ``batch`` to the minibatch loss.

        Args:
            batch: tokens of one micro-batch on one rank.
            sequence_sum: differentiable sum over the ranks that share a response (context parallelism).

        Raises:
            ValueError: the batch lacks what the method reads, or the length of Dr. GRPO's divisor is not known.
        """
        return token_loss(batch, self._loss_plan, sequence_sum)

    def shape_rewards(
        self,
        rewards: Float[Tensor, " responses"],
        response_tokens: Int[Tensor, " responses"],
        truncated: Bool[Tensor, " responses"],
        token_ids: Int[Tensor, " tokens"] | None = None,
    ) -> Float[Tensor, " responses"]:
        """Rewards plus the method's penalties (overlong, repetition); the rewards themselves when it has none.

        ``token_ids``: all response tokens, one response after another; read when ``needs.token_ids``.
        """
        shaping, shaped = self.config.reward_shaping, lifted(rewards)
        if shaping.overlong is not None:
            limit = shaping.overlong.max_tokens or self.response_limit
            if limit is None:
                raise ValueError("reward_shaping.overlong.max_tokens is null: set it or pass response_limit")
            buffer = shaping.overlong.buffer_share * limit
            penalty = filters.overlong_penalty(response_tokens, shaped.dtype, max_tokens=limit, buffer_tokens=buffer)
            shaped = shaped + shaping.overlong.factor * penalty
        if shaping.repetition is not None:
            if token_ids is None:
                raise ValueError("shape_rewards needs token_ids: reward_shaping.repetition compares the tails of responses")
            knobs = shaping.repetition
            shaped = shaped + filters.repetition_penalty(
                token_ids, response_tokens, truncated, shaped.dtype, penalty=knobs.penalty,
                min_block=knobs.min_block_tokens, max_block=knobs.max_block_tokens,
            )  # fmt: skip
        return shaped

    def wants_groups(self, correct: Bool[Tensor, " responses"], group_ids: Int[Tensor, " responses"]) -> Bool[Tensor, " responses"]:
        """Rows whose group dynamic sampling keeps; all of them when the method does not sample dynamically."""
        if not self.needs.dynamic_sampling:
            return torch.ones_like(correct)
        groups = segments_of(group_ids)
        return groups.broadcast(filters.informative_groups(correct, groups))

    def response_statistics(
        self,
        old_logprobs: Float[Tensor, " tokens"],
        ref_logprobs: Float[Tensor, " tokens"] | None,
        response_ids: Int[Tensor, " tokens"],
        loss_mask: Bool[Tensor, " tokens"],
        num_responses: int,
    ) -> dict[str, Float[Tensor, " responses"]]:
        """The fields of ResponseBatch that the method reads and that come from logprobs (``needs.response_statistics``):
        ``ResponseBatch(..., **method.response_statistics(...))``. The tokens are those of all responses."""

        def total(values: Tensor) -> Tensor:
            kept = torch.where(loss_mask, values, torch.zeros_like(values))
            return torch.zeros(num_responses, dtype=values.dtype, device=values.device).index_add(0, response_ids, kept)

        old = lifted(old_logprobs.detach())
        result: dict[str, Tensor] = {}
        reads = reads_of(self._credit_plan)
        if _reads_logprobs(self.config) or {"mean_logprobs", "sum_logprobs"} & reads.keys():
            sums = total(old)
            result = {"sum_logprobs": sums, "mean_logprobs": sums / total(torch.ones_like(old)).clamp(min=1)}
        if (self._credit_plan.kl_in_reward or "kl" in reads) and ref_logprobs is not None:
            result["kl"] = total(kl.ESTIMATORS[self.config.kl.estimator](old, lifted(ref_logprobs.detach()).to(old.dtype)))
        return result


def _prefixed(override: str) -> str:
    """The override below the key ``method``, keeping Hydra's prefix."""
    key = override.lstrip("+~")
    return f"{override[: len(override) - len(key)]}method.{key}"


def _knobs(piece: Named) -> dict[str, object]:
    return piece.model_dump(exclude={"name"})


def _kl_coef(config: MethodConfig) -> tuple[float, float]:
    if config.kl.coef_positive is None or config.kl.coef_negative is None:
        return config.kl.coef, config.kl.coef
    return config.kl.coef_positive, config.kl.coef_negative


def _reads_logprobs(config: MethodConfig) -> bool:
    return config.estimator.name == "durian" and _knobs(config.estimator)["reasoning"] != 0


def _credit_plan(config: MethodConfig) -> CreditPlan:
    return CreditPlan(
        estimator=config.estimator.name,
        estimator_knobs=_knobs(config.estimator),
        shaping=tuple((name, _knobs(piece)) for name, piece in config.shaping.items()),
        kl_curve=_knobs(config.kl.weights)["curve"] if config.kl.weights.name == "dads" else None,
        kl_in_reward=config.kl.placement == "reward" and any(_kl_coef(config)),
        kl_coef=_kl_coef(config),
        drop_all_correct=config.filters.drop_all_correct,
        eps=config.eps,
        ddof=config.std_ddof,
    )


def _loss_plan(config: MethodConfig, response_limit: int | None) -> LossPlan:
    def aggregation(piece: Named) -> tuple[str, int | None]:
        return piece.name, (_knobs(piece)["norm_len"] or response_limit) if "norm_len" in type(piece).model_fields else None

    return LossPlan(
        policy_loss=config.policy_loss.name,
        policy_knobs=_knobs(config.policy_loss),
        aggregate=aggregation(config.aggregate),
        kl_aggregate=aggregation(config.kl.aggregate or config.aggregate),
        kl_estimator=config.kl.estimator,
        kl_coef=_kl_coef(config) if config.kl.placement == "loss" else (0.0, 0.0),
        entropy_coef=config.entropy.coef,
        mismatch=config.mismatch.kind,
        mismatch_cap=config.mismatch.cap,
    )


def _needs(config: MethodConfig) -> Needs:
    coefficients = _kl_coef(config)
    reads = reads_of(_credit_plan(config))
    dynamic = config.filters.dynamic_sampling
    from_logprobs = {"mean_logprobs", "sum_logprobs", "kl"} & reads.keys()
    statistics = _reads_logprobs(config) or bool(from_logprobs)
    visual = config.estimator.name == "durian" and _knobs(config.estimator)["perceptual"] != 0
    return Needs(
        ref_logprobs=any(coefficients) or "kl" in reads,
        entropy="grad" if config.entropy.coef else "metric" if config.entropy.metric else "none",
        visual_entropy=visual or "visual_entropy" in reads,
        response_statistics=statistics or (config.kl.placement == "reward" and any(coefficients)),
        correct=coefficients[0] != coefficients[1],
        dynamic_sampling=dynamic is not None,
        max_sampling_tries=1 if dynamic is None else dynamic.max_tries,
        token_ids=config.reward_shaping.repetition is not None,
        min_group=_min_group(config),
    )


def _min_group(config: MethodConfig) -> int:
    wanted = needs_of(config.estimator.name).min_group
    return getattr(config.estimator, wanted) if isinstance(wanted, str) else wanted
