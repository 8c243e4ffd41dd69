"""The command line of ``megatron_rl.train``: Hydra's overrides, and the options one expects of it.

Composition is Hydra's, starting runs is not: see ``conf/README.md``.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from megatron_rl.config.cli.overrides import SWEEP, options_of
from megatron_rl.config.load import check_given, compose, conf_dir, known_keys
from megatron_rl.config.schema import Config
from megatron_rl.plugins import add_plugin_option, load_plugins

_DESCRIPTION = (
    "Reinforcement learning with verifiable rewards: Megatron-Core policy, vLLM rollouts."
)
GROUPS = "groups"  # the value of --info for all of them
# bash breaks words at "=": only what follows it is replaced. A line that does not name
# megatron_rl keeps bash's own completion, since python and torchrun run other programs too.
_COMPLETION = """\
_megatron_rl_words='WORDS'
_megatron_rl() {
    local line=${COMP_LINE:0:COMP_POINT}
    local word=${line##*[[:space:]]}
    COMPREPLY=()
    [[ $line == *megatron_rl* || $line == *quickstart_cpu/run.sh* ]] || return 0
    COMPREPLY=($(compgen -W "$_megatron_rl_words" -- "$word"))
    if [[ $word == *=* ]]; then COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}"); fi
    if [[ ${COMPREPLY[0]} == *= ]]; then compopt -o nospace; fi
}
complete -o bashdefault -o default -F _megatron_rl python python3 torchrun bash
"""
ROOT = "config"
TRAIN = "python -m megatron_rl.train"
_MULTIRUNS = "runs/multirun"


@dataclass(frozen=True)
class Root:
    """The origin of a configuration: a file next to config.yaml, and a second folder of
    groups, searched after the package's own."""

    config_name: str = ROOT
    config_dir: Path | None = None


def add_root(parser: argparse.ArgumentParser, more: str = "") -> None:
    """The options for a ``Root``; ``more`` is added to what they say of themselves."""
    more = f"; {more}" if more else ""
    name = f"the root of the configuration, a file next to config.yaml or in --config-dir{more}"
    parser.add_argument("-cn", "--config-name", default=ROOT, metavar="NAME", help=name)
    folder = f"a second folder of groups, searched after the package's own{more}"
    parser.add_argument("-cd", "--config-dir", type=Path, metavar="DIR", help=folder)


def root_of(options: argparse.Namespace) -> Root:
    """Raises ValueError where the name is that of a group's file."""
    name = options.config_name.removesuffix(".yaml")
    if "/" in name:
        raise ValueError(
            f"--config-name {name}: name a file next to config.yaml; what a group "
            "holds is chosen by GROUP=OPTION, e.g. experiment=quickstart_cpu"
        )
    return Root(name, options.config_dir)


def handed_on(plugins: Sequence[str], root: Root) -> list[str]:
    """The options with which another start of the program composes the same."""
    words = [word for plugin in plugins for word in ("--plugin", plugin)]
    if root.config_name != ROOT:
        words += ["--config-name", root.config_name]
    if root.config_dir:
        words += ["--config-dir", str(root.config_dir.resolve())]
    return words


class Parser(argparse.ArgumentParser):
    """One that leaves its errors to be said once, by the first rank."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help shows what there is")


def arguments(argv: Sequence[str] | None, local_size: int | None = None) -> argparse.Namespace:
    """The options and overrides of one start.

    ``local_size``: processes that torchrun has started on this machine; None without torchrun.

    Raises:
        ValueError: an option that there is not, or one that means something else here.
    """
    options = _parser().parse_intermixed_args(argv)  # options may stand between overrides
    # ``--info method=dapo`` is the option without a value, and an override after it.
    if options.info is not None and "=" in options.info:
        options.overrides.insert(0, options.info)
        options.info = GROUPS
    if options.multirun:
        _check_multirun(options, local_size)
    elif options.out or options.nproc:
        raise ValueError("--out and --nproc belong to --multirun; a run has run_dir=DIR")
    options.config_name = root_of(options).config_name
    return options


def _parser() -> Parser:
    groups = "\n".join(f"  {group}: {', '.join(names)}" for group, names in _all_groups().items())
    parser = Parser(
        prog="python -m megatron_rl.train",
        description=_DESCRIPTION,
        epilog=f"Groups and their options (group=option):\n{groups}\n\n"
        "All keys with their values: --cfg job",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    example = "Hydra overrides, e.g. experiment=quickstart_cpu method=dapo seed=2"
    add("overrides", nargs="*", metavar="key=value", help=example)
    add("-c", "--cfg", choices=["job"], help="print the composed configuration and leave")
    add("--resolve", action="store_true", help="with --cfg: ${name} by its value, as always here")
    info = "print the groups and their options, or one group with a line on each option, and leave"
    add("-i", "--info", nargs="?", const=GROUPS, metavar="GROUP", help=info)
    add_root(parser)
    add_plugin_option(parser)
    shell = 'print a script that completes overrides: eval "$(... --completion bash)"'
    add("-sc", "--completion", "--shell-completion", choices=["bash"], help=shell)
    many = f"every combination of key=a,b as a run of --nproc processes: starts {SWEEP}"
    add("-m", "--multirun", action="store_true", help=many)
    add("--nproc", type=int, metavar="N", help="of --multirun: processes of one run")
    folder = f"of --multirun: folder of the runs; default {_MULTIRUNS}/DATE_TIME"
    add("--out", type=Path, metavar="DIR", help=folder)
    return parser


def _all_groups() -> dict[str, list[str]]:
    """The options of every group of the package, by name."""
    folders = [folder for folder in sorted(conf_dir().iterdir()) if folder.is_dir()]
    return {each.name: options_of(each.name, [conf_dir()]) for each in folders}


def _check_multirun(options: argparse.Namespace, local_size: int | None) -> None:
    """Raises ValueError where no sweep can be started: every rank of a torchrun would start one."""
    if local_size is not None:
        why = "a sweep starts one torchrun for each run, so it is started without"
    elif options.nproc is None:
        why = "say by --nproc how many processes one run has"
    else:
        return
    words = ["--multirun", *handed_on(options.plugin, root_of(options)), *options.overrides]
    command = f"{TRAIN} --nproc {local_size or 'N'} {shlex.join(words)}"
    raise ValueError(f"--multirun: {why}; type {command}")


def words_of_sweep(options: argparse.Namespace) -> list[str]:
    """The command line of megatron_rl.sweep that is meant by --multirun."""
    out = options.out or Path(_MULTIRUNS, time.strftime("%Y-%m-%d_%H-%M-%S"))
    own = ["--out", str(out), "--nproc", str(options.nproc)]
    return [*own, *handed_on(options.plugin, root_of(options)), *options.overrides]


def answer(options: argparse.Namespace, rank: int = 0) -> int | None:
    """Prints what was asked for and gives the exit code; None where a run is to be started.

    Under torchrun the first rank answers for all.
    """
    if not (options.completion or options.info or options.cfg):
        return None
    if rank > 0:
        return 0
    if options.cfg:
        return show(options)
    print(_completion() if options.completion else _info(options.info), end="", flush=True)
    return 0


def _completion() -> str:
    """A script for ``eval``: group=option, key= and the options of the command line."""
    choices = [f"{group}={name}" for group, names in _all_groups().items() for name in names]
    # A key may come several times, from each section that a union allows.
    keys = [f"{key}=" for key in dict.fromkeys(known_keys(Config))]
    # argparse names its options nowhere in public.
    flags = [flag for flag in _parser()._option_string_actions if flag.startswith("--")]
    return _COMPLETION.replace("WORDS", " ".join([*choices, *keys, *flags]))


def _info(wanted: str) -> str:
    """All groups; of one group a line for each option, with the first comment of its file."""
    groups = _all_groups()
    if wanted == GROUPS:
        return "".join(f"{group}={' | '.join(names)}\n" for group, names in groups.items())
    if wanted not in groups:
        raise ValueError(
            f"--info {wanted}: no such group; there are {', '.join(groups)}, or give --info alone"
            " for all of them"
        )
    lines = []
    for name in groups[wanted]:
        text = (conf_dir() / wanted / f"{name}.yaml").read_text(encoding="utf-8")
        # A line that speaks to Hydra comes before the comment.
        first, _, _ = text.removeprefix("# @package _global_\n").partition("\n")
        comment = first.removeprefix("# ") if first.startswith("#") else ""
        lines.append(f"{wanted}={name:24} {comment}".rstrip() + "\n")
    return "".join(lines)


def show(options: argparse.Namespace) -> int:
    """Prints the composed configuration; gives 1, with the reason on stderr, where it is wrong."""
    try:
        load_plugins(options.plugin)
        composed = compose(options.config_name, options.overrides, options.config_dir)
        print(yaml.safe_dump(composed, sort_keys=False), end="", flush=True)
        check_given(Config, composed, "the configuration")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
