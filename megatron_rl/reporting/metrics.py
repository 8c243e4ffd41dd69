"""The metrics of a run: every key of metrics.jsonl, with its meaning and unit."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml


class Metric(NamedTuple):
    """The meaning of a metric key."""

    meaning: str
    unit: str = ""  # empty for numbers without one


_FILE = Path(__file__).with_suffix(".yaml")
# An exact key, or a prefix that ends in "/" with the rule for what follows it.
TABLE: Mapping[str, Metric] = {
    key: Metric(*row) for key, row in yaml.safe_load(_FILE.read_text(encoding="ascii")).items()
}


def metric(key: str) -> Metric | None:
    """The entry of ``key`` in the table, else that of its longest prefix; None without one."""
    if key in TABLE:
        return TABLE[key]
    prefixes = [prefix for prefix in TABLE if prefix.endswith("/") and key.startswith(prefix)]
    return TABLE[max(prefixes, key=len)] if prefixes else None
