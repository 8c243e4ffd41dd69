"""``config.json`` of a model directory: read, and its sizes checked, before anything is built from them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

POINTER_START, POINTER_SECOND_LINE = b"version ", b"\noid sha256:"
REQUIRED = ("num_hidden_layers", "num_attention_heads")
# Sizes that may be left out, or null: transformers then has a default.
OPTIONAL = (
    "hidden_size", "intermediate_size", "vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok",
)  # fmt: skip
# Transformers computes with these as they stand.
NUMBERS = ("rope_theta", "rms_norm_eps")
WEIGHTS_DECIDE = ("hidden_size", "intermediate_size", "vocab_size")


def refuse_pointer(file: Path) -> None:
    """Raises ValueError when ``file`` is what Git leaves in the place of a large file that was not fetched."""
    with file.open("rb") as opened:
        start = opened.read(200)
        if start.startswith(POINTER_START) and POINTER_SECOND_LINE in start:
            raise ValueError(f"model.path: {file} is a Git LFS pointer, not the file itself; run git lfs pull in its folder")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``.

    Raises:
        ValueError: it is not one; names the file.
    """
    refuse_pointer(file)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON and of UTF-8
        raise ValueError(f"model.path: {file} is not JSON ({error}); copy it again from the model") from error
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ValueError(f"model.path: {file} holds a {kind}, not an object of keys; copy it again from the model")
    return values


def read_model_config(file: Path, architectures: Collection[str] | None = None) -> dict[str, Any]:
    """``config.json`` as a dict whose sizes are whole numbers. ``architectures``: those that are supported; None: any.

    Raises:
        ValueError: it cannot be read, is of another architecture (said before anything else), of quantized weights, or
            lacks a size; names file, key, value and remedy.
    """
    values = read_json(file)
    if architectures is not None:
        _check_architecture(file, values, architectures)
    quantization = values.get("quantization_config") or values.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ValueError(
            f"model.path: {file} has quantization_config ({method}); quantized weights are not supported, give the model before "
            "quantization"
        )
    required = REQUIRED if architectures is None else (*REQUIRED, *WEIGHTS_DECIDE)
    for key in NUMBERS:
        _check_number(file, values, key)
    for key in (*REQUIRED, *OPTIONAL):
        _check_size(file, values, key, required=key in required)
    return values


def _check_architecture(file: Path, values: Mapping[str, Any], known: Collection[str]) -> None:
    names = values.get("architectures") or []
    if isinstance(names, list) and len(names) == 1 and names[0] in known:
        return
    close = difflib.get_close_matches(str(names[0]), known, n=1) if isinstance(names, list) and names else []
    hint = f" (nearest: {close[0]})" if close else ""
    raise ValueError(
        f"model.path: {file} has architectures {names}, which the policy does not implement{hint}; "
        f"supported: {', '.join(sorted(known))}; give one of these, or register a family (examples/plugins/model_family.md)"
    )


def _check_number(file: Path, values: Mapping[str, Any], key: str) -> None:
    """``key``, at the top or in the section that newer versions of transformers write it to."""
    rope = values.get("rope_parameters")
    for section in (values, rope if isinstance(rope, dict) else {}):
        value = section.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if value is not None and not number:
            raise ValueError(f"model.path: {file}: {key} is {value!r}, not a number above 0; correct the key")


def _check_size(file: Path, values: Mapping[str, Any], key: str, *, required: bool) -> None:
    value = values.get(key)
    if value is None and not required:
        return
    if key not in values:
        raise ValueError(f"model.path: {file} has no {key}; copy it again from the model")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        # A dense model of a family with experts may say 0 of them.
        if value == 0 and key in ("num_experts", "num_local_experts"):
            return
        raise ValueError(f"model.path: {file} has {key} = {value!r}; it must be a whole number of at least 1")
