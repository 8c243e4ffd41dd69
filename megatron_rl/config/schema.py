"""The configuration of a run: strict (no unknown key, no coercion between types) and frozen.

Every default lives in ``conf/``; a field here has none, so that a value has one home. Units are in the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from megatron_rl.config.hooks import RolloutHooks
from megatron_rl.config.method import MethodConfig

Decay = Annotated[float, Field(ge=0, lt=1)]  # at 1 a running mean never takes up a gradient
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
SMALLEST_FLOAT32 = 1.2e-38


def _temperature(value: float) -> float:
    """vLLM raises a lower temperature to 0.01, without the trainer knowing.

    The two would then score by different distributions.
    """
    if 0 < value < 0.01:
        raise ValueError("the engine has none between 0 and 0.01; raise it to 0.01 or more")
    return value


def _top_k(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("give -1 (off) or at least 1")
    return value


def _eps(value: float) -> float:
    if value < SMALLEST_FLOAT32:
        raise ValueError(
            "is 0 in float32, which gives 0 / 0 where there is no gradient; raise it to "
            f"{SMALLEST_FLOAT32} or more"
        )
    return value


class Section(BaseModel):
    # Numbers are finite: JSON has no others, and a rate of inf is written into every weight.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TrainerConfig(Section):
    num_steps: PositiveInt
    updates_per_rollout: PositiveInt  # passes over the rollout batch ("mu", "ppo_epochs" elsewhere)


class BatchConfig(Section):
    """All sizes are global, over every rank."""

    prompts_per_step: PositiveInt
    responses_per_prompt: PositiveInt
    prompts_per_minibatch: PositiveInt  # one optimizer step
    tokens_per_microbatch: PositiveInt  # prompt + response tokens of one forward on one data-parallel rank
    share_prompts: bool  # compute the prompt of several responses once, where the policy's attention can


class ModelConfig(Section):
    path: str  # HF directory: config.json, safetensors, tokenizer
    make_vocab_divisible_by: PositiveInt


class ParallelConfig(Section):
    tensor: PositiveInt
    pipeline: PositiveInt
    virtual_pipeline: PositiveInt | None  # model chunks per pipeline rank; null = not interleaved
    context: PositiveInt
    expert: PositiveInt
    expert_tensor: PositiveInt | None  # null = 1
    sequence: bool  # sequence parallelism inside the tensor-parallel group
    distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    recompute: Literal["none", "selective", "full"]
    first_stage_layers: PositiveInt | None  # uneven pipelines; null = even
    last_stage_layers: PositiveInt | None


class Fp8Config(Section):
    """Matrix products of the transformer layers in FP8, by Transformer Engine. Embedding, output layer and attention stay in bfloat16."""

    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"]  # how scales are found
    format: Literal["hybrid", "e4m3"]  # hybrid: gradients in e5m2
    param_gather: bool  # weights of the layers are kept in FP8 and gathered so; the optimizer has float32 copies
    num_layers_at_start_in_bf16: NonNegativeInt
    num_layers_at_end_in_bf16: NonNegativeInt
    amax_history_len: PositiveInt | None  # delayed only: steps whose largest values decide the scale
    amax_compute_algo: Literal["most_recent", "max"] | None  # delayed only
    logprobs: Literal["same", "bfloat16"]  # old and reference logprobs: in the same recipe as the update, or without FP8


class PrecisionConfig(Section):
    params: Literal["float32", "bfloat16"]
    grad_reduce_in_float32: bool
    fp8: Fp8Config | None  # null = no FP8
    adam: Literal["auto", "fused"]  # auto: Transformer Engine's or apex's where importable, else torch's; fused: refuse torch's
    adam_moments: Literal["float32", "bfloat16"]  # bfloat16 needs Transformer Engine's Adam and the distributed optimizer


class RolloutConfig(Section):
    tensor: PositiveInt  # vLLM tensor parallelism; replicas = world size / tensor
    dtype: Literal["float32", "bfloat16"]
    quantization: Literal["fp8"] | None  # weights are quantised as they arrive; needs method.mismatch and mismatch_alarm.warn_above
    temperature: Annotated[PositiveFloat, AfterValidator(_temperature)]
    top_p: PositiveFraction
    top_k: Annotated[int, AfterValidator(_top_k)]  # -1 = off
    max_prompt_tokens: PositiveInt
    max_response_tokens: PositiveInt
    stop: tuple[str, ...]
    # Sequences under way at once; null: vLLM's choice for the card, more on those of 70 GiB and more.
    max_num_seqs: PositiveInt | None
    kv_cache_gib: PositiveFloat | None  # null = from gpu_memory_utilization
    gpu_memory_utilization: PositiveFraction
    enforce_eager: bool
    enable_prefix_caching: bool
    # While the policy trains the engine: 0 stays, 1 keeps its weights in host memory, 2 drops them.
    sleep_level: Literal[0, 1, 2]


class WeightSyncConfig(Section):
    path: Literal["gather", "plan"]  # gather: every rank gets every tensor whole; plan: each byte goes where it is wanted, once
    verify: bool
    bucket_mib: PositiveInt  # plan only: largest message
    in_flight: PositiveInt  # plan only: rounds of messages that may hold buffers at once
    canary_every: NonNegativeInt  # steps between two comparisons of engine and policy on fixed sequences, after the sync; 0 = never
    canary_tolerance: PositiveFloat | None  # largest mean |logprob(engine) - logprob(policy)| tolerated there; null = only logged


class DataColumns(Section):
    """Column (dotted path for nested fields) of each role in a data file.

    A column that is named must be there. ``auto``: the column of the role's own name where there is
    one; null: never a column.
    """

    prompt: str
    answer: str
    data_source: str | None  # without a column: the name of the file or data set
    extra: str | None  # without a column: empty


def _names(value: Any) -> Any:
    """A mapping is what others write for weights: the answer says how it is written here."""
    if isinstance(value, Mapping):
        names = ",".join(map(str, value))
        weights = ",".join(map(str, value.values()))
        here = f"data.train=[{names}] data.train_weights=[{weights}]"
        raise ValueError(f"weights have a key of their own: {here}")
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError("give a name, or a list of names")
    return tuple(value)


# A .jsonl or .parquet file, a pattern such as data/*.jsonl, hf:NAME[:CONFIG]:SPLIT, or
# reasoning_gym:<task>[+<task>...]?size=N&seed=S; or a list of these.
DataNames = Annotated[tuple[str, ...] | str, BeforeValidator(_names)]


class DataConfig(Section):
    """``train`` and ``eval``: where prompts come from, see ``DataNames``."""

    train: DataNames
    train_weights: tuple[PositiveFloat, ...] | None  # share of each entry of train; null: by size
    eval: DataNames
    columns: DataColumns
    system_prompt: str | None
    prompt_suffix: str  # added to the last message
    answer_after: str | None  # the answer is what follows the last occurrence of this marker ("####" in GSM8K); null = the whole column
    apply_chat_template: bool  # false = the prompt is encoded as it stands
    on_long_prompt: Literal["error", "drop"]
    drop_eval_overlap: bool  # leave prompts that are also in eval out of training
    shuffle: bool


class RewardConfig(Section):
    """How responses are judged. Whatever reads a response runs in worker processes, within these limits."""

    verifier: str  # auto (by data_source), reasoning_gym, math, exact, number, code, or the name a plug-in registers
    function: str | None  # path.py:name or package.module:name, in place of a verifier; see rewards/function.py
    accuracy_weight: float
    format_weight: float
    format_pattern: str | None  # regular expression the whole response must match; null = no format part
    answer_pattern: str | None  # regular expression whose first group is the answer; null = the whole response
    partial_credit: bool  # keep fractions: of a reasoning_gym scorer, of passed tests; false = anything below 1 counts 0
    timeout_s: PositiveFloat  # one response: patterns and verifier together
    step_timeout_s: PositiveFloat  # all responses that one rank scores at once; what is not judged by then counts as not judged
    function_timeout_s: PositiveFloat  # one call of the function
    num_workers: PositiveInt  # on each rank
    memory_gib: PositiveFloat  # that one worker may take while it judges
    sandbox: Literal["bubblewrap", "rlimits_only"]  # code only; rlimits_only is weaker, see rewards/sandbox.py


class OptimConfig(Section):
    learning_rate: Annotated[float, Field(gt=0, le=1e30)]  # what optimizers in float32 can multiply with
    min_learning_rate: NonNegativeFloat
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: NonNegativeInt  # optimizer steps
    weight_decay: NonNegativeFloat
    beta1: Decay
    beta2: Decay
    eps: Annotated[PositiveFloat, AfterValidator(_eps)]
    clip_grad: NonNegativeFloat  # 0 = off


class ResumeConfig(Section):
    """``resume=X`` on the command line is short for ``resume.checkpoint=X``."""

    checkpoint: str  # auto (the newest whole one of run_dir) | never | path of a checkpoint
    changed: Literal["refuse", "allow"]  # a start whose settings would change what is trained; allow = go on, in changes.jsonl


class CheckpointConfig(Section):
    every_steps: NonNegativeInt  # 0 = at the end only
    keep: PositiveInt  # newest ones
    keep_best: bool  # also save at every evaluation that is the best so far, and keep that one besides the newest
    best_metric: Annotated[str, Field(pattern="^eval/")]  # larger is better
    export_every_steps: NonNegativeInt  # into exports/step_NNNNNN; 0 = never
    export_at_end: bool
    verify: bool  # compare the digests of a checkpoint before it is loaded; false = sizes only (spares reading it twice)


class EvaluationConfig(Section):
    every_steps: NonNegativeInt  # 0 = only where at_start / at_end say so
    at_start: bool
    at_end: bool
    num_prompts: PositiveInt | None  # null = the whole file
    responses_per_prompt: PositiveInt
    temperature: Annotated[NonNegativeFloat, AfterValidator(_temperature)]  # 0 = greedy
    top_p: PositiveFraction
    pass_at: tuple[PositiveInt, ...]
    stop_after: PositiveInt | None  # evaluations without a better checkpoint.best_metric that end the run; null = never


class LoggingConfig(Section):
    console: bool
    tensorboard: bool
    wandb: Literal["disabled", "offline", "online"]
    wandb_project: str
    log_samples: NonNegativeInt  # responses written to samples.jsonl each step


class MemoryConfig(Section):
    """What of the policy leaves the device while the engine generates, and the watch over what stays."""

    refuse: bool  # a start whose planned memory exceeds the device's; false = warn and go on
    offload: tuple[Literal["optimizer", "gradients", "weights"], ...]
    alarm_growth_gib: PositiveFloat | None  # warn when the least memory of a phase over 10 steps grew by more; null = off


class MismatchAlarmConfig(Section):
    warn_above: PositiveFloat | None  # mean |logprob(sampler) - logprob(trainer)| that gets a warning; null = only logged
    # Largest |logprob(sampler) - logprob(trainer)| tolerated; null = only logged. Looked at before the weights go to the sampler or into a
    # checkpoint; the step's update may have been taken by then.
    abort_above: PositiveFloat | None


class NonFiniteConfig(Section):
    """Optimizer steps whose loss or gradient norm is not finite are always skipped."""

    stop_after: PositiveInt | None  # skipped optimizer steps in a row that stop the run; null = never
    bundle_step: PositiveInt | None  # step whose first minibatch is written for tools/replay_step.py, finite or not; null = none


class Config(Section):
    run_dir: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=2**32)]  # what the rollout engine takes
    resume: ResumeConfig
    trainer: TrainerConfig
    batch: BatchConfig
    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    rollout: RolloutConfig
    weight_sync: WeightSyncConfig
    data: DataConfig
    reward: RewardConfig
    optim: OptimConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig
    memory: MemoryConfig
    mismatch_alarm: MismatchAlarmConfig
    rollout_hooks: RolloutHooks  # between scoring and credit, in this order: {name: {knobs}}
    nonfinite: NonFiniteConfig
    method: MethodConfig
