"""The trials of a sweep: one combination of overrides each, with its checked configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.config.cli.command_line import Root
from megatron_rl.config.cli.overrides import as_override, quoted
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import MAX_TAG, Config
from megatron_rl.errors import ConfigError
from megatron_rl.run.start import finished_text
from megatron_rl.sweeping.combinations import (
    combinations,
    is_seed,
    plain_name,
    run_names,
    shortened,
    varying,
)


@dataclass(frozen=True)
class Trial:
    """One combination.

    Attributes:
        name: of its folder, made of the overrides that differ.
        overrides: all that make its configuration, with ``run_dir``.
        differing: those that are not the same in every trial.
        same_as: the earlier trial with an equal configuration, which is run for both.
    """

    name: str
    overrides: tuple[str, ...]
    differing: tuple[str, ...]
    config: Config
    same_as: str | None = None

    @property
    def folder(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def label(self) -> str:
        """The overrides that its other seeds share, e.g. ``method=grpo``."""
        shown = [text for text in self.differing if not is_seed(text)]
        return " ".join(shown) or f"method={self.config.method.name}"


def make_trials(overrides: Sequence[str], out: Path, root: Root) -> list[Trial]:
    """The trials of a sweep into ``out``, in the order of the product.

    Raises:
        ValueError: a combination is listed twice.
        ConfigError: one does not compose or validate; lists all problems before any run starts.
    """
    runs = combinations(overrides)
    names = run_names(runs)
    configs = check(runs, [out / name for name in names], root)
    differing = varying(runs)
    first: dict[str, str] = {}  # the name of the first trial of each configuration
    trials = []
    for name, run, config in zip(names, runs, configs, strict=True):
        # Equal for two runs that would do the same, each in its folder.
        identity = config.model_dump_json(exclude={"run_dir"})
        same_as = first.setdefault(identity, name)
        trial = Trial(
            name=name,
            overrides=(*run, as_override("run_dir", config.run_dir)),
            differing=tuple(run[index] for index in differing),
            config=config,
            same_as=None if same_as == name else same_as,
        )
        trials.append(trial)
    return trials


def check(runs: Sequence[Sequence[str]], folders: Sequence[Path], root: Root) -> list[Config]:
    """The configuration of every run. Raises ConfigError as ``make_trials`` does."""
    problems = []
    configs = []
    for run, folder in zip(runs, folders, strict=True):
        given = [*run, as_override("run_dir", str(folder))]
        try:
            values = compose(root.config_name, given, root.config_dir)
            configs.append(validate(Config, values, folder.name))
        except ConfigError as error:
            problems += [f"{folder.name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), "the sweep")  # each of them once
    return configs


def with_wandb(trials: Sequence[Trial], sweep: str) -> list[Trial]:
    """The trials, those that log to wandb with what makes the same comparison there.

    The seeds of a combination share a group, ``SWEEP/COMBINATION``, which wandb can average; a
    group that the user gives stays. The name of the sweep and of its experiment are tags next to
    those of the user.
    """
    return [_tracked(trial, sweep) for trial in trials]


def _tracked(trial: Trial, sweep: str) -> Trial:
    logging = trial.config.logging
    if logging.wandb == "disabled":
        return trial
    shown = [text for text in trial.differing if not is_seed(text)]
    more = []
    if logging.wandb_group is None:
        group = shortened(f"{sweep}/{plain_name(shown)}" if shown else sweep)
        more.append(as_override("logging.wandb_group", group))
    experiments = [text for text in trial.overrides if text.lstrip("+").startswith("experiment=")]
    own = [text[:MAX_TAG] for text in (sweep, *experiments)]
    tags = dict.fromkeys([*logging.wandb_tags, *own])
    more.append(f"logging.wandb_tags=[{','.join(map(quoted, tags))}]")
    # After the others: of two overrides of one key the last holds.
    return replace(trial, overrides=(*trial.overrides, *more))


def is_finished(config: Config) -> bool:
    """Whether nothing is left to do in the folder of this run.

    False when in doubt: the run that is then started reports what is wrong.
    """
    try:
        return finished_text(config) is not None
    except ValueError:
        return False
