"""Answers of a model to some prompts, and conversations with it: what ``megatron_rl.sample``
shows."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.checkpoints import directory
from megatron_rl.config.load import change_values, compose, validate
from megatron_rl.config.rules.engine_checks import position_problems
from megatron_rl.config.schema import Config
from megatron_rl.data.multimodal.vision import VisionProcessor, vision_of
from megatron_rl.data.prompts import load_prompts, text_prompts
from megatron_rl.data.tokenizer import load_tokenizer, text_of
from megatron_rl.engine.requests import multimodal_config
from megatron_rl.evaluation.evaluation import build_engine, load_weights
from megatron_rl.evaluation.evaluation_source import Evaluation, Weights, step_of
from megatron_rl.protocols import Reward
from megatron_rl.rewards.build import build_reward
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.environments.rendering import MessageRendering
from megatron_rl.rollouts.environments.turns import Turns, turns_of_run
from megatron_rl.rollouts.rows.experience import Groups, Passage, Response
from megatron_rl.rollouts.sampling import evaluation_sampling, stop_token_ids
from megatron_rl.run.hub import local_folder
from megatron_rl.run.start import CHECKPOINTS, engine_of_machine, is_run, read_config, values_of_run
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.types import Prompt, Score

_INDENT = " " * 11
_NO_PROMPTS = ("reasoning_gym:none",)  # data.eval of a model without a run; nothing is read


class NoReward:
    """The reward of prompts without an expected answer: always 0."""

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        return [Score(0.0, False) for _ in prompts]


def find_sample(path: Path, overrides: Sequence[str], world_size: int) -> Evaluation:
    """The weights and the settings that belong to ``path``: a HF directory, the name of one on the
    hub, a run or a checkpoint.

    Of a run its newest whole checkpoint, else its export. The engine spans all processes.

    Raises:
        ValueError: ``path`` is none of them, or the overrides do not fit the settings.
    """
    path = Path(local_folder(str(path)))
    if not path.is_dir():
        raise ValueError(
            f"{path}: no such folder; give a HF directory, the folder of a run, or a checkpoint"
        )
    run = next(filter(is_run, (path, path.parent, path.parent.parent)), None)
    found = path
    if run == path:
        found = directory.newest_valid(path / CHECKPOINTS) or path / "export"
    weights = Weights(step_of(found), found)
    if not weights.is_checkpoint and not (found / "config.json").is_file():
        raise ValueError(
            f"{path}: neither a checkpoint nor a HF directory (config.json and safetensors) is"
            " there; give one of them, or the folder of a run that has saved one"
        )
    if weights.is_checkpoint and run is None:
        raise ValueError(
            f"{path}: a checkpoint outside of its run's folder, so its model is not known; write a"
            " HF directory by tools/convert_checkpoint.py to-hf CHECKPOINT HF_DIRECTORY --config"
            " MODEL"
        )
    if weights.is_checkpoint:
        directory.check_whole(found)
    values = _values_of_model(path) if run is None else values_of_run(run)
    if not weights.is_checkpoint:
        values["model"]["path"] = str(found)
    change_values(values, overrides)
    evaluation = values["evaluation"]
    evaluation["pass_at"] = []
    given = any(text.startswith("evaluation.temperature=") for text in overrides)
    # Several greedy answers would be one answer several times.
    if evaluation["responses_per_prompt"] > 1 and evaluation["temperature"] == 0 and not given:
        evaluation["temperature"] = values["rollout"]["temperature"]
    values["rollout"]["tensor"] = world_size
    validate(Config, values, "the settings of the sample")
    return Evaluation(values, (weights,), path)


def _values_of_model(path: Path) -> dict[str, Any]:
    """The defaults, on the engine of this machine, within the positions that the model has."""
    chosen = [f"data.{name}={_NO_PROMPTS[0]}" for name in ("train", "eval")]
    chosen += [f"rollout={engine_of_machine()}", f"model.path='{path}'"]
    values = compose("config", chosen)
    limit = read_config(path).get("max_position_embeddings")
    rollout = values["rollout"]
    longest = rollout["max_prompt_tokens"] + rollout["max_response_tokens"]
    if isinstance(limit, int) and limit < longest:
        rollout["max_prompt_tokens"] = limit // 2
        rollout["max_response_tokens"] = limit - limit // 2
    return values


def answers(sample: Evaluation, texts: Sequence[str], world: World) -> str:
    """Collective. The text that shows every prompt with its answers.

    Args:
        sample: what ``find_sample`` found.
        texts: the prompts; none: the held-out prompts of the run, which are scored by its reward.

    Raises:
        ValueError: nothing to ask, or something wrong with the prompts or the model.
    """
    config = sample.config
    tokenizer = load_tokenizer(Path(config.model.path))
    turns = turns_of_run(config, tokenizer)
    vision = vision_of(config.model.path, config.data)
    prompts = _prompts(config, texts, tokenizer, vision)
    reward = NoReward() if texts else build_reward(config.reward, lambda prompt: prompt.text)
    vision_config = multimodal_config(prompts, vision)
    sampler = sampler_of(sample, tokenizer, turns, reward, world, vision_config)
    sampling = evaluation_sampling(config, stop_token_ids(tokenizer.eos_token_id))
    responses = sampler.run(prompts, sampling, "sample")
    everything = sampler.shown(responses, range(len(responses)))
    if everything is None:
        return ""
    return shown(responses.by_group(everything), scored=not texts)


def sampler_of(
    sample: Evaluation,
    tokenizer: PreTrainedTokenizerBase,
    turns: Turns | None,
    reward: Reward,
    world: World,
    vision_config: Any = None,
) -> LaunchSampler:
    """Collective. The engine with its weights; ``vision_config``: see ``multimodal_config``."""
    config = sample.config
    (weights,) = sample.weights
    display = Display(shown=world.is_main)
    for problem in position_problems(config.rollout, read_config(Path(config.model.path))):
        raise ValueError(problem)
    engine = build_engine(config, weights, vision_config, world, display)
    load_weights(config, weights, engine, world, display)
    return LaunchSampler(engine, reward, text_of(tokenizer), world, display, turns)


def _prompts(
    config: Config,
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionProcessor | None,
) -> list[Prompt]:
    limit = config.rollout.max_prompt_tokens
    if texts:
        return text_prompts(texts, config.data, tokenizer, limit)
    if config.data.eval == _NO_PROMPTS:
        raise ValueError(
            f"{config.model.path}: a model has no prompts of its own; give some with --prompt TEXT"
        )
    prompts = load_prompts(config.data.eval, config.data, tokenizer, limit, vision)
    return prompts[: config.evaluation.num_prompts]


def shown(groups: Groups, *, scored: bool) -> str:
    """Prompts, answers and verdicts as text; the last line is the accuracy where there is one."""
    lines: list[str] = []
    for number, group in enumerate(groups, start=1):
        prompt = group[0].prompt
        lines += [f"[{number}/{len(groups)}] {prompt.uid}", _labeled("prompt", prompt.text)]
        for response in group:
            for passage in response.passages:
                lines.append(_labeled("answer" if passage.is_sampled else "appended", passage.text))
            lines.append(_labeled("", _verdict(response, scored=scored)))
        if scored:
            lines.append(_labeled("expected", prompt.answer))
        lines.append("")
    if scored:
        scores = [response.score for group in groups for response in group]
        correct = [score.correct for score in scores if score.problem is None]
        unjudged = len(scores) - len(correct)
        rest = f"; {unjudged} more have no verdict" if unjudged else ""
        lines.append(f"{sum(correct)} of {len(correct)} answers are correct{rest}")
    return "\n".join(lines)


def _verdict(response: Response, *, scored: bool) -> str:
    num_tokens = response.completion.num_sampled
    end = ", cut at the limit" if response.completion.truncated else ""
    words = f"({num_tokens} tokens{end})"
    if not scored:
        return words
    if response.score.problem is not None:
        return f"{words} no verdict: {response.score.problem}"
    judged = "correct" if response.score.correct else "wrong"
    return f"{words} {judged}, reward {response.score.reward:g}"


def _labeled(label: str, text: str) -> str:
    """``label`` in a column of its own; further lines of the text below its first."""
    lines = text.strip("\n").split("\n")
    head = f"{label + ':' if label else '':<{len(_INDENT)}}"
    return "\n".join([head + lines[0], *[_INDENT + line for line in lines[1:]]])


def chat(sample: Evaluation, world: World) -> None:
    """Collective. A line of the standard input is a message; an empty one, or none, ends it.

    As in training nothing is encoded again: a message is appended to the tokens so far.

    Raises:
        ValueError: the environment of the run speaks for the user, the chat template cannot
            continue a conversation, or it is longer than ``rollout.max_prompt_tokens``.
    """
    config = sample.config
    tokenizer = load_tokenizer(Path(config.model.path))
    turns = turns_of_run(config, tokenizer)
    if turns is not None and (config.env.agent is not None or not turns.has_tools):
        raise ValueError(
            f"env.name = {config.env.name}: it speaks for the user; add env.name=single to talk to"
            " the model yourself"
        )
    rendering = MessageRendering(tokenizer, ("user",), config.model.path)
    sampler = sampler_of(sample, tokenizer, turns, NoReward(), world)
    plain = evaluation_sampling(config, stop_token_ids(tokenizer.eos_token_id))
    limit = config.rollout.max_prompt_tokens
    tokens: list[int] = []
    for number in itertools.count():
        line = world.from_main(_line)
        if not line:
            return
        (prompt,) = text_prompts([line], config.data, tokenizer, limit)
        more = rendering.tokens([{"role": "user", "content": line}])
        tokens = [*tokens, *more] if tokens else list(prompt.token_ids)
        if len(tokens) > limit:
            raise ValueError(
                f"the conversation has {len(tokens)} tokens, rollout.max_prompt_tokens = {limit};"
                f" add rollout.max_prompt_tokens={2 * limit}"
            )
        asked = replace(prompt, uid=f"chat:{number}", token_ids=tuple(tokens))
        responses = sampler.run([asked], replace(plain, num_responses=1, seed=number), "chat")
        found = sampler.shown(responses, [0])
        (whole,) = world.from_main(lambda found=found: list(found or ()))
        if world.is_main:
            print("\n".join(map(said, whole.passages)), flush=True)
        tokens += whole.completion.token_ids
        if tokens[-1] != rendering.end_token_id:
            tokens.append(rendering.end_token_id)


def said(passage: Passage) -> str:
    """A line, or several, for a turn of the model or for the answer to it."""
    return f"{'model:' if passage.is_sampled else '  ->'} {passage.text.strip()}"


def _line() -> str:
    try:
        return input("you: ").strip()
    except EOFError:
        return ""
