"""torchrun --nproc-per-node N -m megatron_rl.train experiment=NAME key=value ..."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.cli.command_line import answer, arguments, words_of_sweep
from megatron_rl.config.cli.overrides import SWEEP
from megatron_rl.config.load import compose, validate
from megatron_rl.config.rules.checks import check
from megatron_rl.config.schema import Config
from megatron_rl.plugins import load_plugins
from megatron_rl.runtime.guard.failure import exit_process
from megatron_rl.runtime.process import launched, reported


def main(argv: Sequence[str] | None = None) -> None:
    """Ends the process: 0 when the run finished or was saved on request, 1 on any error."""
    with reported():
        rank, local_size = launched()
        options = arguments(argv, local_size)
        if options.multirun:
            sys.exit(run_sweep(options))
        answered = answer(options, rank)
        if answered is not None:
            sys.exit(answered)
        run(options)
    exit_process(0)


def run_sweep(options: argparse.Namespace) -> int:
    """Prints the command of the sweep that is meant, for the next start, and starts it."""
    from megatron_rl import sweep

    words = words_of_sweep(options)
    print(f"{SWEEP} {shlex.join(words)}", flush=True)
    return sweep.main(words)


def run(options: argparse.Namespace) -> None:
    """Collective: reads and checks what the user gave, builds the parts, trains."""
    # Deferred: importing torch takes seconds, which --info and --completion do not need.
    from megatron_rl.runtime.launch import start

    world = start()
    load_plugins(options.plugin)
    values = compose(options.config_name, options.overrides, options.config_dir)
    config = validate(Config, values, "the configuration")
    # Deferred until the configuration is valid: the policy's libraries take seconds more.
    from megatron_rl.models import FAMILIES
    from megatron_rl.policy.hardware import this_machine
    from megatron_rl.run.hub import fetch_weights, with_model

    given = config.model.path
    config = with_model(config, world)
    check(config, world.size, this_machine(), FAMILIES)
    from megatron_rl.planning.at_start import check_memory
    from megatron_rl.run.push import push_export
    from megatron_rl.run.start import STACKS, finished_already, with_date

    check_memory(config, world)  # before gigabytes are downloaded for a model that does not fit
    if config.model.path != given:  # of the hub; a folder that was given is taken as it is
        fetch_weights(config, world)
    config = with_date(config, world)
    world.watch(config.trainer.stall_limit_s, Path(config.run_dir) / STACKS)
    if not finished_already(config, world):
        from megatron_rl.runtime.display import Display
        from megatron_rl.trainer.build import build_trainer

        build_trainer(config, world, Display(shown=world.is_main)).run()
    push_export(config, world)


if __name__ == "__main__":
    sys.exit(main())
