"""The schema of a method: named choices with their knobs, and what is set beside them.

The knobs of a choice, their types and their defaults stand in the signature of its function in
``megatron_rl/loss``; a yaml names what it chooses and where it differs. A knob given to another
choice is refused with the name of the choice it belongs to.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, SerializeAsAny, model_validator

from megatron_rl.knobs import Named, Piece, by_key, by_name, one_of
from megatron_rl.loss.choices import (
    AGGREGATIONS,
    CORRECTIONS,
    ESTIMATORS,
    KL_WEIGHTS,
    POLICY_LOSSES,
    SHAPERS,
    TOKEN_SHAPERS,
)
from megatron_rl.loss.per_response import advantages, histories, shaping  # noqa: F401
from megatron_rl.loss.per_response.filters import (
    ChosenDemonstrations,
    Curiosity,
    Overlong,
    Repetition,
)
from megatron_rl.loss.per_token import (  # noqa: F401 (decorators fill the tables)
    aggregate,
    covariance,
    demonstrations,
    kl,
    mismatch,
    policy_losses,
    response_losses,
    sampler_losses,
    token_advantages,
)
from megatron_rl.loss.per_token.entropy_anchor import EntropyAnchor
from megatron_rl.loss.per_token.perception import Perception
from megatron_rl.loss.per_token.self_reward import SelfReward
from megatron_rl.loss.per_token.terms import LossTerm

Estimator = Annotated[SerializeAsAny[Named], by_name(ESTIMATORS)]
Shaping = Annotated[dict[str, SerializeAsAny[Named]], by_key(SHAPERS)]
TokenShaping = Annotated[dict[str, SerializeAsAny[Named]], by_key(TOKEN_SHAPERS)]
PolicyLoss = Annotated[SerializeAsAny[Named], by_name(POLICY_LOSSES)]
Aggregate = Annotated[SerializeAsAny[Named], by_name(AGGREGATIONS)]
KlWeights = Annotated[SerializeAsAny[Named], by_name(KL_WEIGHTS)]
KlEstimator = Annotated[str, one_of("KL estimator", kl.ESTIMATORS)]
Correction = Annotated[str, one_of(CORRECTIONS.what, CORRECTIONS, "none")]

_OWN_WEIGHT = "policy_loss.weight"


class KlConfig(Piece):
    """``coef_positive`` and ``coef_negative``, given together, replace ``coef``.

    The one is for correct responses, the other for incorrect ones.
    """

    coef: NonNegativeFloat
    estimator: KlEstimator = "k3"
    placement: Literal["loss", "reward"] = "loss"
    weights: KlWeights = Field(default_factory=lambda: {"name": "constant"}, validate_default=True)
    coef_positive: NonNegativeFloat | None = None
    coef_negative: NonNegativeFloat | None = None
    aggregate: Aggregate | None = None  # null = like the policy term

    @property
    def by_sign(self) -> tuple[float, float]:
        """The coefficient of correct and of incorrect responses."""
        if self.coef_positive is None or self.coef_negative is None:
            return self.coef, self.coef
        return self.coef_positive, self.coef_negative

    @property
    def in_reward(self) -> bool:
        return self.placement == "reward" and any(self.by_sign)

    @property
    def in_loss(self) -> bool:
        return self.placement == "loss" and any(self.by_sign)

    @model_validator(mode="after")
    def _signs_together(self) -> KlConfig:
        if (self.coef_positive is None) != (self.coef_negative is None):
            raise ValueError(
                "coef_positive and coef_negative replace coef together: give both or none"
            )
        if self.coef_positive is not None and self.coef != 0:
            raise ValueError("coef_positive and coef_negative replace coef: set coef to 0")
        return self


class EntropyConfig(Piece):
    """The entropy of the policy, in the loss and as a metric."""

    coef: float = 0.0  # loss -= coef * entropy
    metric: bool = True  # log the entropy even where coef is 0


class MismatchConfig(Piece):
    """What to do about engine and trainer disagreeing on the old policy: w = exp(old - sampler)."""

    kind: Correction = "none"
    cap: Annotated[float, Field(gt=1)] = 2.0

    @property
    def is_weighted(self) -> bool:
        """Whether the ratio itself is the weight, which corrects for tokens of other weights."""
        return self.kind in ("tis", "icepop")


class RewardShapingConfig(Piece):
    """What is added to rewards before the estimator sees them."""

    overlong: Overlong | None = None
    repetition: Repetition | None = None
    curiosity: Curiosity | None = None


class DynamicSamplingConfig(Piece):
    """Keep the groups with both outcomes; refill from the prompt stream."""

    # Prompts that one step looks at, in batches of its size; then it takes the groups found so far.
    max_tries: PositiveInt = 10


class FiltersConfig(Piece):
    """Which groups take part."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    drop_all_correct: bool = False
    demonstrations: ChosenDemonstrations | None = None  # before anything is estimated


class MethodConfig(Piece):
    """A file of conf/method."""

    name: str
    estimator: Estimator
    shaping: Shaping = Field(default_factory=dict)  # of responses
    token_shaping: TokenShaping = Field(default_factory=dict)  # of tokens, after the other
    policy_loss: PolicyLoss
    aggregate: Aggregate
    kl: KlConfig
    entropy: EntropyConfig = EntropyConfig()
    entropy_anchor: EntropyAnchor | None = None
    self_reward: SelfReward | None = None
    perception: Perception | None = None
    mismatch: MismatchConfig = MismatchConfig()
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    filters: FiltersConfig = FiltersConfig()
    std_ddof: Literal[0, 1] = 0  # divisor of a group's std: G - std_ddof
    eps: NonNegativeFloat = 1e-6  # added to the std

    @property
    def extra_terms(self) -> dict[str, LossTerm]:
        """What is added to the loss beside policy, KL and entropy, by its key."""
        return {key: value for key, value in self if isinstance(value, LossTerm)}

    @property
    def min_group(self) -> int:
        """Responses per prompt that the estimator needs."""
        wanted = ESTIMATORS[self.estimator.name].needs.min_group
        return max(2, self.estimator.knobs[wanted]) if isinstance(wanted, str) else wanted

    @property
    def unit_reward_readers(self) -> dict[str, str]:
        """Functions for rewards in [0, 1], with their keys: estimators that say so, and shapers
        that read omega, the mean reward in that interval."""
        name = self.estimator.name
        found = {}
        if ESTIMATORS[name].needs.unit_rewards:
            found[f"estimator {name}"] = f"estimator.name = {name}"
        shapers = [each for each in self.shaping if "omega" in SHAPERS[each].inputs]
        return found | {f"shaper {each}": f"shaping.{each}" for each in shapers}

    @property
    def sequences_per_response(self) -> int:
        """Sequences in an update: 2 where a response is seen once more, behind masked images."""
        return 2 if self.perception is not None and self.perception.masked == "current" else 1

    @property
    def tokens_beside(self) -> int:
        """How many tokens the policy loss reads beside each sampled one."""
        knobs = self.policy_loss.knobs
        return knobs["top_k"] if "top_k" in knobs else 0

    @property
    def weighs_sampler(self) -> bool:
        """Whether the policy term is weighted by the trainer's probability over the sampler's."""
        key, kind = self.correction
        by_loss = POLICY_LOSSES[self.policy_loss.name].sampler_ratio
        return self.mismatch.is_weighted or (by_loss and (key, kind) != (_OWN_WEIGHT, "none"))

    @property
    def correction(self) -> tuple[str, str]:
        """The key that chooses a correction for the sampler, and its value."""
        weight = self.policy_loss.knobs.get("weight")
        if POLICY_LOSSES[self.policy_loss.name].sampler_ratio and weight is not None:
            return _OWN_WEIGHT, weight
        return "mismatch.kind", self.mismatch.kind

    @model_validator(mode="after")
    def _one_correction(self) -> MethodConfig:
        if POLICY_LOSSES[self.policy_loss.name].sampler_ratio and self.mismatch.is_weighted:
            is_own = self.correction[0] == _OWN_WEIGHT
            also = f", and {_OWN_WEIGHT} to it, which its center takes too" if is_own else ""
            raise ValueError(
                f"policy loss {self.policy_loss.name} takes its ratio to the sampler, which"
                f" mismatch.kind = {self.mismatch.kind} would count twice; set mismatch.kind to"
                f" none or sequence_mask{also}"
            )
        return self

    @model_validator(mode="after")
    def _domains(self) -> MethodConfig:
        name = self.estimator.name
        needs = ESTIMATORS[name].needs
        added = self.reward_shaping
        is_changed = any((added.overlong, added.repetition))
        if needs.unit_rewards:  # omega is computed from the rewards without these
            is_changed |= added.curiosity is not None or self.kl.placement == "reward"
        readers = list(self.unit_reward_readers)
        if readers and is_changed:
            raise ValueError(
                f"{readers[0]} needs rewards in [0, 1], which a penalty, a bonus or a KL in the"
                " reward leaves; set reward_shaping={} and kl.placement=loss"
            )
        if needs.check_knobs is not None:
            problem = needs.check_knobs(**self.estimator.knobs)
            if problem is not None:
                raise ValueError(f"estimator {name}: {problem}")
        return self


def reward_scheme_errors(
    method: MethodConfig, accuracy_weight: float, format_weight: float
) -> list[str]:
    """What is wrong between a method and the reward weights; empty when nothing is.

    Example: ``mapo`` with weights 1 + 0.5 needs rewards in [0, 1], so the weights must sum to 1
    (0.9 and 0.1 in the paper).
    """
    estimator = method.estimator
    needs = ESTIMATORS[estimator.name].needs
    top = accuracy_weight + format_weight
    rescale = (
        "divide both weights by their sum, e.g. reward.accuracy_weight=0.9 reward.format_weight=0.1"
    )
    outside = min(accuracy_weight, format_weight) < 0 or top > 1 + 1e-6
    keys = list(method.unit_reward_readers.values())
    if keys and outside:
        return [f"method.{keys[0]}: needs rewards in [0, 1], but they reach {top:g}; {rescale}"]
    found = needs.check_rewards and needs.check_rewards(top, **estimator.knobs)
    if found is None:
        return []
    problem, remedy = found
    return [
        f"method.estimator.{problem} (the weights sum to {top:g}); {rescale}, or set"
        f" method.estimator.{remedy}"
    ]
