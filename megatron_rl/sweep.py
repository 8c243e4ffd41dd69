r"""Method ablations: every combination of comma-separated overrides, here or under Slurm.

    python -m megatron_rl.sweep --out runs/ablation --nproc 2 experiment=quickstart_cpu \
        model.path=TOY method=grpo,dapo,a_grae seed=1,2

Each is an ordinary run in a folder of its own below ``--out``, named after what differs:
``method-grpo_seed-1``. A sweep that is started again skips the runs that are finished and goes on
with the others (``resume=auto``). A run that fails does not stop the rest. At the end a table: one
row a combination, mean and spread over the seeds. Exit code 1 when a run failed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
import shlex
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from types import FrameType

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from megatron_rl.config.load import compose, validate
from megatron_rl.config.quoting import override
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError
from megatron_rl.plugins import load_plugins, loaded
from megatron_rl.reporting.metrics_file import read_metrics, series
from megatron_rl.reporting.report import table
from megatron_rl.trainer.start import finished_text

_SCORE = "eval/accuracy"
_MAX_NAME = 120  # characters of a folder's name; file systems allow 255 bytes
_STOP_S = 60  # how long a stopped run may take to end


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """The Cartesian product over Hydra's choice sweeps (``key=a,b``), in the order given.

    Other overrides are part of every combination.

    Example: ``["seed=1,2", "x=3"]`` gives ``[["seed=1", "x=3"], ["seed=2", "x=3"]]``.
    """
    choices = []
    for text in overrides:
        try:
            parsed = OverridesParser.create().parse_override(text)
        except HydraException:
            choices.append([text])  # the check of the whole combination says what is wrong with it
            continue
        if parsed.is_sweep_override():
            key = parsed.get_key_element()
            choices.append([f"{key}={value}" for value in parsed.sweep_string_iterator()])
        else:
            choices.append([text])
    return [list(combination) for combination in itertools.product(*choices)]


def varying(runs: Sequence[Sequence[str]]) -> list[int]:
    """The positions of the overrides that differ between the runs."""
    return [index for index, values in enumerate(zip(*runs)) if len(set(values)) > 1]


def run_names(runs: Sequence[Sequence[str]]) -> list[str]:
    """A folder name for each run, made of the overrides that differ.

    Characters that are special to a shell, Hydra or a file system are replaced; six characters of a
    digest then keep names apart.

    Example: the runs ``method=grpo seed=1`` and ``method=dapo seed=1`` are ``method-grpo`` and
    ``method-dapo``.

    Raises:
        ValueError: two runs are the same.
    """
    differing = varying(runs)
    names = [_run_name([run[index] for index in differing]) for run in runs]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"sweep: {repeated[0]} is listed twice; name each value once")
    return names


def _run_name(overrides: Sequence[str]) -> str:
    name = "_".join(map(_plain_name, overrides)) or "run"
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}-{_digest(name)}"


def _plain_name(text: str) -> str:
    """One override as a part of a folder's name."""
    special = re.compile("[^A-Za-z0-9._+-]+")
    key, _, value = text.partition("=")
    plain = special.sub("_", f"{key}-{special.sub('_', value).strip('_')}")
    return plain if plain == f"{key}-{value}" else f"{plain}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def check(
    runs: Sequence[Sequence[str]], folders: Sequence[Path], config_dir: Path | None = None
) -> list[Config]:
    """The configuration of every run.

    Args:
        config_dir: a second folder of groups, searched after ``conf/``.

    Raises:
        ConfigError: one does not compose or validate; lists all problems before any run starts.
    """
    problems = []
    configs = []
    for run, folder in zip(runs, folders, strict=True):
        try:
            values = compose("config", [*run, override("run_dir", str(folder))], config_dir)
            configs.append(validate(Config, values, folder.name))
        except ConfigError as error:
            problems += [f"{folder.name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), "the sweep")
    return configs


def is_finished(config: Config) -> bool:
    """Whether nothing is left to do in the folder of this run.

    False when in doubt: the run that is then started reports what is wrong.
    """
    try:
        return finished_text(config) is not None
    except ValueError:
        return False


def command(
    run: Sequence[str],
    folder: Path,
    nproc: int,
    sbatch: Sequence[str] | None,
    options: Sequence[str] = (),
) -> list[str]:
    """The command that starts one run: torchrun, or sbatch with the script of examples/slurm.

    Args:
        sbatch: options for Slurm; None: run here.
        options: options of ``megatron_rl.train``.

    Raises:
        ValueError: there is no batch script beside an installed package.
    """
    overrides = [*options, *run, override("run_dir", str(folder))]
    if sbatch is not None:
        script = Path(__file__).resolve().parents[1] / "examples" / "slurm" / "train.sbatch"
        if not script.is_file():
            raise ValueError(
                f"--sbatch: {script} does not exist; start the sweep from a copy of the repository"
            )
        return ["sbatch", *sbatch, str(script), "--nproc", str(nproc), *overrides]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc-per-node={nproc}", "-m", "megatron_rl.train", *overrides]


class Stopped(Exception):
    """A signal asks the sweep to end."""


def run_one(words: Sequence[str]) -> int:
    """Runs a command and returns its exit code.

    A signal to the sweep is passed on to the command, and its end is awaited. The command has a
    session of its own: a Ctrl-C of the terminal would reach torchrun twice, and its ranks never.

    Raises:
        ValueError: there is no such program.
        Stopped: SIGINT, SIGTERM or SIGHUP came.
    """

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, stop) for number in signals}
    try:
        process = subprocess.Popen(words, start_new_session=True)
        try:
            return process.wait()
        except Stopped:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    except FileNotFoundError:
        raise ValueError(f"{words[0]}: no such program on this machine") from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def summary(runs: Sequence[Sequence[str]], folders: Sequence[Path]) -> str:
    """A table with one row for each combination without its seed.

    It gives the number of runs with a score, and mean and population standard deviation of their
    last held-out accuracy.
    """
    scores: dict[str, list[float]] = defaultdict(list)
    differing = varying(runs)
    for run, folder in zip(runs, folders, strict=True):
        shown = [run[index] for index in differing if not run[index].startswith("seed=")]
        file = folder / "metrics.jsonl"
        values = series(read_metrics(file), _SCORE)[1] if file.is_file() else []
        scores[" ".join(shown) or run[0]] += values[-1:]
    rows = []
    for label, last in scores.items():
        spread = f"{fmean(last):.3f} +- {pstdev(last):.3f}" if last else "-"
        rows.append((label, str(len(last)), spread))
    return table([("combination", "runs", f"last {_SCORE}"), *rows])


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.sweep",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("overrides", nargs="+", metavar="key=value[,value...]")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--nproc", type=int, required=True, help="processes per run (per node under Slurm)"
    )
    parser.add_argument(
        "--sbatch",
        nargs="?",
        const="",
        help="submit each run to Slurm, with these options in one string",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands, ready for a shell, and exit"
    )
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE_OR_FILE",
        help="your own code, passed on to every run; see examples/plugins",
    )
    parser.add_argument(
        "-cd",
        "--config-dir",
        type=Path,
        metavar="DIR",
        help="a second folder of groups, passed on to every run",
    )
    return parser.parse_intermixed_args(argv)  # options may stand between overrides


def passed_on(options: argparse.Namespace) -> list[str]:
    """The options that every run gets."""
    words = [word for plugin in loaded() for word in ("--plugin", plugin)]
    if options.config_dir:
        words += ["--config-dir", str(options.config_dir.resolve())]
    return words


def start_all(
    folders: Sequence[Path], configs: Sequence[Config], commands: Sequence[list[str]]
) -> list[Path]:
    """Runs what is not finished, one after another; returns the folders of the runs that failed."""
    failed = []
    for folder, config, words in zip(folders, configs, commands, strict=True):
        if is_finished(config):
            print(f"--- {folder}: finished before", flush=True)
            continue
        print(f"--- {folder}", flush=True)
        code = run_one(words)
        if code:
            print(f"--- {folder}: failed with exit code {code}", file=sys.stderr, flush=True)
            failed.append(folder)
    return failed


def _check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for what no run of a sweep can do."""
    if options.nproc < 1:
        raise ValueError(
            f"--nproc {options.nproc}: give the number of processes of a run, 1 or more"
        )
    if any(re.match(r"[+~]*run_dir\b", text) for text in options.overrides):
        raise ValueError(
            "run_dir: each run of a sweep has a folder of its own below --out; leave it out"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code.

    0 when every run succeeded, 1 when one failed or the sweep is wrong, 130 when it was stopped.
    """
    options = arguments(argv)
    try:
        _check_options(options)
        load_plugins(options.plugin)
        runs = combinations(options.overrides)
        folders = [options.out / name for name in run_names(runs)]
        configs = check(runs, folders, options.config_dir)
        sbatch = None if options.sbatch is None else shlex.split(options.sbatch)
        pairs = zip(runs, folders, strict=True)
        words = passed_on(options)
        commands = [command(run, folder, options.nproc, sbatch, words) for run, folder in pairs]
        if options.dry_run:
            print("\n".join(map(shlex.join, commands)))
            return 0
        failed = start_all(folders, configs, commands)
        if sbatch is None:
            print(summary(runs, folders), flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(
            f"stopped by {stopped}; the same command goes on where runs are missing or unfinished",
            file=sys.stderr,
        )
        return 130
    if failed:
        print(
            f"error: {len(failed)} of {len(folders)} runs failed: {', '.join(map(str, failed))}",
            file=sys.stderr,
        )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
