"""A conversation with a model that uses its tools: what ``megatron_rl.sample --chat`` does."""

import itertools
from dataclasses import replace
from pathlib import Path

from megatron_rl.data.prompts import text_prompts
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.evaluation.evaluation_source import Evaluation
from megatron_rl.evaluation.sample import NoReward, sampler_of
from megatron_rl.rollouts.environments.rendering import MessageRendering
from megatron_rl.rollouts.environments.turns import turns_of_run
from megatron_rl.rollouts.rows.experience import Passage
from megatron_rl.rollouts.sampling import evaluation_sampling, stop_token_ids
from megatron_rl.runtime.launch import World


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
