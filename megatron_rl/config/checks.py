"""Checks that need more than one key: sizes that must divide, paths that must exist. All problems are reported at once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.cache import cache_problems
from megatron_rl.config.data_names import data_problems, entries, weight_problems
from megatron_rl.config.load import ConfigError
from megatron_rl.config.machine import Machine, machine_problems
from megatron_rl.config.method import reward_scheme_errors
from megatron_rl.config.model_config import read_model_config
from megatron_rl.config.schema import Config, RolloutConfig

LOGGER = logging.getLogger(__name__)


def check(
    config: Config, world_size: int, machine: Machine | None = None, architectures: Collection[str] | None = None
) -> None:
    """Refuses a configuration that cannot run on ``world_size`` processes of ``machine`` (None: any machine) with a model of one of
    ``architectures`` (None: any).

    Raises:
        ConfigError: one line for each problem: key, value, remedy.
    """
    problems = [*_parallel(config, world_size), *_batch(config, world_size), *_lengths(config), *_method(config), *_paths(config)]
    problems += [*_precision(config), *_memory(config), *_optim(config), *_seed(config, world_size), *_best(config)]
    try:
        hf_config = read_hf_config(config.model.path, architectures)
    except ValueError as error:
        hf_config = None
        problems.append(str(error))
    if hf_config is not None:
        problems += _model(config, hf_config)
        on_cpu = machine is not None and machine.compute_capability is None
        problems += cache_problems(config, hf_config, on_cpu=on_cpu)
    if machine is not None:
        problems += machine_problems(config, machine, hf_config)
    if problems:
        raise ConfigError(problems, "the configuration")
    for warning in _unusual(config):
        LOGGER.warning("%s", warning)


def num_optimizer_steps(config: Config) -> int:
    """Optimizer steps of a whole run, the length of the learning-rate schedule."""
    per_rollout = config.batch.prompts_per_step // config.batch.prompts_per_minibatch
    return config.trainer.num_steps * config.trainer.updates_per_rollout * per_rollout


def read_hf_config(path: str, architectures: Collection[str] | None = None) -> dict[str, Any] | None:
    """``config.json`` of a HF directory, None where there is none. Raises ValueError as ``read_model_config`` does."""
    file = Path(path) / "config.json"
    return read_model_config(file, architectures) if file.is_file() else None


def model_parallel_size(config: Config) -> int:
    """Ranks that hold one replica of the policy."""
    return config.parallel.tensor * config.parallel.pipeline * config.parallel.context


def _parallel(config: Config, world_size: int) -> Iterator[str]:
    parallel, size = config.parallel, model_parallel_size(config)
    if world_size % size:
        yield (
            f"parallel: tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} = {size} "
            f"does not divide the {world_size} processes; start a multiple of {size} (torchrun --nproc-per-node) or change parallel.*"
        )
    if world_size % config.rollout.tensor:
        yield f"rollout.tensor = {config.rollout.tensor}: does not divide the {world_size} processes; choose a divisor of {world_size}"
    if parallel.sequence and parallel.tensor == 1:
        yield "parallel.sequence = True: splits sequences over the tensor-parallel ranks; set parallel.tensor > 1, or sequence=false"
    if parallel.virtual_pipeline is not None and parallel.pipeline == 1:
        yield f"parallel.virtual_pipeline = {parallel.virtual_pipeline}: needs parallel.pipeline > 1; set it to null"
    expert_size = parallel.expert * (parallel.expert_tensor or 1) * parallel.pipeline
    if world_size % expert_size:
        yield f"parallel.expert = {parallel.expert}: x expert_tensor x pipeline = {expert_size} does not divide the {world_size} processes"


def _batch(config: Config, world_size: int) -> Iterator[str]:
    batch = config.batch
    if batch.prompts_per_step % batch.prompts_per_minibatch:
        yield (
            f"batch.prompts_per_minibatch = {batch.prompts_per_minibatch}: does not divide batch.prompts_per_step = "
            f"{batch.prompts_per_step}; choose a divisor: one optimizer step takes an equal part of the rollout batch"
        )
    replicas = max(1, world_size // model_parallel_size(config))
    responses = batch.prompts_per_minibatch * batch.responses_per_prompt
    if responses < replicas:
        yield (
            f"batch.prompts_per_minibatch = {batch.prompts_per_minibatch}: {responses} responses "
            f"are fewer than the {replicas} data-parallel ranks; raise it"
        )
    engines = max(1, world_size // config.rollout.tensor)
    if batch.prompts_per_step < engines:
        yield f"batch.prompts_per_step = {batch.prompts_per_step}: fewer than the {engines} rollout replicas; raise it, or rollout.tensor"


def _lengths(config: Config) -> Iterator[str]:
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if config.batch.tokens_per_microbatch < longest:
        yield (
            f"batch.tokens_per_microbatch = {config.batch.tokens_per_microbatch}: one sequence may have rollout.max_prompt_tokens + "
            f"rollout.max_response_tokens = {longest} tokens; raise it to {longest} or more"
        )
    for k in config.evaluation.pass_at:
        if k > config.evaluation.responses_per_prompt:
            responses = config.evaluation.responses_per_prompt
            yield f"evaluation.pass_at = {k}: needs evaluation.responses_per_prompt >= {k}, which is {responses}"
    if config.evaluation.temperature == 0 and config.evaluation.responses_per_prompt > 1:
        yield "evaluation.responses_per_prompt > 1 with evaluation.temperature = 0: all responses would be the same; raise the temperature"


def _method(config: Config) -> Iterator[str]:
    yield from reward_scheme_errors(config.method, config.reward.accuracy_weight, config.reward.format_weight)
    if config.rollout.quantization is not None:
        reason = f"rollout.quantization = {config.rollout.quantization}: the engine's probabilities then differ from the trainer's;"
        if config.method.mismatch.kind == "none":
            yield f"{reason} set method.mismatch.kind=tis (truncated importance sampling) as rollout=vllm_fp8 does, icepop or sequence_mask"
        if config.mismatch_alarm.warn_above is None:
            yield f"{reason} set mismatch_alarm.warn_above (0.1 in rollout=vllm_fp8)"
    if config.weight_sync.path == "plan" and config.precision.params != config.rollout.dtype:
        yield (
            f"weight_sync.path = plan: moves bytes as they are, but precision.params = {config.precision.params} and rollout.dtype = "
            f"{config.rollout.dtype}; make the two equal, or set weight_sync.path=gather, which converts"
        )


def _precision(config: Config) -> Iterator[str]:
    precision, fp8, parallel = config.precision, config.precision.fp8, config.parallel
    if precision.params == "bfloat16" and config.rollout.dtype == "float32":
        yield "rollout.dtype = float32: the policy's weights are bfloat16 (precision.params); set rollout.dtype=bfloat16 or precision=fp32"
    if precision.adam_moments != "float32" and not parallel.distributed_optimizer:
        yield f"precision.adam_moments = {precision.adam_moments}: needs parallel.distributed_optimizer=true, or set it to float32"
    if fp8 is None:
        return
    if precision.params != "bfloat16":
        yield f"precision.params = {precision.params}: FP8 layers train bfloat16 weights; set precision.params=bfloat16"
    delayed = fp8.recipe == "delayed"
    for key in ("amax_history_len", "amax_compute_algo"):
        value = getattr(fp8, key)
        if delayed and value is None:
            yield f"precision.fp8.{key} = None: recipe delayed needs it; see precision=fp8_delayed"
        elif not delayed and value is not None:
            yield f"precision.fp8.{key} = {value}: only recipe delayed has it; set it to null"
    ends = {key: getattr(fp8, key) for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")}
    for key, layers in ends.items():
        if delayed and layers:
            yield f"precision.fp8.{key} = {layers}: recipe delayed cannot leave out layers; set it to 0, or choose another recipe"
    if fp8.param_gather and not parallel.distributed_optimizer:
        yield "precision.fp8.param_gather = True: needs parallel.distributed_optimizer=true, or set it to false"
    if fp8.param_gather and fp8.recipe == "mxfp8":
        yield "precision.fp8.param_gather = True: not with recipe mxfp8, whose gathers share the gradient buffer; set it to false"
    kl = config.method.kl
    if fp8.param_gather and any((kl.coef, kl.coef_positive, kl.coef_negative)):
        yield "precision.fp8.param_gather = True: the weights cannot be exchanged with the reference's without loss; set it to false"


def _optim(config: Config) -> Iterator[str]:
    optim = config.optim
    if optim.min_learning_rate > optim.learning_rate:
        yield (
            f"optim.min_learning_rate = {optim.min_learning_rate}: is above optim.learning_rate = "
            f"{optim.learning_rate}, and the schedule would rise towards it; lower it"
        )


def _unusual(config: Config) -> Iterator[str]:
    """What may be meant, in a short trial of a long run's settings, and is more often a mistake."""
    optim, steps = config.optim, num_optimizer_steps(config)
    if optim.warmup_steps > steps:
        reached = optim.learning_rate * steps / optim.warmup_steps
        yield (
            f"optim.warmup_steps = {optim.warmup_steps}: the run has {steps} optimizer steps, so the "
            f"learning rate ends at {reached:.3g} and never reaches optim.learning_rate = "
            f"{optim.learning_rate:g}; lower it, or raise trainer.num_steps"
        )


def _memory(config: Config) -> Iterator[str]:
    offload, fp8 = config.memory.offload, config.precision.fp8
    if len(set(offload)) < len(offload):
        yield f"memory.offload = {list(offload)}: names a part twice; name each once"
    if "weights" in offload and fp8 is not None and fp8.param_gather:
        yield "memory.offload: weights that are kept in FP8 cannot be offloaded; leave weights out, or set precision.fp8.param_gather=false"


def _seed(config: Config, world_size: int) -> Iterator[str]:
    """Replica r of the engine is seeded with ``seed + r``, in 32 bits."""
    replicas = max(1, world_size // config.rollout.tensor)
    if config.seed + replicas > 2**32:
        yield f"seed = {config.seed}: {replicas} engines take this and the next {replicas - 1}; give at most {2**32 - replicas}"


def _best(config: Config) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation.every_steps:
        return
    remedy = "there is no evaluation during training (evaluation.every_steps = 0); set it"
    if config.checkpoint.keep_best:
        yield f"checkpoint.keep_best = True: {remedy}, or keep_best=false"
    if evaluation.stop_after is not None:
        yield f"evaluation.stop_after = {evaluation.stop_after}: {remedy}, or stop_after=null"


def _paths(config: Config) -> Iterator[str]:
    model = Path(config.model.path)
    if not model.is_dir():
        yield f"model.path = {model}: no such folder; give a HF directory (config.json, safetensors, tokenizer)"
    elif not (model / "config.json").is_file():
        yield f"model.path = {model}: no config.json in it; give a HF directory"
    yield from data_problems("data.train", config.data.train)
    yield from weight_problems(entries(config.data.train), config.data.train_weights)
    yield from data_problems("data.eval", config.data.eval)
    resume = config.resume.checkpoint
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        yield f"resume.checkpoint = {resume}: no such folder; give auto, never or the path of a checkpoint"


def _model(config: Config, hf_config: dict[str, Any]) -> Iterator[str]:
    parallel = config.parallel
    heads, layers = hf_config["num_attention_heads"], hf_config["num_hidden_layers"]
    kv_heads = hf_config.get("num_key_value_heads") or heads
    if heads % parallel.tensor:
        yield f"parallel.tensor = {parallel.tensor}: does not divide the model's {heads} attention heads; choose a divisor of {heads}"
    elif kv_heads % parallel.tensor:
        yield f"parallel.tensor = {parallel.tensor}: does not divide the model's {kv_heads} key-value heads; choose a divisor of {kv_heads}"
    if heads % config.rollout.tensor:
        yield f"rollout.tensor = {config.rollout.tensor}: does not divide the model's {heads} attention heads; choose a divisor of {heads}"
    uneven = parallel.first_stage_layers or parallel.last_stage_layers
    chunks = parallel.pipeline * (parallel.virtual_pipeline or 1)
    if not uneven and layers % chunks:
        yield (
            f"parallel.pipeline = {parallel.pipeline} (x virtual_pipeline {parallel.virtual_pipeline or 1}): {layers} layers do not "
            f"divide into {chunks} stages; choose a divisor, or set parallel.first_stage_layers / last_stage_layers"
        )
    fp8 = config.precision.fp8
    for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16") if fp8 is not None else ():
        if getattr(fp8, key) > layers // parallel.pipeline:
            yield f"precision.fp8.{key} = {getattr(fp8, key)}: one pipeline stage has {layers // parallel.pipeline} layers; lower it"
    yield from position_problems(config.rollout, hf_config)


def position_problems(rollout: RolloutConfig, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """A prompt and its response together are longer than the model can see."""
    limit = hf_config.get("max_position_embeddings")
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if limit is not None and longest > limit:
        yield (
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}: the model has "
            f"{limit} positions; lower one of them"
        )
