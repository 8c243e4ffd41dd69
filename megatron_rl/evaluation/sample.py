"""Answers of a model to some prompts, as text: what ``megatron_rl.sample`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.checkpoints import directory
from megatron_rl.checkpoints.to_hf import checkpoint_to_hf
from megatron_rl.config.load import change_value, compose, validate
from megatron_rl.config.rules.engine_checks import position_problems
from megatron_rl.config.schema import Config
from megatron_rl.data.multimodal.vision import VisionProcessor, vision_of
from megatron_rl.data.prompts import load_prompts, text_prompts
from megatron_rl.data.tokenizer import load_tokenizer, text_of
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.engine.requests import multimodal_config
from megatron_rl.rewards.build import build_reward
from megatron_rl.rollouts.experience import Groups, Response
from megatron_rl.rollouts.rollouts import (
    Sampler,
    evaluation_sampling,
    stop_token_ids,
)
from megatron_rl.rollouts.step_end import grouped
from megatron_rl.run.saved_settings import (
    engine_of_machine,
    is_run,
    read_config,
    values_of_run,
)
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.types import Prompt, Sampling, Score

INDENT = " " * 11


@dataclass(frozen=True)
class Source:
    """What is sampled from. ``weights``: a HF directory or, with ``is_checkpoint``, a checkpoint of
    a run. ``of_run``: its settings (prompts, template, reward) are those of a run."""

    weights: Path
    is_checkpoint: bool
    config: Config
    of_run: bool


@dataclass(frozen=True)
class Question:
    """What is asked. ``texts`` empty: the first ``num_prompts`` held-out prompts of the run. None:
    as the run's evaluation does."""

    texts: tuple[str, ...]
    num_prompts: int
    num_responses: int
    temperature: float | None
    max_tokens: int | None


class NoReward:
    """For prompts without an expected answer."""

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        return [Score(0.0, False) for _ in prompts]


def find_source(path: Path, overrides: Sequence[str], world_size: int) -> Source:
    """The weights and the settings that belong to ``path``: a HF directory, a run or a checkpoint.

    The engine spans all ``world_size`` processes.

    Raises:
        ValueError: ``path`` is none of them, or the overrides do not fit the settings.
    """
    if not path.is_dir():
        raise ValueError(
            f"{path}: no such folder; give a HF directory, the folder of a run, or a checkpoint"
        )
    run = next(
        (folder for folder in (path, path.parent, path.parent.parent) if is_run(folder)), None
    )
    values = _values_of_model(path) if run is None else values_of_run(run)
    for text in overrides:
        change_value(values, text)
    values["rollout"]["tensor"] = world_size
    config = validate(Config, values, "the settings of the sample")
    if run == path:
        newest = directory.newest_valid(path / "checkpoints")
        weights = newest or path / "export"
    else:
        weights = path
    is_checkpoint = (weights / directory.MANIFEST).is_file()
    if not is_checkpoint and not (weights / "config.json").is_file():
        raise ValueError(
            f"{path}: neither a checkpoint nor a HF directory (config.json and safetensors) is"
            " there; give one of them, or the folder of a run that has saved one"
        )
    if is_checkpoint and run is None:
        raise ValueError(
            f"{path}: a checkpoint outside of its run's folder, so its model is not known; write a"
            " HF directory by tools/convert_checkpoint.py to-hf CHECKPOINT HF_DIRECTORY --config"
            " MODEL"
        )
    return Source(weights, is_checkpoint, config, run is not None)


def _values_of_model(path: Path) -> dict[str, Any]:
    """The defaults, on the engine of this machine, within the positions that the model has."""
    nothing = "reasoning_gym:none"  # no prompts are read
    values = compose(
        "config",
        [
            f"rollout={engine_of_machine()}",
            f"model.path='{path}'",
            f"data.train={nothing}",
            f"data.eval={nothing}",
        ],
    )
    limit = read_config(path).get("max_position_embeddings")
    rollout = values["rollout"]
    if (
        isinstance(limit, int)
        and limit < rollout["max_prompt_tokens"] + rollout["max_response_tokens"]
    ):
        rollout["max_prompt_tokens"] = limit // 2
        rollout["max_response_tokens"] = limit - limit // 2
    return values


def answers(source: Source, question: Question, world: World, scratch: Path) -> str:
    """Collective. The text that shows every prompt with its answers.

    ``scratch``: an empty folder of this process, where a checkpoint is converted for the engine.

    Raises:
        ValueError: nothing to ask, or something wrong with the prompts or the model.
    """
    config = source.config
    model = _model_directory(source, world, scratch)
    tokenizer = load_tokenizer(model)
    vision = vision_of(str(model), config.data)
    prompts = _prompts(source, question, tokenizer, vision)
    display = Display(shown=world.is_main)
    sampling = _sampling(config, question, tokenizer)
    rollout = config.rollout
    if sampling.max_response_tokens > rollout.max_response_tokens:
        rollout = rollout.model_copy(update={"max_response_tokens": sampling.max_response_tokens})
    for problem in position_problems(rollout, read_config(model)):
        raise ValueError(problem)
    with display.phase("building the engine"):
        engine = VllmEngine(
            str(model),
            rollout,
            seed=config.seed,
            launch_id=world.launch_id,
            multimodal=multimodal_config(prompts, vision),
        )
    scored = not question.texts
    sampler = Sampler(
        engine,
        build_reward(config.reward) if scored else NoReward(),
        text_of(tokenizer),
        world,
        display,
    )
    responses = sampler.run(prompts, sampling, "sample")
    everything = sampler.shown(responses, range(len(responses)))
    if everything is None:
        return ""
    return shown(grouped(everything, responses), scored=scored)


def _model_directory(source: Source, world: World, scratch: Path) -> Path:
    """Collective. A HF directory of the weights; that of rank 0 where one has to be written."""
    if not source.is_checkpoint:
        return source.weights
    target = scratch / "model"

    def write() -> Path:
        checkpoint_to_hf(source.weights, target, Path(source.config.model.path))
        return target

    return world.from_main(write)


def _prompts(
    source: Source,
    question: Question,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionProcessor | None,
) -> list[Prompt]:
    config = source.config
    limit = config.rollout.max_prompt_tokens
    if question.texts:
        return text_prompts(question.texts, config.data, tokenizer, limit)
    if not source.of_run:
        raise ValueError(
            f"{source.weights}: a model has no prompts of its own; give some with --prompt TEXT"
        )
    prompts = load_prompts(config.data.eval, config.data, tokenizer, limit, vision)
    return prompts[: question.num_prompts]


def _sampling(config: Config, question: Question, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    sampling = evaluation_sampling(config, stop_token_ids(tokenizer.eos_token_id))
    temperature = question.temperature
    if temperature is None:
        # Several greedy answers would be one answer several times.
        several = question.num_responses > 1 and sampling.temperature == 0
        temperature = config.rollout.temperature if several else sampling.temperature
    return Sampling(
        num_responses=question.num_responses,
        max_response_tokens=question.max_tokens or sampling.max_response_tokens,
        temperature=temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        stop=sampling.stop,
    )


def shown(groups: Groups, *, scored: bool) -> str:
    """Prompts, answers and verdicts as text; the last line is the accuracy where there is one."""
    lines: list[str] = []
    for number, group in enumerate(groups, start=1):
        prompt = group[0].prompt
        lines.append(f"[{number}/{len(groups)}] {prompt.uid}")
        lines.append(_labeled("prompt", prompt.text))
        for response in group:
            lines.append(_labeled("answer", response.text))
            lines.append(_labeled("", _verdict(response, scored=scored)))
        if scored:
            lines.append(_labeled("expected", prompt.answer))
        lines.append("")
    if scored:
        correct = [response.score.correct for group in groups for response in group]
        lines.append(f"{sum(correct)} of {len(correct)} answers are correct")
    return "\n".join(lines)


def _verdict(response: Response, *, scored: bool) -> str:
    num_tokens = len(response.completion.token_ids)
    end = ", cut at the limit" if response.completion.truncated else ""
    words = f"({num_tokens} tokens{end})"
    if not scored:
        return words
    judged = "correct" if response.score.correct else "wrong"
    return f"{words} {judged}, reward {response.score.reward:g}"


def _labeled(label: str, text: str) -> str:
    """``label`` in a column of its own; further lines of the text below its first."""
    lines = text.strip("\n").split("\n")
    head = f"{label + ':' if label else '':<{len(INDENT)}}"
    return "\n".join([head + lines[0], *[INDENT + line for line in lines[1:]]])
