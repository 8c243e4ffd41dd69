"""Dotted names of settings, and the order of names with numbers in them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def within(key: str, sections: Sequence[str]) -> bool:
    """Whether a dotted key is one of ``sections`` or below one.

    Example: ``source.staleness`` is within ``["source"]`` and not within ``["source.s"]``.
    """
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves under dotted names.

    Example: ``{"a": {"b": 1}, "c": [2]}`` gives ``("a.b", 1), ("c", [2])``.
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def natural(name: str) -> tuple[str | int, ...]:
    """Sort key in which ``layers.2`` comes before ``layers.10``."""
    # Every second field is digits, so that like is compared with like.
    fields = re.split("([0-9]+)", name)
    return tuple(int(field) if i % 2 else field for i, field in enumerate(fields))
