"""Checks that need more than one key: sizes that must divide, paths that must exist."""

import logging
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.config.data_names import data_problems, entries
from megatron_rl.config.model_config import model_sizes
from megatron_rl.config.rules.engine_checks import engine_side, replica_problems
from megatron_rl.config.rules.hardware import Machine, machine_problems
from megatron_rl.config.rules.layout_rules import model_problems, replica_ranks, world_problems
from megatron_rl.config.rules.source_rules import source_problems, warm_start_problems
from megatron_rl.config.rules.teacher_rules import teacher_problems
from megatron_rl.config.schema import Config, Fp8Config, RolloutConfig
from megatron_rl.errors import ConfigError
from megatron_rl.loss.config import reward_scheme_errors

_LAYERS_IN_BF16 = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")

logger = logging.getLogger(__name__)


def check(
    config: Config,
    world_size: int,
    machine: Machine | None = None,
    architectures: Collection[str] | None = None,
) -> None:
    """Refuses a configuration that cannot run on ``world_size`` processes.

    Args:
        machine: what each process runs on; None: any machine.
        architectures: those of which the model must have one; None: any.

    Raises:
        ConfigError: all problems at once, one line each: key, value, remedy.
    """
    engine, hf_config = engine_side(config, world_size, machine, architectures)
    problems = [
        *world_problems(config.parallel, world_size),
        *source_problems(config),
        *_batch(config, world_size),
        *_lengths(config),
        *_method(config),
        *_paths(config),
        *_precision(config),
        *_training(config),
        *warm_start_problems(config, world_size // replica_ranks(config.parallel)),
        *engine,
    ]
    if hf_config is not None:
        problems += [*_model(config, hf_config), *teacher_problems(config, hf_config)]
    if machine is not None:
        problems += machine_problems(config, machine, hf_config)
    if problems:
        raise ConfigError(problems, "the configuration")
    _warn_of_unusual(config)


def num_optimizer_steps(config: Config) -> int:
    """Optimizer steps of a whole run, the length of the learning-rate schedule."""
    per_rollout = config.batch.prompts_per_step // config.batch.prompts_per_minibatch
    warm = config.warm_start.steps  # of one optimizer step each
    sampled = config.trainer.steps - warm
    return warm + sampled * config.trainer.epochs_per_rollout * per_rollout


def _batch(config: Config, world_size: int) -> Iterator[str]:
    batch = config.batch
    minibatch = batch.prompts_per_minibatch
    if batch.prompts_per_step % minibatch:
        yield (
            f"batch.prompts_per_minibatch = {minibatch}: does not divide batch.prompts_per_step ="
            f" {batch.prompts_per_step}; choose a divisor: one optimizer step takes an equal part"
            " of the rollout batch"
        )
    # At least 1: sizes that do not divide are refused elsewhere, and all problems are listed.
    replicas = max(1, world_size // replica_ranks(config.parallel))
    responses = minibatch * batch.responses_per_prompt
    if responses < replicas:
        yield (
            f"batch.prompts_per_minibatch = {minibatch}: {responses} responses are fewer than the"
            f" {replicas} data-parallel ranks; raise it"
        )
    if config.source.is_servers:
        return
    yield from replica_problems(config, world_size)
    engines = max(1, world_size // config.rollout.ranks)
    if batch.prompts_per_step < engines:
        yield (
            f"batch.prompts_per_step = {batch.prompts_per_step}: fewer than the {engines} rollout"
            " replicas; raise it, or rollout.tensor"
        )


def _lengths(config: Config) -> Iterator[str]:
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    wanted = longest * config.method.sequences_per_response
    if config.batch.tokens_per_microbatch < wanted:
        twice = ", and stand there twice (method.perception.masked = current)"
        yield (
            f"batch.tokens_per_microbatch = {config.batch.tokens_per_microbatch}: one sequence may"
            f" have rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens"
            f"{twice if wanted > longest else ''}; raise it to {wanted} or more"
        )
    yield from _growing_limit(config.rollout)


def _growing_limit(rollout: RolloutConfig) -> Iterator[str]:
    stages = rollout.response_stages
    if stages is None:
        return
    steps = [stage.from_step for stage in stages]
    limits = [stage.max_response_tokens for stage in stages]
    # A list that grows is what sorting makes of it once equal numbers are gone.
    grows = steps == sorted(set(steps)) and limits == sorted(set(limits))
    # Slices, since the list may be empty.
    if not grows or steps[:1] != [1] or limits[-1:] != [rollout.max_response_tokens]:
        shown = [stage.model_dump() for stage in stages]
        yield (
            f"rollout.response_stages = {shown}: let from_step begin at 1, both numbers grow, and"
            f" the last limit be rollout.max_response_tokens = {rollout.max_response_tokens}"
        )


def _method(config: Config) -> Iterator[str]:
    yield from reward_scheme_errors(
        config.method, config.reward.accuracy_weight, config.reward.format_weight
    )
    if config.rollout.quantization is not None:
        reason = (
            f"rollout.quantization = {config.rollout.quantization}: the engine's probabilities then"
            " differ from the trainer's;"
        )
        if config.method.mismatch.kind == "none" and not config.method.weighs_sampler:
            yield (
                f"{reason} set method.{config.method.correction[0]}=tis (truncated importance"
                " sampling) as rollout=vllm_fp8 does, icepop or sequence_mask"
            )
        if config.mismatch_limits.warn_above is None:
            yield f"{reason} set mismatch_limits.warn_above (0.1 in rollout=vllm_fp8)"
    parallel = config.parallel
    is_cut_alike = not parallel.sequence and parallel.pipeline == 1
    if config.method.sequences_per_response > 1 and parallel.context > 1 and not is_cut_alike:
        yield (
            f"parallel.context = {parallel.context}: with sequence parallelism or pipeline stages a"
            " token and its copy after the masked image may lie on different ranks; set"
            " parallel.context=1, or parallel.sequence=false parallel.pipeline=1, or"
            " method.perception.masked=old"
        )


def _precision(config: Config) -> Iterator[str]:
    precision = config.precision
    if precision.params == "bfloat16" and config.rollout.dtype == "float32":
        yield (
            "rollout.dtype = float32: the policy's weights are bfloat16 (precision.params); set"
            " rollout.dtype=bfloat16 or precision=fp32"
        )
    if precision.adam_moments != "float32" and not config.parallel.distributed_optimizer:
        yield (
            f"precision.adam_moments = {precision.adam_moments}: needs"
            " parallel.distributed_optimizer=true, or set it to float32"
        )
    if precision.fp8 is None:
        return
    if precision.params != "bfloat16":
        yield f"precision.params = {precision.params}: FP8 layers train bfloat16; set it to that"
    yield from _recipe(precision.fp8)
    if precision.fp8.param_gather:
        yield from _weights_in_fp8(config, precision.fp8)


def _recipe(fp8: Fp8Config) -> Iterator[str]:
    """Keys that only one recipe has, or has not."""
    delayed = fp8.recipe == "delayed"
    for key in ("amax_history_len", "amax_compute_algo"):
        value = getattr(fp8, key)
        if delayed and value is None:
            yield f"precision.fp8.{key} = None: recipe delayed needs it; see precision=fp8_delayed"
        elif not delayed and value is not None:
            yield f"precision.fp8.{key} = {value}: only recipe delayed has it; set it to null"
    for key in _LAYERS_IN_BF16:
        layers = getattr(fp8, key)
        if delayed and layers:
            yield (
                f"precision.fp8.{key} = {layers}: recipe delayed cannot leave out layers; set it to"
                " 0, or choose another recipe"
            )


def _weights_in_fp8(config: Config, fp8: Fp8Config) -> Iterator[str]:
    """Problems of settings that exclude weights kept in FP8."""
    key = "precision.fp8.param_gather = True"
    if not config.parallel.distributed_optimizer:
        yield f"{key}: needs parallel.distributed_optimizer=true, or set it to false"
    if fp8.recipe == "mxfp8":
        yield f"{key}: gathers of recipe mxfp8 share the gradient buffer; set it to false"
    kl = config.method.kl
    if any((kl.coef, kl.coef_positive, kl.coef_negative)):
        yield f"{key}: an exchange with the reference's weights would round; set it to false"


def _warn_of_unusual(config: Config) -> None:
    """Settings that a short trial of a long run may have on purpose, and that are else mistakes."""
    if config.trainer.num_steps is None:
        return  # of epochs: the prompts have not been read
    optim = config.optim
    steps = num_optimizer_steps(config)
    if optim.warmup_steps > steps:
        reached = optim.learning_rate * steps / optim.warmup_steps
        logger.warning(
            f"optim.warmup_steps = {optim.warmup_steps}: the run has {steps} optimizer steps, so"
            f" the learning rate ends at {reached:.3g} and never reaches optim.learning_rate ="
            f" {optim.learning_rate:g}; lower it, or raise trainer.num_steps"
        )


def _tools(config: Config) -> Iterator[str]:
    """Trackers and the push."""
    for name in config.logging.trackers:
        if find_spec(name) is None:
            yield f"logging.trackers: {name} is not installed; pip install {name}, or leave it out"
    if config.hub.push is not None and not config.checkpoint.export_at_end:
        yield (
            f"hub.push = {config.hub.push}: checkpoint.export_at_end=false leaves nothing to push;"
            " set it to true"
        )


def _length(config: Config) -> Iterator[str]:
    trainer = config.trainer
    given = f"trainer.num_steps = {trainer.num_steps}, trainer.num_epochs = {trainer.num_epochs}"
    if (trainer.num_steps is None) == (trainer.num_epochs is None):
        yield f"{given}: give exactly one of them, and set the other to null"
    if trainer.num_epochs is not None and config.data.train_weights is not None:
        yield (
            f"{given}: with data.train_weights sources are passed through at different speeds, so"
            " that an epoch has no end; give trainer.num_steps"
        )


def _training(config: Config) -> Iterator[str]:
    """Length, optimizer, memory, checks and checkpoints."""
    yield from _length(config)
    optim = config.optim
    if optim.min_learning_rate > optim.learning_rate:
        yield (
            f"optim.min_learning_rate = {optim.min_learning_rate}: is above optim.learning_rate ="
            f" {optim.learning_rate}, and the schedule would rise towards it; lower it"
        )
    yield from _tools(config)
    offload = config.memory.offload
    for key, names in (("memory.offload", offload), ("logging.trackers", config.logging.trackers)):
        if len(set(names)) < len(names):
            yield f"{key} = {list(names)}: names one twice; name each once"
    fp8 = config.precision.fp8
    if "weights" in offload and fp8 is not None and fp8.param_gather:
        yield (
            "memory.offload: weights that are kept in FP8 cannot be offloaded; leave weights out,"
            " or set precision.fp8.param_gather=false"
        )
    if config.rollout.pipeline > 1 and config.weight_sync.logprob_check_every > 0:
        yield (
            f"weight_sync.logprob_check_every = {config.weight_sync.logprob_check_every}: the check"
            " scores prompts, which vLLM does on the last stage alone; set it to 0 with"
            f" rollout.pipeline = {config.rollout.pipeline} (sampled tokens are compared with the"
            " policy at every step anyway)"
        )
    num_steps = config.trainer.num_steps
    if num_steps is not None and max(config.profile.steps, default=0) > num_steps:
        yield (
            f"profile.steps = {list(config.profile.steps)}: the run has {num_steps} steps"
            " (trainer.num_steps); name steps of it"
        )
    kept = config.checkpoint.keep_every_steps
    saved = config.checkpoint.every_steps
    if kept and (saved == 0 or kept % saved):
        yield (
            f"checkpoint.keep_every_steps = {kept}: checkpoints come every {saved} steps"
            " (checkpoint.every_steps; 0 = never); give a multiple of that"
        )
    evaluation = config.evaluation
    never = "there is no evaluation during training (evaluation.every_steps = 0); set it"
    if config.checkpoint.keep_best and not evaluation.every_steps:
        yield f"checkpoint.keep_best = True: {never}, or keep_best=false"
    if evaluation.stop_after is not None and not evaluation.every_steps:
        yield f"evaluation.stop_after = {evaluation.stop_after}: {never}, or stop_after=null"


def _paths(config: Config) -> Iterator[str]:
    yield from data_problems("data.train", config.data.train)
    names, weights = entries(config.data.train), config.data.train_weights
    if weights is not None and len(weights) != len(names):
        yield (
            f"data.train_weights = {list(weights)}: {len(weights)} weights for {len(names)} "
            "entries of data.train; give one weight for each entry, or null"
        )
    resume = config.resume.checkpoint
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        yield f"resume.checkpoint = {resume}: no such folder; give auto, never or a checkpoint"


def _model(config: Config, hf_config: dict[str, Any]) -> Iterator[str]:
    sizes = model_sizes(hf_config)
    yield from model_problems(sizes, config.parallel)
    fp8 = config.precision.fp8
    if fp8 is not None:
        # megatron's own limit, of uneven stages too.
        even_share = sizes.num_layers // config.parallel.pipeline
        for key in _LAYERS_IN_BF16:
            if getattr(fp8, key) > even_share:
                layers = getattr(fp8, key)
                yield f"precision.fp8.{key} = {layers}: a stage has {even_share} layers; lower it"
    if config.method.perception is not None and "vision_config" not in hf_config:
        yield (
            f"method.name = {config.method.name}: masks images, and the model of model.path ="
            f" {config.model.path} takes none; give one that does (Qwen-VL), or choose another"
            " method"
        )
    replay = config.rollout.router_replay
    if replay != "none" and not sizes.num_experts:
        yield (
            f"rollout.router_replay = {replay}: the model of model.path = {config.model.path} has"
            " no experts; set it to none"
        )
    top_k = config.rollout.top_k
    if sizes.vocab_size and top_k > sizes.vocab_size:
        yield f"rollout.top_k = {top_k}: the model has {sizes.vocab_size} tokens; set at most that"
    of_self = config.method.self_reward
    if of_self is not None and sizes.vocab_size and of_self.token_id >= sizes.vocab_size:
        yield (
            f"method.self_reward.token_id = {of_self.token_id}: the model has {sizes.vocab_size}"
            " tokens; choose one of them"
        )
