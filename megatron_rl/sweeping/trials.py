"""The trials of a sweep: combinations of overrides, with folder names and checked configs."""

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from megatron_rl.config.cli.command_line import Root
from megatron_rl.config.cli.overrides import as_override, quoted
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.config.sections import MAX_TAG
from megatron_rl.errors import ConfigError
from megatron_rl.run.start import finished_text

# Characters of a name before "-" and a digest of six; file systems allow 255 bytes, and wandb 128
# for a group.
_MAX_NAME = 120
_SPECIAL = re.compile("[^A-Za-z0-9._+-]+")


@dataclass(frozen=True)
class Trial:
    """One combination."""

    name: str  # of its folder, made of the overrides that differ
    overrides: tuple[str, ...]  # all that make its configuration, with ``run_dir``
    differing: tuple[str, ...]  # those that are not the same in every trial
    config: Config
    # The earlier trial with an equal configuration, which is run for both.
    same_as: str | None = None

    @property
    def folder(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def without_seed(self) -> list[str]:
        """The overrides that its other seeds share."""
        return [text for text in self.differing if not text.lstrip("+").startswith("seed=")]

    @property
    def label(self) -> str:
        """E.g. ``method=grpo``."""
        return " ".join(self.without_seed) or f"method={self.config.method.name}"


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
        same_as = first.setdefault(config.model_dump_json(exclude={"run_dir"}), name)
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


def tracked(trial: Trial, sweep: str) -> Trial:
    """The trial, one with a tracker that groups runs with what makes the comparison there.

    The seeds of a combination share a group, ``SWEEP/COMBINATION``, which wandb can average; a
    group that the user gives stays. The name of the sweep and of its experiment are tags next to
    those of the user.
    """
    logging = trial.config.logging
    if not set(logging.trackers) - {"tensorboard"}:
        return trial
    more = []
    if logging.group is None:
        shared = trial.without_seed
        group = shortened(f"{sweep}/{plain_name(shared)}" if shared else sweep)
        more.append(as_override("logging.group", group))
    experiments = [text for text in trial.overrides if text.lstrip("+").startswith("experiment=")]
    own = [text[:MAX_TAG] for text in (sweep, *experiments)]
    tags = dict.fromkeys([*logging.tags, *own])
    more.append(f"logging.tags=[{','.join(map(quoted, tags))}]")
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
        choices.append([text])
        if parsed.is_sweep_override():
            # The key with its "+" or "@package"; values as they were typed, quotes included, so
            # that each is an override again.
            key = parsed.get_key_element()
            choices[-1] = [f"{key}={value}" for value in parsed.sweep_string_iterator()]
    return [list(combination) for combination in itertools.product(*choices)]


def varying(runs: Sequence[Sequence[str]]) -> list[int]:
    """The positions of the overrides that differ between the runs."""
    # Every run has as many overrides as were typed, each at its place: a row of zip is a place.
    return [place for place, values in enumerate(zip(*runs)) if len(set(values)) > 1]


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
    names = [plain_name([run[index] for index in differing]) for run in runs]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"sweep: {repeated[0]} is listed twice; name each value once")
    return names


def plain_name(overrides: Sequence[str]) -> str:
    """Overrides as one name without special characters; ``run`` where there are none."""
    return shortened("_".join(map(_plain_part, overrides)) or "run")


def shortened(name: str) -> str:
    """The name, a long one with a digest for its end."""
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}-{_digest(name)}"


def _plain_part(text: str) -> str:
    """``method=grpo`` as ``method-grpo``; with a digest where characters were replaced, since
    ``x=[1]`` and ``x=(1)`` would both be ``x-1``."""
    key, _, value = text.partition("=")
    plain_value = _SPECIAL.sub("_", value).strip("_")
    plain = _SPECIAL.sub("_", f"{key}-{plain_value}")
    return plain if plain == f"{key}-{value}" else f"{plain}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
