r"""Method ablations: every combination of comma-separated overrides, here or under Slurm.

    python -m megatron_rl.sweep --out runs/ablation --nproc 2 experiment=quickstart_cpu \
        model.path=TOY method=grpo,dapo,a_grae seed=1,2

Each is an ordinary run in a folder of its own below ``--out``, named after what differs:
``method-grpo_seed-1``. A sweep that is started again skips the runs that are finished and continues
with the others (``resume=auto``); one that is alive elsewhere is left to that. A run that fails
does not stop the rest. Combinations with equal configurations are run once. ``--parallel 2`` runs
two at a time, each with its output in ``console.log`` of its folder. At the end the table of a
report: one row a combination, mean and range over the seeds, and the difference to the first row at
equal seed with 95 % intervals. Exit code 1 when a run failed.
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from megatron_rl.config.cli.command_line import Root, add_root, handed_on, root_of
from megatron_rl.config.rules.layout_rules import world_problems
from megatron_rl.errors import ConfigError, close_names, did_you_mean
from megatron_rl.plugins import add_plugin_option, load_plugins, loaded
from megatron_rl.reporting.metrics import TABLE, metric
from megatron_rl.runtime.guard import lock
from megatron_rl.sweeping import commands
from megatron_rl.sweeping.running import Runner, Stopped, SweepOutcome, shares
from megatron_rl.sweeping.summary import summary
from megatron_rl.sweeping.trials import Trial, is_finished, make_trials, tracked

_SCORE = "eval/accuracy"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.sweep",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("overrides", nargs="+", metavar="key=value[,value...]")
    add("--out", type=Path, required=True, help="folder of the runs")
    add("--nproc", type=int, required=True, help="processes per run (per node under Slurm)")
    parallel = (
        "runs at a time: here 1 unless given, with several each gets its share of the GPUs;\n"
        "of a Slurm array as many as fit unless given"
    )
    add("--parallel", type=int, metavar="N", help=parallel)
    metric = f"metric of the table at the end, may be repeated (default {_SCORE})"
    add("--metric", action="append", default=[], metavar="KEY", help=metric)
    sbatch = "submit the runs to Slurm as one array of jobs, with these options in one string"
    add("--sbatch", nargs="?", const="", help=sbatch)
    add("--dry-run", action="store_true", help="print the commands, ready for a shell, and exit")
    add_plugin_option(parser, "passed on to every run")
    add_root(parser, "passed on to every run")
    return parser.parse_intermixed_args(argv)  # options may stand between overrides


def _check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for what no run of a sweep can do."""
    if options.nproc < 1:
        raise ValueError(
            f"--nproc {options.nproc}: give the number of processes of a run, 1 or more"
        )
    if options.parallel is not None and options.parallel < 1:
        raise ValueError(f"--parallel {options.parallel}: give a number of runs, 1 or more")
    if any(re.match(r"[+~]*run_dir\b", text) for text in options.overrides):
        raise ValueError(
            "run_dir: each run of a sweep has a folder of its own below --out; leave it out"
        )
    for key in options.metric:
        if metric(key) is None:
            hint = did_you_mean(close_names(key, TABLE, count=2))
            raise ValueError(f"--metric {key}: no such metric; {hint or 'see examples/metrics.md'}")


def _dry_run(options: argparse.Namespace, trials: Sequence[Trial], words: Sequence[str]) -> None:
    """Prints what would be started, whether it is finished or not."""
    own = [trial for trial in trials if not trial.same_as]
    if options.sbatch is None:
        for trial in own:
            print(shlex.join(commands.local(trial, options.nproc, words)))
    else:
        slurm = _slurm(options, words)
        file = slurm.new_file()
        print(shlex.join(slurm.command(own, file)))
        if len(own) > 1:
            print(f"# {file}:")
            for number, trial in enumerate(own):
                print(f"# {number}: {shlex.join(trial.overrides)}")
    for trial in trials:
        if trial.same_as:
            print(f"# {trial.name}: the same run as {trial.same_as}")


def _slurm(options: argparse.Namespace, words: Sequence[str]) -> commands.Slurm:
    sbatch = shlex.split(options.sbatch)
    own = [word for word in sbatch if re.match(r"--(comment|array)\b|-a", word)]
    if own:
        raise ValueError(f"--sbatch: {own[0]} is set by the sweep itself; leave it out")
    return commands.Slurm(options.out, options.nproc, sbatch, options.parallel, words)


def _submit(options: argparse.Namespace, trials: Sequence[Trial], words: Sequence[str]) -> int:
    """Gives what is neither finished nor alive to Slurm; returns the exit code."""
    slurm = _slurm(options, words)
    if jobs := slurm.queued():
        raise ValueError(
            f"--sbatch: jobs of this sweep are in the queue ({', '.join(jobs)}); they continue by "
            "themselves: wait until they have ended, or scancel them"
        )
    left = []
    for trial in trials:
        if trial.same_as:
            print(f"--- {trial.name}: the same run as {trial.same_as}", flush=True)
        elif is_finished(trial.config):
            print(f"--- {trial.folder}: finished before", flush=True)
        elif holder := lock.holder(trial.folder):
            print(f"--- {trial.folder}: is running elsewhere ({holder})", flush=True)
        else:
            left.append(trial)
    if not left:
        return 0
    file = slurm.new_file()
    command = slurm.command(left, file)
    if len(left) > 1:
        commands.write_trials(file, left)
    commands.run(command)
    return 0


def _run_here(options: argparse.Namespace, trials: Sequence[Trial], words: Sequence[str]) -> int:
    """Runs what is not finished and prints the table; returns the exit code."""
    own = [trial for trial in trials if not trial.same_as]
    layouts = [trial.config.parallel for trial in own]
    problems = [each for layout in layouts for each in world_problems(layout, options.nproc)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), f"the sweep with --nproc {options.nproc}")
    parallel = min(options.parallel or 1, len(own))
    command = partial(commands.local, nproc=options.nproc, options=words)
    cores = len(os.sched_getaffinity(0))
    machine = shares(parallel, options.nproc, os.environ, torch.cuda.device_count(), cores)
    outcome = Runner(command, machine).run(own)
    print(summary(trials, outcome.done, options.metric or [_SCORE]), flush=True)
    _say_what_is_left(own, outcome)
    return int(bool(outcome.failed))


def _say_what_is_left(trials: Sequence[Trial], outcome: SweepOutcome) -> None:
    again = "the same command again continues with the rest"
    if outcome.elsewhere:
        print(f"running elsewhere: {', '.join(outcome.elsewhere)}; {again}", flush=True)
    if outcome.stopped:
        print(f"stopped on request: {', '.join(sorted(outcome.stopped))}; {again}", flush=True)
    failed = [trial for trial in trials if trial.name in outcome.failed]
    for trial in failed:
        print(f"{trial.folder}: {outcome.failed[trial.name]}", file=sys.stderr)
    if failed:
        folders = ", ".join(str(trial.folder) for trial in failed)
        print(f"error: {len(failed)} of {len(trials)} runs failed: {folders}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code.

    0 when no run failed, 1 when one did or the sweep is wrong, 130 when it was stopped.
    """
    options = arguments(argv)
    try:
        _check_options(options)
        load_plugins(options.plugin)
        root: Root = root_of(options)
        trials = make_trials(options.overrides, options.out, root)
        trials = [tracked(trial, options.out.resolve().name) for trial in trials]
        words = handed_on(loaded(), root)
        if options.dry_run:
            _dry_run(options, trials, words)
            return 0
        start = _run_here if options.sbatch is None else _submit
        return start(options, trials, words)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(
            f"stopped by {stopped}; the same command starts runs that are missing or unfinished",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
