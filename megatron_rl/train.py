"""torchrun --nproc-per-node N -m megatron_rl.train experiment=NAME key=value ..."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron_rl.config.checks import check
from megatron_rl.config.load import compose, conf_dir, validate
from megatron_rl.config.schema import Config
from megatron_rl.plugins import load_plugins


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    groups = sorted(path.name for path in conf_dir().iterdir() if path.is_dir())
    options = "\n".join(f"  {group}: {', '.join(sorted(file.stem for file in (conf_dir() / group).glob('*.yaml')))}" for group in groups)
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.train",
        description="Reinforcement learning with verifiable rewards: Megatron-Core policy, vLLM rollouts.",
        epilog=f"Groups and their options (group=option):\n{options}\n\nAll keys with their values: --cfg job",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Hydra overrides, e.g. experiment=quickstart_cpu method=dapo seed=2"
    )
    parser.add_argument("--cfg", choices=["job"], help="print the composed configuration and leave")
    parser.add_argument("--config-dir", type=Path, help="a second folder of groups, searched after the package's own")
    plugin = "your own code, imported first; see examples/plugins"
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="MODULE_OR_FILE", help=plugin
    )
    return parser.parse_intermixed_args(argv)  # options may stand between overrides


def main(argv: Sequence[str] | None = None) -> None:
    """Ends the process: 0 when the run finished or was saved on request, 1 on any error."""
    options = arguments(argv)
    if options.cfg:
        try:
            load_plugins(options.plugin)
        except ValueError as error:
            sys.exit(f"error: {error}")
        print(yaml.safe_dump(compose("config", options.overrides, options.config_dir), sort_keys=False), end="")
        return
    from megatron_rl.runtime.launch import leave, report, set_up_messages, start  # torch only once there is something to run

    world = start()
    set_up_messages(world.rank)
    try:
        load_plugins(options.plugin)
        config = validate(Config, compose("config", options.overrides, options.config_dir), "the configuration")
        from megatron_rl.policy.machine import this_machine

        check(config, world.size, this_machine())
        from megatron_rl.trainer.build import build_trainer
        from megatron_rl.trainer.memory_plan import check_memory

        check_memory(config, world)
        build_trainer(config, world).run()
    except BaseException as error:  # noqa: BLE001 (reported, then the process ends with code 1)
        report(error, world.rank)
        leave(1)
    leave(0)


if __name__ == "__main__":
    sys.exit(main())
