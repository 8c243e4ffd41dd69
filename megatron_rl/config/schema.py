"""The configuration of a run: strict (no unknown key, no coercion between types) and frozen.

Every default lives in ``conf/``, with what the key means; a field here has neither, so that both
have one home. Units are in the names.
"""

import re
from datetime import date
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from megatron_rl.annealing import AnnealConfig
from megatron_rl.config.data_names import as_names
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.sections import (
    EnvironmentConfig,
    LoggingConfig,
    MismatchLimits,
    NonFiniteConfig,
    ProfileConfig,
    RewardServerConfig,
    WarmStartConfig,
)
from megatron_rl.hooks import ChosenHooks
from megatron_rl.knobs import Piece
from megatron_rl.loss.config import MethodConfig

Decay = Annotated[float, Field(ge=0, lt=1)]  # at 1 a running mean never takes up a gradient
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
_SMALLEST_FLOAT32 = 1.2e-38
Columns = tuple[str, ...]


def _day(text: str) -> str:
    date.fromisoformat(text)  # raises ValueError
    return text


def _temperature(value: float) -> float:
    """vLLM raises a lower temperature to 0.01, without the trainer knowing: the two would then
    score by different distributions. It refuses one above 2, as soon as it is asked.
    """
    if value > 2:
        raise ValueError("the engine has none above 2; lower it")
    if 0 < value < 0.01:
        raise ValueError("the engine has none between 0 and 0.01; raise it to 0.01 or more")
    return value


def _top_k(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("give -1 (off) or at least 1")
    return value


def _eps(value: float) -> float:
    if value < _SMALLEST_FLOAT32:
        raise ValueError(
            "is 0 in float32, which gives 0 / 0 where there is no gradient; raise it to "
            f"{_SMALLEST_FLOAT32} or more"
        )
    return value


def _repository(name: str) -> str:
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise ValueError("is no repository of the hub; give OWNER/NAME")
    return name


class TrainerConfig(Piece):
    """Once the prompts are read ``num_steps`` is there in any case: ``data.reading.with_steps``."""

    num_steps: PositiveInt | None
    num_epochs: PositiveInt | None
    epochs_per_rollout: PositiveInt
    stall_limit_s: PositiveFloat
    deterministic: bool

    @property
    def steps(self) -> int:
        """The length of the run."""
        assert self.num_steps is not None, "the prompts, of which epochs are, have not been read"
        return self.num_steps


class BatchConfig(Piece):
    """All sizes are global, over every rank."""

    prompts_per_step: PositiveInt
    responses_per_prompt: PositiveInt
    prompts_per_minibatch: PositiveInt
    tokens_per_microbatch: PositiveInt
    share_prompts: bool


class ModelConfig(Piece):
    path: str
    teacher: dict[str, str] | str | None
    make_vocab_divisible_by: PositiveInt
    freeze_vision: bool
    lora: LoraConfig


class ParallelConfig(Piece):
    tensor: PositiveInt
    pipeline: PositiveInt
    virtual_pipeline: PositiveInt | None
    context: PositiveInt
    expert: PositiveInt
    expert_tensor: PositiveInt
    sequence: bool
    distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    recompute: Literal["none", "selective", "full"]
    first_stage_layers: PositiveInt | None
    last_stage_layers: PositiveInt | None


class Fp8Config(Piece):
    """Matrix products of the transformer layers in FP8, by Transformer Engine."""

    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
    format: Literal["hybrid", "e4m3"]
    param_gather: bool
    num_layers_at_start_in_bf16: NonNegativeInt
    num_layers_at_end_in_bf16: NonNegativeInt
    amax_history_len: PositiveInt | None
    amax_compute_algo: Literal["most_recent", "max"] | None
    logprobs: Literal["same", "bfloat16"]


class PrecisionConfig(Piece):
    params: Literal["float32", "bfloat16"]
    grad_reduce_in_float32: bool
    fp8: Fp8Config | None
    adam: Literal["auto", "fused"]
    adam_moments: Literal["float32", "bfloat16"]


class ResponseStage(Piece):
    """The response limit from a step of the run on."""

    from_step: PositiveInt
    max_response_tokens: PositiveInt


class RolloutConfig(Piece):
    tensor: PositiveInt
    pipeline: PositiveInt
    expert_parallel: bool
    dtype: Literal["float32", "bfloat16"]
    quantization: Literal["fp8"] | None
    temperature: Annotated[PositiveFloat, AfterValidator(_temperature)]
    anneal: AnnealConfig
    top_p: PositiveFraction
    top_k: Annotated[int, AfterValidator(_top_k)]
    router_replay: Literal["none", "old_policy", "rollout"]
    max_prompt_tokens: PositiveInt
    max_response_tokens: PositiveInt
    response_stages: tuple[ResponseStage, ...] | None
    stop: tuple[Annotated[str, Field(min_length=1)], ...]
    max_num_seqs: PositiveInt | None
    kv_cache_gib: PositiveFloat | None
    gpu_memory_utilization: PositiveFraction
    enforce_eager: bool
    batch_invariant: bool
    enable_prefix_caching: bool
    sleep_level: Literal[0, 1, 2]

    @property
    def ranks(self) -> int:
        """Ranks of one replica of the engine."""
        return self.tensor * self.pipeline

    @property
    def is_truncated(self) -> bool:
        """Whether training samples from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0

    def response_limit(self, step: int) -> int:
        """Most tokens of a response of a training step, counted from 1."""
        limit = self.max_response_tokens
        for stage in self.response_stages or ():  # ascending, as ``config.rules.checks`` has it
            if stage.from_step <= step:
                limit = stage.max_response_tokens
        return limit


class PartialConfig(Piece):
    """Responses that continue in the next step."""

    groups_in_flight: PositiveInt | None
    max_age: PositiveInt


class SourceConfig(Piece):
    """The source of the responses of a step."""

    name: Literal["colocated", "servers"]
    staleness: NonNegativeInt
    schedule: Literal["lockstep", "free"]
    requests_per_server: PositiveInt
    request_timeout_factor: Annotated[float, Field(ge=1)] | None
    record_gib: NonNegativeFloat
    partial: PartialConfig

    @property
    def is_servers(self) -> bool:
        return self.name == "servers"

    @property
    def is_partial(self) -> bool:
        return self.partial.groups_in_flight is not None


class WeightSyncConfig(Piece):
    method: Literal["auto", "gather", "reshard"]
    verify: bool
    bucket_mib: PositiveInt
    rounds_in_flight: PositiveInt
    logprob_check_every: NonNegativeInt
    logprob_check_tolerance: PositiveFloat | None


class DataColumns(Piece):
    """Column (dotted path for nested fields) of each role in a data file.

    A column that is named must be there. ``auto``: the column of the role's own name where there is
    one; null: never a column.
    """

    prompt: Columns | str | None
    answer: str
    images: Columns | str | None
    choices: str | None
    categories: Columns
    solution: str | None
    data_source: str | None
    extra: str | None


# The forms of a name are listed in conf/data/default.yaml.
DataNames = Annotated[tuple[str, ...] | str, BeforeValidator(as_names)]


class DataConfig(Piece):
    train: DataNames
    train_weights: tuple[PositiveFloat, ...] | None
    eval: DataNames
    columns: DataColumns
    system_prompt: str | None
    prompt_prefix: str
    prompt_suffix: str
    answer_after: str | None
    show_choices: bool
    answer_is_index: bool
    hint_ratios: tuple[Annotated[float, Field(gt=0, lt=1)], ...]
    hint_text: str
    images_first: bool
    min_pixels: PositiveInt | None
    max_pixels: PositiveInt | None
    apply_chat_template: bool
    template_date: Annotated[str, AfterValidator(_day)] | None
    on_long_prompt: Literal["error", "drop"]
    drop_eval_overlap: bool
    shuffle: bool


class RewardConfig(Piece):
    """The scoring of responses, in worker processes, within these limits."""

    verifier: str
    function: str | None
    server: RewardServerConfig | None
    accuracy_weight: float
    format_weight: float
    format_pattern: str | None
    answer_pattern: str | None
    partial_credit: bool
    timeout_s: PositiveFloat
    step_timeout_s: PositiveFloat
    function_timeout_s: PositiveFloat
    num_workers: PositiveInt
    memory_gib: PositiveFloat
    num_tries: PositiveInt
    on_problem: Literal["exclude", "zero", "stop"]
    max_excluded_share: Annotated[float, Field(ge=0, le=1)]
    sandbox: Literal["bubblewrap", "rlimits_only"]


class OptimConfig(Piece):
    # A larger rate overflows where an optimizer in float32 multiplies with it.
    learning_rate: Annotated[float, Field(gt=0, le=1e30)]
    min_learning_rate: NonNegativeFloat
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: NonNegativeInt
    weight_decay: NonNegativeFloat
    beta1: Decay
    beta2: Decay
    eps: Annotated[PositiveFloat, AfterValidator(_eps)]
    clip_grad: NonNegativeFloat
    router_aux_loss_coef: NonNegativeFloat
    router_z_loss_coef: NonNegativeFloat
    router_bias_rate: NonNegativeFloat


class ResumeConfig(Piece):
    """``resume=X`` on the command line is short for ``resume.checkpoint=X``."""

    checkpoint: str
    changed: Literal["refuse", "allow"]


class CheckpointConfig(Piece):
    every_steps: NonNegativeInt
    every_minutes: NonNegativeFloat
    background: bool
    keep: PositiveInt
    keep_every_steps: NonNegativeInt
    keep_best: bool
    best_metric: Annotated[str, Field(pattern="^eval/")]
    export_every_steps: NonNegativeInt
    export_at_end: bool
    verify: bool


class HubConfig(Piece):
    push: Annotated[str, AfterValidator(_repository)] | None


class EvaluationConfig(Piece):
    every_steps: NonNegativeInt
    at_start: bool
    at_end: bool
    num_prompts: PositiveInt | None
    responses_per_prompt: PositiveInt
    temperature: Annotated[NonNegativeFloat, AfterValidator(_temperature)]
    top_p: PositiveFraction
    pass_at: tuple[PositiveInt, ...]
    stop_after: PositiveInt | None


class MemoryConfig(Piece):
    """Parts of the policy that leave the device while the engine generates, and a check."""

    enforce: bool
    offload: tuple[Literal["optimizer", "gradients", "weights"], ...]


class Config(Piece):
    run_dir: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=2**32)]  # what the rollout engine takes
    resume: ResumeConfig
    trainer: TrainerConfig
    warm_start: WarmStartConfig
    batch: BatchConfig
    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    rollout: RolloutConfig
    source: SourceConfig
    weight_sync: WeightSyncConfig
    data: DataConfig
    reward: RewardConfig
    env: EnvironmentConfig
    optim: OptimConfig
    checkpoint: CheckpointConfig
    hub: HubConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig
    profile: ProfileConfig
    memory: MemoryConfig
    mismatch_limits: MismatchLimits
    rollout_hooks: ChosenHooks  # between scoring and credit, in this order: {name: {knobs}}
    nonfinite: NonFiniteConfig
    method: MethodConfig

    @property
    def sync_method(self) -> Literal["gather", "reshard"]:
        """The value of ``weight_sync.method``, with auto resolved: reshard where policy and engine
        have one dtype and the engine keeps its weights in it."""
        if self.weight_sync.method != "auto":
            return self.weight_sync.method
        if self.precision.params == self.rollout.dtype and self.rollout.quantization is None:
            return "reshard"
        return "gather"
