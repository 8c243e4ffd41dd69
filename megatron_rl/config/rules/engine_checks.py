"""Checks of what an engine needs that answers prompts, with or without a policy next to it."""

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.data_names import data_problems
from megatron_rl.config.model_config import ITEM_BYTES, ModelSizes, model_sizes, read_model_config
from megatron_rl.config.rules.hardware import Machine, engine_problems
from megatron_rl.config.rules.layout_rules import longest_engine_stage, rollout_problems, undivided
from megatron_rl.config.schema import Config, EvaluationConfig, RolloutConfig
from megatron_rl.errors import ConfigError

GIB = 2**30
_BLOCK_TOKENS = {"cpu": 128, "gpu": 16}  # tokens of one block of the cache, as vLLM cuts it


def check_evaluation(
    config: Config, world_size: int, machine: Machine, architectures: Collection[str] | None = None
) -> None:
    """``check`` for an engine that answers held-out prompts, without a policy.

    Raises:
        ConfigError: all problems at once, one line each: key, value, remedy.
    """
    engine, hf_config = engine_side(config, world_size, machine, architectures)
    sizes = model_sizes(hf_config) if hf_config is not None else None
    machines = engine_problems(config.rollout, machine, sizes)
    if problems := [*replica_problems(config, world_size), *engine, *machines]:
        raise ConfigError(problems, "the configuration")


def engine_side(
    config: Config, world_size: int, machine: Machine | None, architectures: Collection[str] | None
) -> tuple[list[str], dict[str, Any] | None]:
    """Problems of a program that asks a model, with or without training, and the model's
    ``config.json``; None where it cannot be read."""
    problems = [*_evaluation(config.evaluation), *_without_the_model(config, world_size)]
    file = Path(config.model.path) / "config.json"
    try:
        hf_config = read_model_config(file, architectures) if file.is_file() else None
    except ValueError as error:
        return [*problems, str(error)], None
    if hf_config is not None:
        on_cpu = machine is not None and machine.compute_capability is None
        problems += _with_the_model(config, hf_config)
        problems += _cache(config, hf_config, on_cpu=on_cpu)
    return problems, hf_config


def replica_problems(config: Config, world_size: int) -> Iterator[str]:
    """The processes do not divide into replicas of the engine."""
    key = "rollout.tensor" + " * rollout.pipeline" * (config.rollout.pipeline > 1)
    yield from undivided(key, config.rollout.ranks, world_size, "processes", "the")


def _evaluation(evaluation: EvaluationConfig) -> Iterator[str]:
    """The responses to a held-out prompt are too few, or all the same."""
    for k in evaluation.pass_at:
        if k > evaluation.responses_per_prompt:
            yield (
                f"evaluation.pass_at = {k}: needs evaluation.responses_per_prompt >= {k}, which is"
                f" {evaluation.responses_per_prompt}"
            )
    if evaluation.temperature == 0 and evaluation.responses_per_prompt > 1:
        yield (
            "evaluation.responses_per_prompt > 1 with evaluation.temperature = 0: all responses"
            " would be the same; raise the temperature"
        )


def _without_the_model(config: Config, world_size: int) -> Iterator[str]:
    """Time limits, the folder of the model, held-out data and seeds of the engines."""
    limit = config.trainer.stall_limit_s
    # A reward function works without a sign of life for as long as it may.
    if limit <= config.reward.function_timeout_s:
        yield (
            f"trainer.stall_limit_s = {limit:g}: not above reward.function_timeout_s ="
            f" {config.reward.function_timeout_s:g}, so a slow reward function would end the run;"
            " raise it"
        )
    model = Path(config.model.path)
    if not model.is_dir():
        what = "not a folder" if model.exists() else "no such folder"
        yield f"model.path = {model}: {what}; give a HF directory, or OWNER/NAME of the hub"
    elif not (model / "config.json").is_file():
        yield f"model.path = {model}: no config.json in it; give a HF directory"
    yield from data_problems("data.eval", config.data.eval)
    # Replica r is seeded with seed + r: the last one with seed + replicas - 1, and the largest
    # number of 32 bits is 2**32 - 1.
    replicas = max(1, world_size // config.rollout.ranks)
    if config.seed + replicas > 2**32:
        yield (
            f"seed = {config.seed}: {replicas} engines take this and the next {replicas - 1}; give"
            f" at most {2**32 - replicas}"
        )


def _with_the_model(config: Config, hf_config: dict[str, Any]) -> Iterator[str]:
    """The model does not suit the layout or the lengths of the engine."""
    yield from rollout_problems(model_sizes(hf_config), config.rollout)
    if config.rollout.pipeline > 1 and "vision_config" in hf_config:
        yield (
            f"rollout.pipeline = {config.rollout.pipeline}: the engine cuts models of text alone"
            " into stages; set it to 1 for a vision-language model"
        )
    yield from position_problems(config.rollout, hf_config)


def position_problems(rollout: RolloutConfig, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """A prompt and its response together are longer than the model can see."""
    limit = hf_config.get("max_position_embeddings")
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if limit is not None and longest > limit:
        yield (
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}: the model has"
            f" {limit} positions; lower one of them"
        )


def _cache(config: Config, hf_config: Mapping[str, Any], *, on_cpu: bool) -> Iterator[str]:
    """One message when ``rollout.kv_cache_gib`` cannot hold one sequence of the longest kind."""
    rollout = config.rollout
    if rollout.kv_cache_gib is None:
        return
    least = least_cache_bytes(rollout, hf_config, _BLOCK_TOKENS["cpu" if on_cpu else "gpu"])
    if least is None or rollout.kv_cache_gib * GIB >= least:
        return
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    # Rounded up, so that the number that is named is enough.
    enough = math.ceil(least / GIB * 1e6) / 1e6
    yield (
        f"rollout.kv_cache_gib = {rollout.kv_cache_gib:g}: one sequence of"
        f" rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens takes"
        f" {least / 2**20:.3g} MiB; set at least {enough:g}, or several times that so that"
        " sequences run together"
    )


def least_cache_bytes(
    rollout: RolloutConfig, hf_config: Mapping[str, Any], block_tokens: int
) -> int | None:
    """Bytes that the longest sequence takes on one rank, in whole blocks; None where ``hf_config``
    lacks a size. vLLM keeps one block more, which is always empty.

    Formula: (ceil(tokens / block) + 1) * block * 2 * layers * kv_heads * head_dim * bytes, with the
    layers of the longest stage, the heads of one rank and the bytes of a number; with latent
    attention its dimension, on every rank, in place of 2 * kv_heads * head_dim.
    Layers with linear attention have a state in place of that, which is added once, in float32.
    Example: 1024 tokens, 28 layers, 4 heads of 128 on two ranks, bfloat16, blocks of 16:
    65 * 16 * 2 * 28 * 2 * 128 * 2 bytes = 28.4 MiB.
    """
    sizes = model_sizes(hf_config)
    if 0 in (sizes.num_layers, sizes.num_heads, sizes.head_dim):
        return None
    tokens = rollout.max_prompt_tokens + rollout.max_response_tokens
    num_blocks = math.ceil(tokens / block_tokens) + 1
    return num_blocks * block_tokens * token_bytes(rollout, sizes) + state_bytes(rollout, sizes)


def token_bytes(rollout: RolloutConfig, sizes: ModelSizes) -> int:
    """Bytes of the keys and values of one token, on one rank of the longest stage."""
    # Where ranks outnumber the key-value heads, several hold the same head.
    heads_of_rank = max(1, sizes.num_kv_heads // rollout.tensor)
    layers = longest_engine_stage(sizes.num_layers, rollout.pipeline)
    layers -= layers * sizes.linear_layers // max(sizes.num_layers, 1)
    numbers = sizes.latent_dim or 2 * heads_of_rank * sizes.head_dim
    return layers * numbers * ITEM_BYTES[rollout.dtype]


def state_bytes(rollout: RolloutConfig, sizes: ModelSizes) -> int:
    """Bytes that layers with linear attention keep of one sequence, however long it is, on one rank
    of the longest stage."""
    layers = longest_engine_stage(sizes.linear_layers, rollout.pipeline)
    return layers * sizes.state_numbers * ITEM_BYTES["float32"] // rollout.tensor
