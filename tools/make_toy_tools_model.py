"""Make a small Qwen3-shaped model that knows how to call a calculator and seldom does, for runs on
a CPU. Nothing is downloaded.

    python tools/make_toy_tools_model.py --out DIR
    torchrun --standalone --nproc-per-node 2 tools/make_toy_tools_model.py --out DIR

As tools/make_toy_model.py, with products of two numbers. A share of the demonstrations
(``--right``) calls the calculator and repeats its result in a second turn; the others guess a
number of the right size. Each turn is a demonstration of its own, so nothing is learned of a tool's
results but to repeat them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.data.prompts import load_prompts, without_overlap
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.passes import LocalBatch, LossOutput, TokenView
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.rollouts.environments.rendering import MessageRendering
from megatron_rl.rollouts.environments.turns import turns_of_run
from megatron_rl.runtime.launch import start
from megatron_rl.types import Prompt
from tools.make_toy_model import (
    MAX_PROMPT_TOKENS,
    build_policy,
    run,
    task_wordings,
    write_untrained,
)

TASKS = "reasoning_gym:products?min_terms=2&max_terms=2&min_digits=2&max_digits=2&size=8000&seed=3"
BEFORE = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
BEHIND = '"}}</tool_call>'
# Tools are shown by their names: a whole schema would be most of so short a prompt.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool['function']['name'] }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Demonstration = tuple[Sequence[int], Sequence[int]]  # what is read, what is written


def parser_of_turns(
    description: str | None, *, steps: int, batch: int, right: float
) -> argparse.ArgumentParser:
    """The options of a model that is shown conversations, with their defaults."""
    parser = parser_of(description)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory to write; must not exist")
    add("--layers", type=int, default=2)
    add("--hidden", type=int, default=128)
    add("--steps", type=int, default=steps, help="supervised steps")
    add("--batch", type=int, default=batch, help="prompts a step")
    add("--right", type=float, default=right, help="share of turns shown as they should be")
    add("--learning-rate", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    return parser


def arguments() -> argparse.Namespace:
    parser = parser_of_turns(__doc__, steps=800, batch=48, right=0.2)
    parser.add_argument("--experiment", default="tools_cpu", help="whose data settings count")
    return parser.parse_args()


def expression(prompt: Prompt) -> str:
    """Example: ``57 * 87``."""
    return prompt.text.partition(": ")[2].partition(".")[0]


def turns(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    rendering: MessageRendering,
    rng: random.Random,
    right: float,
) -> list[Demonstration]:
    """The demonstrations of one prompt: a call or a guess, and the answer behind a call."""

    def written(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, rendering.end_token_id]

    call = written(BEFORE + expression(prompt) + BEHIND)
    result = rendering.tokens([{"role": "tool", "content": prompt.answer}])
    answer = written(prompt.answer)
    # Behind a blank: else no first digit would be as likely as a call, and the likeliest answer
    # would be one from the start.
    guess = written(f" {rng.randrange(1000, 9000)}")
    first = call if rng.random() < right else guess
    return [(prompt.token_ids, first), ((*prompt.token_ids, *call, *result), answer)]


def warm_up(
    policy: MegatronPolicy,
    prompts: Sequence[Prompt],
    demonstrations: Callable[[Prompt, random.Random], list[Demonstration]],
    options: argparse.Namespace,
) -> float:
    """Supervised steps; returns the mean loss of the last ten in nats a token."""
    rng = random.Random(options.seed)
    recent: list[float] = []
    for _ in range(options.steps):
        pairs = [
            pair
            for prompt in rng.choices(prompts, k=options.batch)
            for pair in demonstrations(prompt, rng)
        ]
        num_tokens = sum(len(response) for _, response in pairs)

        def loss(view: TokenView, num_tokens: int = num_tokens) -> LossOutput:
            return LossOutput(loss=-view.logprobs.sum() / num_tokens, metrics={})

        batch = sequence_batch(pairs)
        plan = policy.batching.plan(batch, range(len(pairs)))
        share = LocalBatch(batch, plan[policy.ranks.data_rank])
        recent = [*recent[-9:], policy.update(share, loss).loss]
    return sum(recent) / len(recent)


def taught(
    options: argparse.Namespace,
    settings: dict[str, Any],
    prompts: Sequence[Prompt],
    demonstrations: Callable[[Prompt, random.Random], list[Demonstration]],
) -> str:
    """Collective: supervised steps and the export, in place of all that was there. Returns what to
    print of them."""
    policy = build_policy(options.out, settings, options)
    loss = warm_up(policy, prompts, demonstrations, options)
    policy.export(options.out)
    return f"{options.steps} supervised steps, loss {loss:.3f}"


def make(options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    world = start()
    path = options.out
    chosen = [f"experiment={options.experiment}", "parallel=single", f"model.path={path}"]
    settings = compose("config", chosen)
    settings["data"]["train"] = TASKS
    config = validate(Config, settings, "the configuration")

    def untrained() -> None:
        wordings = [*task_wordings(TASKS), "calculator", "tools", "tool", BEFORE, BEHIND]
        wordings.append(". Give only the result as your final answer.")
        write_untrained(options, wordings, CHAT_TEMPLATE)

    world.from_main(untrained)
    tokenizer = load_tokenizer(path)
    turns_of_run(config, tokenizer)  # prompts show the tools from here on
    rendering = MessageRendering(tokenizer, ("tool",), str(path))
    held_out = load_prompts(config.data.eval, config.data, tokenizer, MAX_PROMPT_TOKENS)
    every = load_prompts(config.data.train, config.data, tokenizer, MAX_PROMPT_TOKENS)
    prompts = without_overlap(every, held_out)
    steps = taught(
        options,
        settings,
        prompts,
        lambda prompt, rng: turns(prompt, tokenizer, rendering, rng, options.right),
    )
    if world.is_main:
        shown = json.dumps(prompts[0].text)
        print(f"{path}: {len(tokenizer)} tokens; a prompt has {len(prompts[0].token_ids)}: {shown}")
        seconds = time.perf_counter() - begin
        print(f"{steps}; {seconds:.0f} s", flush=True)
    world.barrier()


if __name__ == "__main__":
    run(make, arguments())
