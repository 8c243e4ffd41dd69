"""Checks of what an engine needs that answers prompts, with or without a policy beside it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.data_names import data_problems
from megatron_rl.config.model_config import model_sizes, read_model_config
from megatron_rl.config.rules.cache import cache_problems
from megatron_rl.config.rules.hardware import Machine, engine_problems
from megatron_rl.config.rules.layout_rules import rollout_problems
from megatron_rl.config.schema import Config, EvaluationConfig, RolloutConfig
from megatron_rl.errors import ConfigError


def check_evaluation(
    config: Config,
    world_size: int,
    machine: Machine,
    architectures: Collection[str] | None = None,
) -> None:
    """``check`` for an engine that answers held-out prompts, without a policy.

    Raises:
        ConfigError: all problems at once, one line each: key, value, remedy.
    """
    problems = [
        *replica_problems(config, world_size),
        *evaluation_problems(config.evaluation),
        *stall_problems(config),
        *model_folder_problems(config),
        *data_problems("data.eval", config.data.eval),
        *seed_problems(config, world_size),
    ]
    sizes = None
    try:
        hf_config = read_hf_config(config.model.path, architectures)
    except ValueError as error:
        hf_config = None
        problems.append(str(error))
    if hf_config is not None:
        sizes = model_sizes(hf_config)
        on_cpu = machine.compute_capability is None
        problems += engine_layout_problems(config, hf_config)
        problems += cache_problems(config, hf_config, on_cpu=on_cpu)
    problems += engine_problems(config.rollout, machine, sizes)
    if problems:
        raise ConfigError(problems, "the configuration")


def read_hf_config(
    path: str, architectures: Collection[str] | None = None
) -> dict[str, Any] | None:
    """``config.json`` of a HF directory, None where there is none. Raises ValueError as
    ``read_model_config`` does."""
    file = Path(path) / "config.json"
    return read_model_config(file, architectures) if file.is_file() else None


def replica_problems(config: Config, world_size: int) -> Iterator[str]:
    """The processes do not divide into replicas of the engine."""
    rollout = config.rollout
    if world_size % rollout.ranks:
        key = f"rollout.tensor = {rollout.tensor}"
        if rollout.pipeline > 1:
            key = f"rollout.tensor * rollout.pipeline = {rollout.ranks}"
        yield (
            f"{key}: does not divide the {world_size} processes; choose a divisor of {world_size}"
        )


def evaluation_problems(evaluation: EvaluationConfig) -> Iterator[str]:
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


def stall_problems(config: Config) -> Iterator[str]:
    """A reward function works without a sign of life for as long as it may."""
    limit = config.trainer.stall_limit_s
    if limit <= config.reward.function_timeout_s:
        yield (
            f"trainer.stall_limit_s = {limit:g}: not above reward.function_timeout_s ="
            f" {config.reward.function_timeout_s:g}, so a slow reward function would end the run;"
            " raise it"
        )


def seed_problems(config: Config, world_size: int) -> Iterator[str]:
    """Replica r of the engine is seeded with ``seed + r``, in 32 bits."""
    replicas = max(1, world_size // config.rollout.ranks)
    # The last one has seed + replicas - 1, and the largest number of 32 bits is 2**32 - 1.
    if config.seed + replicas > 2**32:
        yield (
            f"seed = {config.seed}: {replicas} engines take this and the next {replicas - 1}; give"
            f" at most {2**32 - replicas}"
        )


def model_folder_problems(config: Config) -> Iterator[str]:
    """``model.path`` is no model."""
    model = Path(config.model.path)
    if not model.is_dir():
        yield (
            f"model.path = {model}: no such folder; give a HF directory (config.json, safetensors,"
            " tokenizer)"
        )
    elif not (model / "config.json").is_file():
        yield f"model.path = {model}: no config.json in it; give a HF directory"


def engine_layout_problems(config: Config, hf_config: dict[str, Any]) -> Iterator[str]:
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
