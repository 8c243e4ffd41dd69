"""A conversation with a model that uses its tools: what ``megatron_rl.sample --chat`` does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_rl.data.prompts import text_prompts
from megatron_rl.data.tokenizer import load_tokenizer, text_of
from megatron_rl.evaluation.evaluation_source import Evaluation
from megatron_rl.evaluation.sample import NoReward, sampler_of
from megatron_rl.rollouts.environments.rendering import MessageRendering
from megatron_rl.rollouts.environments.turns import turns_of_run
from megatron_rl.rollouts.sampling import evaluation_sampling, stop_token_ids
from megatron_rl.runtime.launch import World
from megatron_rl.types import APPENDED, Completion


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
    if turns is not None and not turns.has_tools:
        raise ValueError(
            f"env.name = {config.env.name}: it speaks for the user; add env.name=single to talk to"
            " the model yourself"
        )
    rendering = MessageRendering(tokenizer, ("user",), config.model.path)
    sampler = sampler_of(sample, tokenizer, turns, NoReward(), world)
    plain = evaluation_sampling(config, stop_token_ids(tokenizer.eos_token_id))
    decode = text_of(tokenizer)
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
        (whole,) = world.from_main(lambda found=found: [one.completion for one in found or ()])
        if world.is_main:
            print("\n".join(said(whole, decode)), flush=True)
        tokens += whole.token_ids
        if tokens[-1] != rendering.end_token_id:
            tokens.append(rendering.end_token_id)


def said(whole: Completion, decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """A line, or several, for each turn of the model and for each answer to it."""
    begin = 0
    # Neighbours of one kind are joined: weights change within a turn, too.
    for is_appended, spans in itertools.groupby(whole.spans, lambda span: span.version == APPENDED):
        *_, last = spans
        text = decode(whole.token_ids[begin : last.end]).strip()
        yield f"  -> {text}" if is_appended else f"model: {text}"
        begin = last.end


def _line() -> str:
    try:
        return input("you: ").strip()
    except EOFError:
        return ""
