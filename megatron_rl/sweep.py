"""Method ablations: every combination of comma-separated overrides, run here one after another or given to Slurm.

    python -m megatron_rl.sweep --out runs/ablation --nproc 2 experiment=quickstart_cpu model.path=M method=grpo,dapo,a_grae seed=1,2

Each run is an ordinary one in a folder of its own below ``--out``; a sweep that is started again goes on where runs are missing or
unfinished (``resume=auto``). At the end a table: one row a combination, mean and spread over the seeds.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

from hydra.core.override_parser.overrides_parser import OverridesParser

from megatron_rl.config.load import ConfigError, compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.evaluation.report import table
from megatron_rl.plugins import load_plugins, loaded
from megatron_rl.runtime.metrics_file import read_metrics, series

SCORE = "eval/accuracy"


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """The cartesian product over Hydra's choice sweeps (``key=a,b``), in the order given; other overrides stand in every one.

    Example: ``["seed=1,2", "x=3"]`` gives ``[["seed=1", "x=3"], ["seed=2", "x=3"]]``.
    """
    choices = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_sweep_override():
            choices.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([override.input_line or ""])
    return [list(combination) for combination in itertools.product(*choices)]


def run_names(runs: Sequence[Sequence[str]]) -> list[str]:
    """A folder name for each run: the overrides that differ between runs.

    Raises:
        ValueError: two runs are the same.
    """
    varying = [index for index, values in enumerate(zip(*runs)) if len(set(values)) > 1]
    names = [",".join(run[index].replace("/", "_") for index in varying) or "run" for run in runs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"sweep: the combination {twice} comes twice; name each value once")
    return names


def check(runs: Sequence[Sequence[str]], names: Sequence[str]) -> None:
    """Every combination must compose and validate before the first one starts."""
    problems = []
    for run, name in zip(runs, names, strict=True):
        try:
            validate(Config, compose("config", run), name)
        except ConfigError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems, "the sweep")


def command(
    run: Sequence[str],
    folder: Path,
    nproc: int,
    sbatch: Sequence[str] | None,
    plugins: Sequence[str] = (),
) -> list[str]:
    """How one run is started: torchrun here, or the batch script of examples/slurm with ``sbatch`` as options."""
    options = [word for plugin in plugins for word in ("--plugin", plugin)]
    overrides = [*options, *run, f"run_dir={folder}"]
    if sbatch is not None:
        script = Path(__file__).resolve().parents[1] / "examples" / "slurm" / "train.sbatch"
        return ["sbatch", *sbatch, str(script), "--nproc", str(nproc), *overrides]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "-m", "megatron_rl.train"]
    return [*launcher, *overrides]


def summary(out: Path, runs: Sequence[Sequence[str]], names: Sequence[str]) -> str:
    """One row a combination without its seed: number of finished seeds, last held-out accuracy as mean and population spread."""
    scores: dict[str, list[float]] = defaultdict(list)
    for run, name in zip(runs, names, strict=True):
        label = ",".join(part for part in name.split(",") if not part.startswith("seed=")) or run[0]
        file = out / name / "metrics.jsonl"
        values = series(read_metrics(file), SCORE)[1] if file.is_file() else []
        scores[label] += values[-1:]
    rows = [(label, str(len(found)), f"{fmean(found):.3f} +- {pstdev(found):.3f}" if found else "-") for label, found in scores.items()]
    return table([("combination", "runs", f"last {SCORE}"), *rows])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("overrides", nargs="+", metavar="key=value[,value...]")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--nproc", type=int, required=True, help="processes per run (per node under Slurm)")
    parser.add_argument("--sbatch", nargs="?", const="", help="submit each run to Slurm, with these options in one string")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and leave")
    plugin_text = "your own code, handed on to every run; see examples/plugins"
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="MODULE_OR_FILE", help=plugin_text
    )
    options = parser.parse_intermixed_args(argv)  # options may stand between overrides
    try:
        load_plugins(options.plugin)
        runs = combinations(options.overrides)
        names = run_names(runs)
        check(runs, names)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    sbatch = None if options.sbatch is None else options.sbatch.split()
    commands = [
        command(run, options.out / name, options.nproc, sbatch, loaded())
        for run, name in zip(runs, names, strict=True)
    ]
    if options.dry_run:
        print("\n".join(" ".join(words) for words in commands))
        return 0
    failed = []
    for name, words in zip(names, commands, strict=True):
        print(f"--- {name}", flush=True)
        if subprocess.run(words, check=False).returncode:
            failed.append(name)
    if sbatch is None:
        print(summary(options.out, runs, names))
    if failed:
        print(f"error: {len(failed)} of {len(names)} runs failed: {'; '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
