"""The number formats a configuration can name, without importing torch."""

from __future__ import annotations

from typing import Any

# Bytes of one number, by the name of its format: torch's name without "torch.".
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def format_name(dtype: Any) -> str:
    """The name of a ``torch.dtype``. Example: ``format_name(torch.bfloat16)`` is "bfloat16"."""
    return str(dtype).removeprefix("torch.")
