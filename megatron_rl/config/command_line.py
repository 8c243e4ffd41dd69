"""The command line of ``megatron_rl.train``: Hydra overrides and a few options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import yaml

from megatron_rl.config.load import check_given, compose, conf_dir
from megatron_rl.config.schema import Config
from megatron_rl.plugins import load_plugins


class Parser(argparse.ArgumentParser):
    """One that leaves its errors to be said once, by the first rank."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help shows what there is")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    groups = sorted(path.name for path in conf_dir().iterdir() if path.is_dir())
    options = "\n".join(f"  {group}: {', '.join(sorted(file.stem for file in (conf_dir() / group).glob('*.yaml')))}" for group in groups)
    parser = Parser(
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
    parser.add_argument("--plugin", action="append", default=[], metavar="MODULE_OR_FILE", help=plugin)
    return parser.parse_intermixed_args(argv)  # options may stand between overrides


def show(options: argparse.Namespace) -> int:
    """Prints the composed configuration; 1 and what is wrong with it on stderr where a key or a value cannot be."""
    try:
        load_plugins(options.plugin)
        composed = compose("config", options.overrides, options.config_dir)
        print(yaml.safe_dump(composed, sort_keys=False), end="", flush=True)
        check_given(Config, composed, "the configuration")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
