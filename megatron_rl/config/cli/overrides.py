"""What is wrong with an override as the user typed it, and what to type instead."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException

from megatron_rl.config.cli.hydra_words import SWEEP
from megatron_rl.config.cli.quoting import override as quoted_override


def typed(key: str, value: str) -> str:
    """``key=value`` as it has to be typed in a shell, so that the value arrives as this text.

    Example: ``typed("data.answer_after", "####")`` is ``'data.answer_after="####"'``.
    """
    plain = f"{key}={value}"
    if _reads_as(plain, value):
        return shlex.quote(plain)
    doubled = f'{key}="{value}"'  # in the single quotes of a shell these are easier to read
    if _reads_as(doubled, value):
        return shlex.quote(doubled)
    return shlex.quote(quoted_override(key, value))


def _reads_as(text: str, value: str) -> bool:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return False
    return not override.is_sweep_override() and override.value() == value


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
    return override


def _unreadable(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals:
        return f"{text}: not an override; write key=value"
    if value.startswith("~"):
        return f"{text}: ~ is not replaced behind the sign =; type {key}=$HOME{value[1:]}"
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
    as_text = f"as one text type {typed(key, value)}, "
    if all(isinstance(choice, int | float) for choice in sweep.list):
        as_text = ""  # nobody means the text "1,2"
    as_list = shlex.quote(f"{key}=[{value}]")
    return (
        f"{text}: a comma outside quotes means several runs; {as_text}as a list {as_list}, for a "
        f"sweep use {SWEEP}"
    )


def is_group(override: Override, groups: Sequence[Path]) -> bool:
    """Whether the override chooses an option of a group, rather than a value."""
    return any((folder / override.key_or_group).is_dir() for folder in groups)


def group_problem(text: str, override: Override, groups: Sequence[Path]) -> str | None:
    """A sentence where a group of settings is given what is no option, else None."""
    key = override.key_or_group
    value = override.value()
    if not is_group(override, groups) or override.is_delete() or isinstance(value, str | list):
        return None
    return (
        f"{text}: {key} is a group of settings; choose one of its options "
        f"({', '.join(options_of(key, groups))}), or set a key in it: {key}.NAME=value"
    )


def options_of(group: str, groups: Sequence[Path]) -> list[str]:
    """The options of a group in all folders, sorted; of "" the files beside ``config.yaml``."""
    options: set[str] = set()
    for folder in groups:
        options.update(path.stem for path in (folder / group).glob("*.yaml"))
    return sorted(options)
