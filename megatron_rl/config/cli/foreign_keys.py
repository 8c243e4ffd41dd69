"""Keys of other systems with their names here, and what this project does not support."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="ascii"))
NAMES_HERE: Mapping[str, str] = {
    name: key for key, names in _TABLES["names"].items() for name in names.split()
}
NOT_SUPPORTED: tuple[tuple[str, str], ...] = tuple(_TABLES["not_supported"].items())


def not_supported(key: str, value: Any = None) -> str | None:
    """A sentence where a dotted ``key``, or one below it in ``value``, is of what is not supported.

    Example: ``not_supported("model.lora_rank")`` begins with ``adapters (LoRA) are not supported``.
    """
    for candidate in [key, *_keys_below(value)]:
        for words, sentence in NOT_SUPPORTED:
            if re.search(rf"(^|[._])({words})($|[._])", candidate, re.IGNORECASE):
                return sentence
    return None


def _keys_below(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _keys_below(inner)
