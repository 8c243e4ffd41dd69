"""Evaluates a model, or checkpoints of a run, on held-out prompts, without training.

    torchrun --nproc-per-node N -m megatron_rl.evaluate model.path=DIR data.eval=FILE key=value
    torchrun --nproc-per-node N -m megatron_rl.evaluate RUN --steps all key=value

Of a RUN (its run_dir) the settings are those it had: prompts, template, reward, engine; key=value
changes them. Without one they are composed as those of a training. evaluation.responses_per_prompt,
evaluation.temperature and evaluation.pass_at=[1,8,64] set what is sampled; rollout.tensor processes
form one engine, and engines share the prompts. The engine has the device alone:
rollout.gpu_memory_utilization=0.9. A restarted command samples only what is missing.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.cli.command_line import add_root, root_of
from megatron_rl.config.cli.parser import parser_of
from megatron_rl.plugins import add_plugin_option, load_plugins
from megatron_rl.runtime.guard.failure import exit_process
from megatron_rl.runtime.process import reported


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, "python -m megatron_rl.evaluate")
    # No option may begin as one of torchrun's does (--run): its parser reads all words.
    add = parser.add_argument
    words = "at most one run_dir of a training, and settings"
    add("words", nargs="*", metavar="RUN | key=value", help=words)
    steps = "of RUN: last (default), all (with step 0, its model) or numbers, 0,20,40"
    add("--steps", metavar="STEPS", help=steps)
    add("--out", type=Path, metavar="DIR", help="default RUN/evaluation or runs/evaluation")
    portion = "whose responses go to the disk together; default: what fills the engines 8 times"
    add("--prompts-at-a-time", type=_positive, metavar="N", help=portion)
    add_root(parser, "of a model alone: a RUN has its own settings")
    add_plugin_option(parser)
    return parser.parse_intermixed_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: give at least 1")
    return number


def main(argv: Sequence[str] | None = None) -> None:
    """Ends the process: 0 when the results are written, 1 on any error."""
    with reported():
        run(arguments(argv))
    exit_process(0)


def run(options: argparse.Namespace) -> None:
    """Collective: reads and checks what the user gave, builds the engine, samples and reports."""
    # Deferred: importing torch takes seconds, which --help does not need.
    from megatron_rl.runtime.launch import start

    world = start()
    load_plugins(options.plugin)
    from megatron_rl.config.rules.engine_checks import check_evaluation
    from megatron_rl.evaluation.evaluation_source import find_evaluation
    from megatron_rl.models import FAMILIES
    from megatron_rl.policy.hardware import this_machine

    evaluation = world.from_main(
        lambda: find_evaluation(options.words, options.steps, options.out, root_of(options))
    )
    config = evaluation.config
    check_evaluation(config, world.size, this_machine(), FAMILIES)
    from megatron_rl.evaluation.evaluation import evaluate

    text = evaluate(config, evaluation, options.prompts_at_a_time, world)
    if world.is_main:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
