"""Overrides in Hydra's grammar: how a value is written as one, and what is wrong with one."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString
from hydra.errors import HydraException

SWEEP = "python -m megatron_rl.sweep"
_NOT_LAUNCHED_BY_HYDRA = (
    "Hydra composes the configuration, torchrun launches: run_dir=DIR is the folder of a run, "
    "sbatch examples/slurm/train.sbatch starts it on Slurm, "
    f"{SWEEP} --out DIR starts combinations of values, logging.KEY sets what is logged, "
    "--config-dir DIR adds groups; see conf/README.md"
)
# A start of an interpolation, with the backslashes before it: two of them stand for one there.
_INTERPOLATION = re.compile(r"(\\*)\$\{")


def as_override(key: str, value: str) -> str:
    """``key=value``, quoted where Hydra would read the value as something else than this text.

    Example: ``as_override("run_dir", "runs/a")`` gives ``run_dir=runs/a``, and
    ``as_override("run_dir", "runs/seed=1")`` gives ``run_dir='runs/seed=1'``.

    Raises:
        ValueError: ``???``, which stands for a missing value and has no other spelling.
    """
    if value == "???":
        raise ValueError(
            f"{key} = {value!r}: the configuration keeps this text for a missing value"
        )
    plain = f"{key}={value}"
    return plain if _reads_as(plain, value) else f"{key}={quoted(value)}"


def quoted(value: str) -> str:
    """The text in single quotes of Hydra's grammar, without a meaning for ``${``."""
    # ``${`` becomes ``\${``, and each backslash before it two: ``\${`` becomes ``\\\${``.
    literal = _INTERPOLATION.sub(lambda start: start[1] * 2 + r"\${", value)
    return QuotedString(literal, Quote.single).with_quotes()


def typed(key: str, value: str) -> str:
    """``key=value`` as it has to be typed in a shell, so that the value arrives as this text.

    Example: ``typed("data.answer_after", "####")`` is ``'data.answer_after="####"'``.
    """
    doubled = f'{key}="{value}"'  # in the single quotes of a shell these are easier to read
    if not _reads_as(f"{key}={value}", value) and _reads_as(doubled, value):
        return shlex.quote(doubled)
    return shlex.quote(as_override(key, value))


def _reads_as(text: str, value: str) -> bool:
    """Whether Hydra reads the override as this text, and not as an interpolation of it."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return False
    return "${" not in value and not override.is_sweep_override() and override.value() == value


def parse(text: str, groups: Sequence[Path]) -> Override:
    """The parsed override.

    Raises:
        ValueError: it cannot be read, or means several runs: says what to type instead.
    """
    if text.startswith("="):
        raise ValueError(f"{text}: not an override; write key=value")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ValueError(_unreadable(text)) from error
    if override.is_sweep_override():
        raise ValueError(_several(text, override, groups))
    if re.match(r"hydra([./]|$)", override.key_or_group):
        raise ValueError(f"{text}: {_NOT_LAUNCHED_BY_HYDRA}")
    return override


def _unreadable(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals:
        return f"{text}: not an override; write key=value"
    if value.startswith("~"):
        return f"{text}: ~ is not replaced after the sign =; type {key}=$HOME{value[1:]}"
    if value.startswith(("[", "{")):
        return (
            f"{text}: not a list or mapping that can be read; write {key}=[a,b] or {key}={{a: 1}}, "
            "with quotes around what has = : , or brackets"
        )
    if not _reads_as(f"{key}=x", "x"):
        return f"{text}: not an override ({key!r} is no key); write key=value"
    return f"{text}: the value has characters that need quotes; type {typed(key, value)}"


def _several(text: str, override: Override, groups: Sequence[Path]) -> str:
    sweep = override.value()
    key, _, value = text.partition("=")
    is_list = isinstance(sweep, ChoiceSweep) and sweep.simple_form
    if not is_list or is_group(override, groups):
        return f"{text}: means several runs; start them with {SWEEP}, or give one value"
    # Numbers are meant as a list, not as the text "1,2".
    are_numbers = all(isinstance(choice, int | float) for choice in sweep.list)
    as_text = "" if are_numbers else f"as one text type {typed(key, value)}, "
    as_list = shlex.quote(f"{key}=[{value}]")
    return (
        f"{text}: a comma outside quotes means several runs; {as_text}as a list {as_list}, for a "
        f"sweep use {SWEEP}"
    )


def is_group(override: Override, groups: Sequence[Path]) -> bool:
    """Whether the override chooses an option of a group, rather than a value."""
    return any((folder / override.key_or_group).is_dir() for folder in groups)


def options_of(group: str, groups: Sequence[Path]) -> list[str]:
    """The options of a group in all folders, sorted, those in folders of it by their path; of ""
    the files next to ``config.yaml``."""
    pattern = "**/*.yaml" if group else "*.yaml"
    roots = [folder / group for folder in groups]
    files = [path.relative_to(root) for root in roots for path in root.glob(pattern)]
    return sorted({file.with_suffix("").as_posix() for file in files})
