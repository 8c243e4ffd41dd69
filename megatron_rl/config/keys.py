"""Dotted names of settings."""

from __future__ import annotations

from collections.abc import Sequence


def within(key: str, sections: Sequence[str]) -> bool:
    """Whether a dotted key is one of ``sections`` or below one.

    Example: ``source.staleness`` is within ``["source"]`` and not within ``["source.s"]``.
    """
    return any(key == section or key.startswith(f"{section}.") for section in sections)
