"""torchrun --nproc-per-node N -m megatron_rl.train experiment=NAME key=value ..."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_rl.config.checks import check
from megatron_rl.config.command_line import arguments, show
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.plugins import load_plugins
from megatron_rl.runtime.failure import leave
from megatron_rl.runtime.process import reported


def main(argv: Sequence[str] | None = None) -> None:
    """Ends the process: 0 when the run finished or was saved on request, 1 on any error."""
    with reported():
        options = arguments(argv)
        if options.cfg:
            sys.exit(show(options))
        run(options)
    leave(0)


def run(options: argparse.Namespace) -> None:
    """Collective: reads and checks what the user gave, builds the parts, trains."""
    from megatron_rl.runtime.launch import order_device_work, set_up_messages, start  # torch only once there is something to run

    load_plugins(options.plugin)
    config = validate(Config, compose("config", options.overrides, options.config_dir), "the configuration")
    order_device_work(config.parallel.tensor)
    world = start()
    set_up_messages(world.rank)
    from megatron_rl.policy.families import FAMILIES
    from megatron_rl.policy.machine import this_machine

    check(config, world.size, this_machine(), FAMILIES)
    from megatron_rl.trainer.start import finished_already

    if finished_already(config, world):
        return
    from megatron_rl.runtime.display import Display
    from megatron_rl.trainer.build import build_trainer
    from megatron_rl.trainer.memory_plan import check_memory

    check_memory(config, world)
    build_trainer(config, world, Display(shown=world.is_main)).run()


if __name__ == "__main__":
    sys.exit(main())
