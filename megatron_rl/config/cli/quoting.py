"""Values of the user as Hydra overrides, whatever characters they hold."""

from __future__ import annotations

import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

# A start of an interpolation, with the backslashes before it: two of them stand for one there.
INTERPOLATION = re.compile(r"(\\*)\$\{")


def override(key: str, value: str) -> str:
    """``key=value``, quoted where Hydra would read the value as something else than this text.

    Example: ``override("run_dir", "runs/a")`` gives ``run_dir=runs/a``, and
    ``override("run_dir", "runs/seed=1")`` gives ``run_dir='runs/seed=1'``.

    Raises:
        ValueError: ``???``, which stands for a missing value and has no other spelling.
    """
    if value == "???":
        raise ValueError(
            f"{key} = {value!r}: the configuration keeps this text for a missing value"
        )
    if _reads_as_itself(key, value):
        return f"{key}={value}"
    return f"{key}={quoted(value)}"


def quoted(value: str) -> str:
    """The text in single quotes of Hydra's grammar, without a meaning for ``${``."""
    # ``${`` becomes ``\${``, and each backslash before it two: ``\${`` becomes ``\\\${``.
    literal = INTERPOLATION.sub(lambda start: start[1] * 2 + r"\${", value)
    return QuotedString(literal, Quote.single).with_quotes()


def _reads_as_itself(key: str, value: str) -> bool:
    if "${" in value:
        return False
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={value}").value()
    except HydraException:
        return False
    return isinstance(parsed, str) and parsed == value
