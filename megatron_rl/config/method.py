"""The schema of a method: named choices and their knobs.

The knobs of a choice have their defaults here, so that a yaml names what it chooses and where it differs. A knob given to
another choice is refused with the name of the choice it belongs to.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, SerializeAsAny, model_validator

from megatron_rl.config.pieces import Named, Piece, by_key, by_name, table_of

Fraction = Annotated[float, Field(ge=0, le=1)]


# ---------------------------------------------------------------- estimators


class Zscore(Named):
    name: Literal["zscore"] = "zscore"


class Centered(Named):
    name: Literal["centered"] = "centered"


class Rloo(Named):
    name: Literal["rloo"] = "rloo"


class Opo(Named):
    name: Literal["opo"] = "opo"


class ReinforcePPBaseline(Named):
    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"


class Gpg(Named):
    name: Literal["gpg"] = "gpg"


class Tree(Named):
    unit_rewards: ClassVar[bool] = True
    name: Literal["tree"] = "tree"


class Krpo(Named):
    name: Literal["krpo"] = "krpo"
    initial_mean: float = 0.0
    initial_variance: PositiveFloat = 1.0
    process_noise: NonNegativeFloat = 1e-5
    measurement_noise: PositiveFloat = 1e-2


class Signed(Named):
    name: Literal["signed"] = "signed"
    positive: NonNegativeFloat  # weight of correct responses
    negative: NonNegativeFloat  # weight of incorrect responses


class Lead(Named):
    name: Literal["lead"] = "lead"
    length_decay: NonNegativeFloat = 0.05  # correct reward = exp(-length_decay * standardised length)
    incorrect_reward: float = -1.0
    weight_floor: NonNegativeFloat = 0.4
    weight_range: NonNegativeFloat = 1.1
    weight_slope: float = 10.0
    weight_midpoint: Fraction = 0.75


class Mixed(Named):
    unit_rewards: ClassVar[bool] = True
    name: Literal["mixed"] = "mixed"
    success: Literal["reward_is_one", "correct"] = "reward_is_one"


class Apd(Named):
    unit_rewards: ClassVar[bool] = True
    name: Literal["apd"] = "apd"


class Durian(Named):
    name: Literal["durian"] = "durian"
    group: NonNegativeFloat = 0.6  # a_o
    perceptual: NonNegativeFloat = 0.2  # a_p
    reasoning: NonNegativeFloat = 0.2  # a_r
    reasoning_bins: PositiveInt = 12
    normalise: bool = True  # confidence = mean token logprob; false = sum over the response, as printed


class PassAtK(Named):
    name: Literal["pass_at_k"] = "pass_at_k"
    k: PositiveInt = 4


# ---------------------------------------------------------------- shapers


class Stcr(Named):
    name: Literal["stcr"] = "stcr"
    mu: Annotated[float, Field(ge=1)] = 1.0001
    window: Literal["group", "batch"] = "group"
    only_negative: bool = False


class Ddas(Named):
    name: Literal["ddas"] = "ddas"


class Ass(Named):
    name: Literal["ass"] = "ass"
    alpha: PositiveFloat = 1.0


class SignScale(Named):
    name: Literal["sign_scale"] = "sign_scale"
    positive: NonNegativeFloat = 1.0
    negative: NonNegativeFloat = 1.0


class HardFocused(Named):
    name: Literal["hard_focused"] = "hard_focused"


class EasyFocused(Named):
    name: Literal["easy_focused"] = "easy_focused"


class Focal(Named):
    name: Literal["focal"] = "focal"
    gamma: NonNegativeFloat = 0.5


# ---------------------------------------------------------------- policy losses, aggregation, KL weights


class PpoClip(Named):
    name: Literal["ppo_clip"] = "ppo_clip"
    low: NonNegativeFloat = 0.2
    high: NonNegativeFloat = 0.2
    dual_c: Annotated[float, Field(gt=1)] | None = None


class Gspo(Named):
    name: Literal["gspo"] = "gspo"
    low: NonNegativeFloat = 3e-4
    high: NonNegativeFloat = 4e-4


class Cispo(Named):
    name: Literal["cispo"] = "cispo"
    low: NonNegativeFloat = 1.0  # 1 = no lower bound
    high: NonNegativeFloat = 2.0


class Reinforce(Named):
    name: Literal["reinforce"] = "reinforce"


class Ratio(Named):
    name: Literal["ratio"] = "ratio"


class SeqMeanTokenMean(Named):
    name: Literal["seq_mean_token_mean"] = "seq_mean_token_mean"


class TokenMean(Named):
    name: Literal["token_mean"] = "token_mean"


class SeqMeanTokenSum(Named):
    name: Literal["seq_mean_token_sum"] = "seq_mean_token_sum"


class SeqMeanTokenSumNorm(Named):
    name: Literal["seq_mean_token_sum_norm"] = "seq_mean_token_sum_norm"
    norm_len: PositiveInt | None = None  # null = the response limit, which the trainer passes


class Constant(Named):
    name: Literal["constant"] = "constant"


class Dads(Named):
    name: Literal["dads"] = "dads"
    curve: Literal["exponential", "linear", "cubic"] = "exponential"


ESTIMATORS = table_of(
    Zscore, Centered, Rloo, Opo, ReinforcePPBaseline, Gpg, Tree, Krpo, Signed, Lead, Mixed, Apd, Durian, PassAtK
)  # fmt: skip
SHAPERS = table_of(Stcr, Ddas, Ass, SignScale, HardFocused, EasyFocused, Focal)
POLICY_LOSSES = table_of(PpoClip, Gspo, Cispo, Reinforce, Ratio)
AGGREGATIONS = table_of(SeqMeanTokenMean, TokenMean, SeqMeanTokenSum, SeqMeanTokenSumNorm)
KL_WEIGHTS = table_of(Constant, Dads)


Estimator = Annotated[SerializeAsAny[Named], by_name("estimator", ESTIMATORS)]
Shaping = Annotated[dict[str, SerializeAsAny[Named]], by_key("shaper", SHAPERS)]
PolicyLoss = Annotated[SerializeAsAny[Named], by_name("policy loss", POLICY_LOSSES)]
Aggregate = Annotated[SerializeAsAny[Named], by_name("aggregation", AGGREGATIONS)]
KlWeights = Annotated[SerializeAsAny[Named], by_name("KL weight", KL_WEIGHTS)]


# ---------------------------------------------------------------- sections


class KlConfig(Piece):
    """``coef_positive`` and ``coef_negative``, given together, replace ``coef`` by whether the response is correct."""

    coef: NonNegativeFloat
    estimator: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"  # low_var_kl = k3
    placement: Literal["loss", "reward"] = "loss"
    weights: KlWeights = Constant()
    coef_positive: NonNegativeFloat | None = None
    coef_negative: NonNegativeFloat | None = None
    aggregate: Aggregate | None = None  # null = like the policy term

    @model_validator(mode="after")
    def _signs_together(self) -> KlConfig:
        if (self.coef_positive is None) != (self.coef_negative is None):
            raise ValueError("coef_positive and coef_negative replace coef together: give both or none")
        if self.coef_positive is not None and self.coef != 0:
            raise ValueError("coef_positive and coef_negative replace coef: set coef to 0")
        return self


class EntropyConfig(Piece):
    coef: float = 0.0  # loss -= coef * entropy
    metric: bool = True  # log the entropy even where coef is 0


class MismatchConfig(Piece):
    """What to do about engine and trainer disagreeing on the old policy: w = exp(old - sampler)."""

    kind: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    cap: Annotated[float, Field(gt=1)] = 2.0


class OverlongConfig(Piece):
    """Soft penalty for responses close to the limit: Lc = buffer_share * Lmax tokens."""

    buffer_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    factor: NonNegativeFloat = 1.0
    max_tokens: PositiveInt | None = None  # Lmax; null = the response limit, which the trainer passes


class RepetitionConfig(Piece):
    """Penalty for truncated responses that end in a repeated block."""

    penalty: NonNegativeFloat = 0.1
    min_block_tokens: PositiveInt = 1
    max_block_tokens: PositiveInt = 256


class RewardShapingConfig(Piece):
    overlong: OverlongConfig | None = None
    repetition: RepetitionConfig | None = None


class DynamicSamplingConfig(Piece):
    """Keep the groups with both outcomes; refill from the prompt stream."""

    max_tries: PositiveInt = 10  # rollouts for one step; what was collected by then is used


class FiltersConfig(Piece):
    dynamic_sampling: DynamicSamplingConfig | None = None
    drop_all_correct: bool = False


class MethodConfig(Piece):
    name: str
    estimator: Estimator
    shaping: Shaping = Field(default_factory=dict)
    policy_loss: PolicyLoss
    aggregate: Aggregate
    kl: KlConfig
    entropy: EntropyConfig = EntropyConfig()
    mismatch: MismatchConfig = MismatchConfig()
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    filters: FiltersConfig = FiltersConfig()
    std_ddof: Literal[0, 1] = 0  # divisor of a group's std: G - std_ddof
    eps: NonNegativeFloat = 1e-6  # added to the std

    @model_validator(mode="after")
    def _domains(self) -> MethodConfig:
        if self.estimator.unit_rewards:
            name = self.estimator.name
            if self.kl.placement == "reward":
                raise ValueError(f"estimator {name} needs rewards in [0, 1], which kl.placement=reward leaves; set kl.placement=loss")
            if self.reward_shaping.overlong or self.reward_shaping.repetition:
                raise ValueError(f"estimator {name} needs rewards in [0, 1], which a penalty leaves; set reward_shaping={{}}")
        if isinstance(self.estimator, Durian) and self.estimator.group + self.estimator.perceptual + self.estimator.reasoning == 0:
            raise ValueError("estimator durian: group, perceptual and reasoning are all 0, so is every advantage")
        return self


def reward_scheme_errors(method: MethodConfig, accuracy_weight: float, format_weight: float) -> list[str]:
    """What is wrong between a method and the reward weights; empty when nothing is.

    Example: ``mapo`` with weights 1 + 0.5 needs rewards in [0, 1], so the weights must sum to 1 (0.9 and 0.1 in the paper).
    """
    estimator, top = method.estimator, accuracy_weight + format_weight
    if not estimator.unit_rewards:
        return []
    rescale = "divide both weights by their sum, e.g. reward.accuracy_weight=0.9 reward.format_weight=0.1"
    if min(accuracy_weight, format_weight) < 0 or top > 1 + 1e-6:
        return [f"method.estimator.name = {estimator.name}: needs rewards in [0, 1], but they reach {top:g}; {rescale}"]
    if isinstance(estimator, Mixed) and estimator.success == "reward_is_one" and abs(top - 1) > 1e-6:
        return [
            f"method.estimator.success = reward_is_one: no response can reach a reward of exactly 1 (the weights sum to {top:g}); "
            f"{rescale}, or set method.estimator.success=correct"
        ]
    return []
