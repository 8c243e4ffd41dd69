"""The product of the choices of a sweep, and a folder name for each combination."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

# Characters of a name before "-" and a digest of six; file systems allow 255 bytes, and wandb 128
# for a group.
_MAX_NAME = 120
_SPECIAL = re.compile("[^A-Za-z0-9._+-]+")


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
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[:_MAX_NAME]}-{_digest(name)}"


def _plain_part(text: str) -> str:
    """``method=grpo`` as ``method-grpo``; with a digest where characters were replaced, since
    ``x=[1]`` and ``x=(1)`` would both be ``x-1``."""
    key, _, value = text.partition("=")
    plain_value = _SPECIAL.sub("_", value).strip("_")
    plain = _SPECIAL.sub("_", f"{key}-{plain_value}")
    if plain == f"{key}-{value}":
        return plain
    return f"{plain}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def is_seed(override: str) -> bool:
    """Whether the override sets the seed of the run."""
    return override.lstrip("+").startswith("seed=")
