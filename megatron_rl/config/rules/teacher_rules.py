"""The teachers of ``model.teacher``, and which go with a model and a method."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.model_config import model_sizes, read_model_config
from megatron_rl.config.rules.layout_rules import model_problems
from megatron_rl.config.schema import Config, ModelConfig
from megatron_rl.loss.method import Method


def teachers(model: ModelConfig) -> tuple[str, ...]:
    """The folders of the teachers, each once."""
    if isinstance(model.teacher, dict):
        return tuple(dict.fromkeys(model.teacher.values()))
    return () if model.teacher is None else (model.teacher,)


def teacher_of(model: ModelConfig, source: str) -> str | None:
    """The folder of the teacher that is asked about prompts of this ``data_source``."""
    return model.teacher.get(source) if isinstance(model.teacher, dict) else model.teacher


def teacher_problems(config: Config, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for everything that does not fit: key, value, remedy. ``hf_config``: of the
    policy."""
    method = config.method
    reads = any(column.startswith("teacher_") for column in Method(method).reads)
    if reads and not teachers(config.model):
        yield (
            f"model.teacher = null: method {method.name} learns from one; give the folder of a"
            " model with the same vocabulary"
        )
    for folder in teachers(config.model):
        key = f"model.teacher = {folder}"
        if not reads:
            yield (
                f"{key}: method {method.name} learns from none; choose method=opd, add"
                " method.token_shaping.teacher.coef=1, or set it to null"
            )
        file = Path(folder) / "config.json"
        if not file.is_file():
            yield f"{key}: no config.json in it; give a local Hugging Face folder"
            continue
        try:
            found = read_model_config(file)
        except ValueError as error:
            yield f"{key}: {str(error).removeprefix('model.path: ')}"
            continue
        yield from _sizes(key, found, hf_config, config)


def _sizes(
    key: str, found: Mapping[str, Any], hf_config: Mapping[str, Any], config: Config
) -> Iterator[str]:
    if "vision_config" in found or "vision_config" in hf_config:
        yield f"{key}: teachers are of models without images; set it to null"
    sizes = model_sizes(found)
    rows = model_sizes(hf_config).vocab_size
    if sizes.vocab_size < rows:
        yield (
            f"{key}: its vocab_size is {sizes.vocab_size}, that of model.path {rows}; give one of"
            " the same vocabulary"
        )
    for problem in model_problems(sizes, config.parallel):
        yield f"{key}: {problem}"
