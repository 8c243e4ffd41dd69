r"""Prints a model's answers, without training.

    python -m megatron_rl.sample runs/quickstart_cpu
    python -m megatron_rl.sample MODEL \
        --prompt "Spell this word backward (example: sun -> nus): milk"
    python -m megatron_rl.sample runs/mine/checkpoints/step_000100 --num-prompts 8 --responses 2
    python -m megatron_rl.sample runs/tools_cpu --chat

SOURCE is a HF directory, the folder of a run (its newest checkpoint, else its export) or one
checkpoint of a run. Without --prompt a run's held-out prompts are asked, and the answers are scored
by the run's reward. Under ``torchrun --nproc-per-node N`` the N processes form one engine.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.plugins import add_plugin_option, load_plugins
from megatron_rl.runtime.guard.failure import exit_process
from megatron_rl.runtime.process import reported


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, "python -m megatron_rl.sample")
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE")
    add("overrides", nargs="*", metavar="key=value", help="settings, e.g. rollout.dtype=float32")
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    add("--chat", action="store_true", help="talk to it, a line a message; it uses its tools")
    add("--num-prompts", type=int, default=4, help="of data.eval (default 4)")
    add("--responses", type=int, default=1, help="per prompt (default 1)")
    add("--temperature", type=float, help="default: that of the evaluation")
    add("--max-tokens", type=int, help="default: rollout.max_response_tokens")
    add_plugin_option(parser)
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Ends the process: 0 when the answers were printed, 1 on any error."""
    with reported():
        run(arguments(argv))
    exit_process(0)


def run(options: argparse.Namespace) -> None:
    """Collective: builds the engine, generates answers, prints them."""
    # Deferred: importing torch takes seconds, which --help does not need.
    from megatron_rl.runtime.launch import start

    world = start()
    load_plugins(options.plugin)
    from megatron_rl.evaluation.sample import answers, chat, find_sample

    overrides = [*options.overrides, *_settings(options)]
    # On one rank: a model id of the hub is downloaded.
    sample = world.from_main(lambda: find_sample(options.source, overrides, world.size))
    if options.chat:
        chat(sample, world)
        return
    text = answers(sample, options.prompt, world)
    if world.is_main:
        print(text, flush=True)


def _settings(options: argparse.Namespace) -> list[str]:
    """The options that are short for a setting, as overrides."""
    values = {
        "evaluation.num_prompts": options.num_prompts,
        "evaluation.responses_per_prompt": options.responses,
        "evaluation.temperature": options.temperature,
        "rollout.max_response_tokens": options.max_tokens,
    }
    return [f"{key}={value}" for key, value in values.items() if value is not None]


if __name__ == "__main__":
    sys.exit(main())
