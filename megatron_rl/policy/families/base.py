"""What a model family declares: its sizes and options, and its parameters as HF tensors.

Nothing here imports megatron, so that planners can read an architecture without building it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_rl.config.model_config import DENSE_SIZES, ModelSizes, model_sizes

# How the HF tensors of a slot are laid out in the Megatron parameter, and along which axis that is
# cut over tensor-parallel ranks: whole (not cut), rows and columns (one tensor, cut along axis 0 /
# 1), vocab (rows, padded), qkv (heads interleaved by query group, rows), gate_up (each rank holds
# its gate rows, then its up rows).
Kind = Literal["whole", "rows", "columns", "vocab", "qkv", "gate_up"]


@dataclass(frozen=True)
class Slot:
    """One Megatron parameter of a layer (names relative to the layer, on both sides).

    Example: ``Slot("mlp.linear_fc2.weight", "columns", ("mlp.down_proj.weight",))``.
    """

    megatron: str
    kind: Kind
    hf: tuple[str, ...]


ATTENTION = (
    Slot("input_layernorm.weight", "whole", ("input_layernorm.weight",)),
    Slot(
        "self_attention.linear_qkv.weight",
        "qkv",
        tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    ),
    Slot("self_attention.linear_proj.weight", "columns", ("self_attn.o_proj.weight",)),
    Slot("pre_mlp_layernorm.weight", "whole", ("post_attention_layernorm.weight",)),
)
QKV_BIAS = (
    Slot("self_attention.linear_qkv.bias", "qkv", tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
)
QK_NORM = (
    Slot("self_attention.q_layernorm.weight", "whole", ("self_attn.q_norm.weight",)),
    Slot("self_attention.k_layernorm.weight", "whole", ("self_attn.k_norm.weight",)),
)
DENSE_MLP = (
    Slot("mlp.linear_fc1.weight", "gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    Slot("mlp.linear_fc2.weight", "columns", ("mlp.down_proj.weight",)),
)


@dataclass(frozen=True, kw_only=True)
class Architecture(ModelSizes):
    """A decoder-only transformer with RMSNorm, rotary positions and gated SiLU.

    ``expert_slots`` are relative to one expert (empty: dense); ``expert_prefix`` is where HF
    numbers the experts of a layer.
    """

    family: str
    norm_eps: float
    rope_theta: float
    rope_type: str
    tied_embeddings: bool
    max_positions: int
    layer_slots: tuple[Slot, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    experts_per_token: int = 0
    expert_slots: tuple[Slot, ...] = ()
    expert_prefix: str = ""


@dataclass(frozen=True)
class Family:
    """``read`` turns a transformers configuration into an Architecture.

    It raises ValueError for an option that the policy does not implement.
    """

    architecture: str  # the entry of "architectures" in config.json
    read: Callable[[Any], Architecture]


def refuse(hf: Any, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ValueError when an option of ``hf`` has a value outside ``allowed[option]``.

    An absent option is allowed: the family's code in transformers does not have it.
    """
    for option, values in allowed.items():
        if hasattr(hf, option) and getattr(hf, option) not in values:
            shown = " or ".join(repr(value) for value in values)
            raise ValueError(
                f"config.json of {hf.model_type}: {option} is {getattr(hf, option)!r}, which the"
                f" policy does not implement; only {shown} is supported, give another model"
            )


def common(hf: Any, **more: Any) -> Architecture:
    """The fields every family shares, plus ``more``.

    Refuses activations and rotary types that are not implemented.
    """
    refuse(hf, {"hidden_act": ("silu",)})
    rope = dict(hf.rope_parameters)
    rope_type = rope["rope_type"]
    if rope_type not in ("default", "llama3", "linear"):
        raise ValueError(
            f"config.json of {hf.model_type}: rope type is {rope_type!r}, which the policy does not"
            " implement; only 'default', 'llama3' and 'linear' are supported, give another model"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"config.json of {hf.model_type}: partial_rotary_factor is"
            f" {rope['partial_rotary_factor']}; only 1.0 is supported, give another model"
        )
    layer_types = set(getattr(hf, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ValueError(
            f"config.json of {hf.model_type}: layer_types has {sorted(layer_types)}; "
            "only 'full_attention' is supported, give another model"
        )
    # A family with experts adds their sizes itself, beside their tensors.
    sizes = asdict(model_sizes({key: getattr(hf, key, None) for key in DENSE_SIZES}))
    fields: dict[str, Any] = {
        "family": hf.model_type,
        "norm_eps": hf.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_type": rope_type,
        "tied_embeddings": bool(hf.tie_word_embeddings),
        "max_positions": hf.max_position_embeddings,
    }
    return Architecture(**(sizes | fields | more))
