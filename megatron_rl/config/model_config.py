"""``config.json`` of a model directory: read, checked, and its sizes in plain numbers; the number
formats that a configuration names. Without torch."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import close_names, did_you_mean

# Bytes of one number, by the name of its format: torch's name without "torch.".
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_POINTER_START = b"version "
_POINTER_SECOND_LINE = b"\noid sha256:"
QUANTIZATION = "quantization_config"
REQUIRED = ("num_hidden_layers", "num_attention_heads")
_WEIGHTS_DECIDE = ("hidden_size", "intermediate_size", "vocab_size")
_LAYER_SIZES = (
    *_WEIGHTS_DECIDE,
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
)
# Sizes that may be left out, or null: transformers then has a default.
OPTIONAL = (
    *_LAYER_SIZES,
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
)
# Transformers computes with these as they stand.
NUMBERS = ("rope_theta", "rms_norm_eps")
# The keys of ``model_sizes`` that every family has.
DENSE_SIZES = (
    *REQUIRED,
    *_LAYER_SIZES,
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "layer_types",
    "full_attention_interval",
)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a decoder-only transformer; 0 where config.json leaves one to transformers.

    ``head_dim`` need not be ``hidden_size / num_heads``. ``latent_dim`` is what an engine keeps of
    a token in each layer where keys and values of all heads come from one vector, 0 elsewhere.
    ``expert_ffn_hidden_size`` is the width of one expert, 0 without experts. ``linear_layers`` have
    a state in the place of keys and values, of ``state_numbers`` a layer, cut by ``linear_heads``,
    with keys and values of ``linear_dims``.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    latent_dim: int = 0
    num_experts: int = 0
    expert_ffn_hidden_size: int = 0
    linear_layers: int = 0
    linear_heads: int = 0
    state_numbers: int = 0
    linear_dims: tuple[int, int] = (0, 0)

    @property
    def attention_layers(self) -> int:
        return self.num_layers - self.linear_layers


def model_sizes(values: Mapping[str, Any]) -> ModelSizes:
    """The sizes in ``values``, the keys of a config.json or the fields of a transformers
    configuration: the one place where both are interpreted.

    Example: 28 heads and hidden size 3584 without ``head_dim`` are heads of 128, and without
    ``num_key_value_heads`` 28 key-value heads.
    """

    def size(*keys: str) -> int:
        """The first of ``keys`` that is there and is neither null nor 0."""
        for key in keys:
            if values.get(key):
                return values[key]
        return 0

    num_heads = size("num_attention_heads")
    head_dim = size("head_dim")
    if not head_dim and num_heads:
        head_dim = size("hidden_size") // num_heads
    latent_dim = 0
    if latent_rank := size("kv_lora_rank"):
        rotary_dim = size("qk_rope_head_dim")
        head_dim = size("qk_nope_head_dim") + rotary_dim
        latent_dim = latent_rank + rotary_dim
    num_experts = size("num_experts", "num_local_experts", "n_routed_experts")
    expert_ffn = 0
    if num_experts:
        # Mixtral has experts in the place of the dense layer, and no key of their own for them.
        expert_ffn = size("moe_intermediate_size", "intermediate_size")
    return ModelSizes(
        num_layers=size("num_hidden_layers"),
        hidden_size=size("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=(0 if latent_dim else size("num_key_value_heads")) or num_heads,
        head_dim=head_dim,
        ffn_hidden_size=size("intermediate_size", "moe_intermediate_size"),
        vocab_size=size("vocab_size"),
        latent_dim=latent_dim,
        num_experts=num_experts,
        expert_ffn_hidden_size=expert_ffn,
        **_linear_sizes(values, size),
    )


def _linear_sizes(values: Mapping[str, Any], size: Callable[[str], int]) -> dict[str, Any]:
    """Of a gated delta net: a state, and what its filter keeps of the last tokens."""
    heads = size("linear_num_key_heads")
    if not heads:
        return {}
    key, value = (size(f"linear_{x}_head_dim") for x in ("key", "value"))
    value_heads, kernel = size("linear_num_value_heads"), size("linear_conv_kernel_dim")
    layers, interval = size("num_hidden_layers"), size("full_attention_interval") or 4
    types = values.get("layer_types")
    filtered = 2 * heads * key + value_heads * value
    return dict(
        linear_layers=types.count("linear_attention") if types else layers - layers // interval,
        linear_heads=heads,
        state_numbers=value_heads * key * value + (kernel - 1) * filtered,
        linear_dims=(key, value),
    )


def unread_layers(num_layers: int, more: int, linear: bool) -> tuple[str, ...]:
    """How the names of tensors begin in the ``more`` layers behind the last of ``num_layers``, and,
    of a model with ``linear`` attention, in those beside its layers: they predict further tokens,
    and nothing here reads them."""
    layers = range(num_layers, num_layers + more)
    return (*(f"model.layers.{layer}." for layer in layers), *(("mtp.",) if linear else ()))


def refuse_pointer(file: Path) -> None:
    """Raises ValueError for the pointer that Git leaves for a large file that is not fetched."""
    with file.open("rb") as opened:
        start = opened.read(200)
        if start.startswith(_POINTER_START) and _POINTER_SECOND_LINE in start:
            raise ValueError(
                f"model.path: {file} is a Git LFS pointer, not the file itself; run git lfs pull in"
                " its folder"
            )


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``.

    Raises:
        ValueError: it is not one; names the file.
    """
    refuse_pointer(file)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON and of UTF-8
        raise ValueError(
            f"model.path: {file} is not JSON ({error}); copy it again from the model"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(
            f"model.path: {file} holds a {type(values).__name__}, not an object of keys; copy it"
            " again from the model"
        )
    return values


def read_model_config(file: Path, architectures: Collection[str] | None = None) -> dict[str, Any]:
    """``config.json`` as a dict whose sizes are whole numbers. ``architectures``: those that are
    supported; None: any. Keys of a language model next to a tower count as those of the model.

    Raises:
        ValueError: it cannot be read, is of another architecture (said before anything else), of
            quantized weights, or lacks a size; names file, key, value and remedy.
    """
    values = read_json(file)
    if architectures is not None:
        _check_architecture(file, values, architectures)
    text = values.get("text_config")
    if isinstance(text, dict):
        # A vision-language model, as newer versions of transformers write it, in sections. Keys
        # at the top win, where older versions have those of the language model.
        values = {**text, **values}
    quantization = values.get(QUANTIZATION) or values.get("compression_config")
    if quantization and not is_read_quantized(quantization):
        of_dict = isinstance(quantization, dict)
        method = quantization.get("quant_method") if of_dict else quantization
        raise ValueError(
            f"model.path: {file} has quantization_config ({method}); quantized weights are not"
            " supported, but for fp8 with weight_block_size and mxfp4: give the model before"
            " quantization"
        )
    required = REQUIRED if architectures is None else (*REQUIRED, *_WEIGHTS_DECIDE)
    for key in NUMBERS:
        _check_number(file, values, key)
    if "moe_intermediate_size" in values and "intermediate_size" not in values:
        required = tuple(key for key in required if key != "intermediate_size")
    for key in (*REQUIRED, *OPTIONAL):
        _check_size(file, values, key, required=key in required)
    return values


def is_read_quantized(quantization: Any) -> bool:
    """Whether weights of such a ``quantization_config`` are read, as dequantized."""
    values = quantization if isinstance(quantization, dict) else {}
    if values.get("quant_method") != "fp8":
        return values.get("quant_method") == "mxfp4"
    block = values.get("weight_block_size")
    return (
        isinstance(block, list) and [type(size) for size in block] == [int, int] and min(block) > 0
    )


def _check_architecture(file: Path, values: Mapping[str, Any], known: Collection[str]) -> None:
    names = values.get("architectures") or []
    if isinstance(names, list) and len(names) == 1 and names[0] in known:
        return
    name = str(names[0]) if isinstance(names, list) and names else ""
    hint = did_you_mean(close_names(name, known))
    raise ValueError(
        f"model.path: {file} has architectures {names}, which the policy does not implement;"
        f" {f'{hint} supported:'.strip()} {', '.join(sorted(known))}; give one of these, or"
        " register a family (examples/plugins/model_family.md)"
    )


def _check_number(file: Path, values: Mapping[str, Any], key: str) -> None:
    """``key``, at the top or in the section that newer versions of transformers write it to."""
    newer = values.get("rope_parameters")
    for section in (values, newer if isinstance(newer, dict) else {}):
        value = section.get(key, 1)
        if value is not None and (type(value) not in (int, float) or not value > 0):
            raise ValueError(
                f"model.path: {file}: {key} is {value!r}, not a number above 0; correct the key"
            )


def _check_size(file: Path, values: Mapping[str, Any], key: str, *, required: bool) -> None:
    value = values.get(key)
    if value is None and not required:
        return
    if key not in values:
        raise ValueError(f"model.path: {file} has no {key}; copy it again from the model")
    # A dense model of a family with experts may say 0 of them.
    least = 0 if key in ("num_experts", "num_local_experts") else 1
    if type(value) is not int or value < least:
        raise ValueError(
            f"model.path: {file} has {key} = {value!r}; it must be a whole number of at least 1"
        )


def format_name(dtype: Any) -> str:
    """The name of a ``torch.dtype``. Example: ``format_name(torch.bfloat16)`` is "bfloat16"."""
    return str(dtype).removeprefix("torch.")
