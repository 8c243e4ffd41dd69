"""What a model family declares: its sizes and options, and its parameters as HF tensors.

Nothing here imports megatron, so that planners can read an architecture without building it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatron_rl.config.model_config import DENSE_SIZES, ModelSizes, model_sizes

if TYPE_CHECKING:
    import torch


# How the HF tensors of a slot are laid out in the Megatron parameter, and along which axis that is
# cut over tensor-parallel ranks: whole (not cut), rows and columns (one tensor, cut along axis 0 /
# 1), vocab (rows, padded), qkv (heads interleaved by query group, rows), gate_up (each rank holds
# its gate rows, then its up rows), parts (each rank holds its share of every ``Slot.parts``, rows).
Kind = Literal["whole", "rows", "columns", "vocab", "qkv", "gate_up", "parts"]


class Part(NamedTuple):
    """``groups`` times ``rows`` rows of the slot's HF tensor number ``tensor``: the first begin at
    ``first``, the next ``period`` rows later. Tensor ranks have whole groups. ``name``: megatron's.
    """

    name: str
    tensor: int
    first: int
    rows: int
    period: int
    groups: int


@dataclass(frozen=True)
class Slot:
    """One Megatron parameter of a layer (names relative to the layer, on both sides).

    Example: ``Slot("mlp.linear_fc2.weight", "columns", ("mlp.down_proj.weight",))``.
    """

    megatron: str
    kind: Kind
    hf: tuple[str, ...]
    shape: tuple[int, ...] = ()  # whole; empty where the kind and the model's sizes say it
    parts: tuple[Part, ...] = ()


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
class Vision:
    """The tower that turns patches of images into features of the language model's width.

    ``tensors``: name in the model and shape of every parameter. A token
    is a square of ``merge`` by ``merge`` patches, a patch ``patch_numbers`` numbers.
    """

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    image_token: int
    merge: int
    patch_numbers: int
    depth: int
    hidden_size: int
    ffn_hidden_size: int
    num_deep: int = 0  # of its blocks whose features are added behind the first decoder layers


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: keys and values of all heads come from one short vector of a
    token, and queries from another one. Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.

    ``query_rank``: length of the latter; None: queries come from the hidden state. A query or key
    has ``plain_dim`` numbers and ``rotary_dim`` rotated ones, which all heads share in keys.
    YaRN with ``rotary_factor`` f multiplies scores by ``(0.1 * softmax_factor * log(f) + 1)**2``.
    """

    query_rank: int | None
    rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    rotary_factor: float = 1.0
    softmax_factor: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """The gated delta net of some layers: a state for each value head, a matrix of ``key_dim`` by
    ``value_dim``, in the place of keys and values of all tokens. Source: arXiv:2412.06464.

    ``layers``: which have it. A key head serves as many value heads each. Queries, keys and values
    go through a causal filter over ``kernel`` tokens. ``fused``: its inputs come of two matrices,
    whose rows are those of one key head after another; else of four.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool

    @property
    def filtered(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def products(self) -> int:
        """Multiplications of a token with its state and with its chunk of 64 tokens: three of the
        state's size, and for each of those tokens 2.5 of a key's and 1.5 of a value's."""
        of_chunk = 64 * (5 * self.key_dim + 3 * self.value_dim) // 2
        return self.value_heads * (3 * self.key_dim * self.value_dim + of_chunk)


@dataclass(frozen=True, kw_only=True)
class Architecture(ModelSizes):
    """A decoder-only transformer with RMSNorm, rotary positions and a gated feed-forward part.

    ``expert_slots`` are relative to one expert (empty: dense); ``expert_prefix`` is where HF
    numbers the experts of a layer. ``fused_experts``: it stores those of a layer as one tensor
    ``[experts, in, out]``, or ``[experts, out, in]`` where they are not ``turned_experts``, the
    rows of gate before those of up.

    Attributes:
        biased: linear layers and routers have biases, attention has sinks, and experts a clamped
            gated unit (GPT-OSS).
        num_dense_layers: how many layers, the first ones, have ``dense_slots`` in place of
            ``layer_slots`` and experts.
        num_unread_layers: of a checkpoint, behind the last one: they predict further tokens.
        shared_ffn_hidden_size: width of the expert that every token visits; 0: there is none.
        sigmoid_router: scores are sigmoids, a bias is added to them where experts are chosen, and
            weights are normalized; else the softmax over the chosen ones.
        router_scale: of the weights of experts.
        router_groups: how many groups experts are in, and how many of them a token may visit.
        latent: None: queries, keys and values are products of the hidden state.
        linear: None: all layers have attention; else ``linear_slots`` are those of the others.
        gated_outputs: of attention, by rows of the query's matrix (each head's behind its query),
            and of the shared expert.
        rotary_share: of a head that is rotated.
        attention_factor: of queries and of keys, by YaRN; where ``local_rope_theta`` is, not in
            layers of ``windowed``.
        local_rope_theta: base of the angles in the layers of ``windowed``; None: ``rope_theta``.
        query_scalar: scores are divided by its square root; None: by that of ``head_dim``.
        window: how many tokens a query sees in the layers of ``windowed``, itself included.
        windowed: of each layer; empty: in all layers a query sees all tokens before it.
        mrope_section: how many of a head's angles belong to time, row and column of a position
            (empty: positions are plain numbers). ``mrope_interleaved``: in turns, else in blocks.
        activation: of the gate of the feed-forward part.
        centered_norms: norms multiply by 1 + weight.
        input_norms: attention and feed-forward part have a norm before them.
        output_norms: what attention and feed-forward part return has a norm before it is added.
        heads_norm: queries have one norm over all heads, and keys one.
        embedding_scale: of embeddings, rounded as they are.
        adapter_slots: A and B of the adapters of a layer; empty: all weights are trained.
        prefixes: those that a newer layout of the checkpoint has, and what they are here.
        text_prefix: how HF's names begin in the language model, but for the head;
            ``tower_prefix``: what they have before those of ``Vision.tensors``.
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
    biased: bool = False
    experts_per_token: int = 0
    expert_slots: tuple[Slot, ...] = ()
    expert_prefix: str = ""
    fused_experts: bool = False
    turned_experts: bool = True
    num_dense_layers: int = 0
    dense_slots: tuple[Slot, ...] = ()
    num_unread_layers: int = 0
    shared_ffn_hidden_size: int = 0
    sigmoid_router: bool = False
    router_scale: float = 1.0
    router_groups: tuple[int, int] = (1, 1)
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    linear_slots: tuple[Slot, ...] = ()
    gated_outputs: bool = False
    rotary_share: float = 1.0
    attention_factor: float = 1.0
    local_rope_theta: float | None = None
    query_scalar: float | None = None
    window: int = 0
    windowed: tuple[bool, ...] = ()
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    centered_norms: bool = False
    input_norms: bool = True
    output_norms: bool = False
    heads_norm: bool = False
    embedding_scale: float = 1.0
    vision: Vision | None = None
    prefixes: tuple[tuple[str, str], ...] = ()
    text_prefix: str = "model."
    tower_prefix: str = ""
    adapter_slots: tuple[Slot, ...] = ()

    def is_linear(self, layer: int) -> bool:
        return self.linear is not None and self.linear.layers[layer]

    def has_experts(self, layer: int) -> bool:
        return bool(self.num_experts) and layer >= self.num_dense_layers

    def kind(self, layer: int) -> tuple[bool, bool]:
        """Whether it has experts, and linear attention: layers of one kind are alike."""
        return self.has_experts(layer), self.is_linear(layer)


@dataclass(frozen=True)
class Family:
    """``read`` turns a transformers configuration into an Architecture.

    It raises ValueError for an option that the policy does not implement. ``tower`` makes the
    module of ``Architecture.vision``, whose weights are not set.
    """

    architecture: str  # the entry of "architectures" in config.json
    read: Callable[[Any], Architecture]
    tower: Callable[[Any], torch.nn.Module] | None = None


def refuse(hf: Any, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ValueError when an option of ``hf`` has a value outside ``allowed[option]``.

    An absent option is allowed: the family's code in transformers does not have it.
    """
    for option, values in allowed.items():
        if hasattr(hf, option) and getattr(hf, option) not in values:
            raise ValueError(refusal(hf, option, getattr(hf, option), values))


def refusal(hf: Any, option: str, value: Any, allowed: Sequence[Any]) -> str:
    return (
        f"config.json of {hf.model_type}: {option} is {value!r}, which the policy does not"
        f" implement; only {' or '.join(map(repr, allowed))} is supported, give another model"
    )


def common(hf: Any, **more: Any) -> Architecture:
    """The fields every family shares, plus ``more``; refuses other activations and rotary types."""
    refuse(hf, {"hidden_act": ("silu",)})
    rope = dict(hf.rope_parameters)
    rope = rope.get("full_attention", rope)  # by kind of layer: Gemma 3, OLMo 3
    if rope["rope_type"] == "dynamic":
        raise ValueError(
            f"config.json of {hf.model_type}: rope type is 'dynamic', whose angles depend on the"
            " length that a response has reached: what an engine has kept of earlier tokens would"
            " differ from one pass over all; give yarn, or another model"
        )
    if "sliding_attention" in hf.rope_parameters:
        local = hf.rope_parameters["sliding_attention"]
        if local["rope_type"] != "default":
            raise ValueError(
                f"config.json of {hf.model_type}: rope type of layers with windows is"
                f" {local['rope_type']!r}, which the policy does not implement; give another model"
            )
        more["local_rope_theta"] = local["rope_theta"]
    # Of a part of a head YaRN's factor of attention would have to be applied to that part alone.
    whole = not {"rotary_share", "mrope_section"} & more.keys()
    rope_types = ("default", "yarn") if "latent" in more else ("default", "llama3", "linear")
    rope_types += ("yarn",) if whole else ()
    for what, value, allowed in (
        ("rope type", rope["rope_type"], rope_types),
        (
            "partial_rotary_factor",
            rope.get("partial_rotary_factor", 1.0),
            (more.get("rotary_share", 1.0),),
        ),
    ):
        if value not in allowed:
            raise ValueError(refusal(hf, what, value, allowed))
    if rope["rope_type"] == "yarn" and "latent" not in more:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = "full_attention" if "local_rope_theta" in more else None
        more["attention_factor"] = ROPE_INIT_FUNCTIONS["yarn"](hf, "cpu", layer_type=kind)[1]
    # A family with experts adds their sizes itself, in addition to their tensors.
    sizes = asdict(model_sizes({key: getattr(hf, key, None) for key in DENSE_SIZES}))
    fields: dict[str, Any] = {
        "family": hf.model_type,
        "norm_eps": hf.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_type": rope["rope_type"],
        # The text section of a model with a tower lacks it: the key is the model's.
        "tied_embeddings": bool(getattr(hf, "tie_word_embeddings", False)),
        "max_positions": hf.max_position_embeddings,
    }
    own = {} if "linear" in more else windows(hf)
    return Architecture(**(sizes | fields | own | more))


def windows(hf: Any) -> dict[str, Any]:
    """The fields ``window`` and ``windowed``, by ``layer_types``; where transformers has no such
    option for a family, all layers have the window or none."""
    size = getattr(hf, "sliding_window", None)
    kind = "full_attention" if size is None else "sliding_attention"
    types = getattr(hf, "layer_types", None) or [kind] * hf.num_hidden_layers
    for each in types:
        if each not in ("full_attention", "sliding_attention"):
            raise ValueError(
                refusal(hf, "layer_types", types, ("full_attention", "sliding_attention"))
            )
    some = 0 < getattr(hf, "max_window_layers", 0) < hf.num_hidden_layers  # Qwen2 and Qwen3
    if some and (len(set(types)) > 1 or hf.use_sliding_window):
        raise ValueError(
            f"config.json of {hf.model_type}: max_window_layers is {hf.max_window_layers} of"
            f" {hf.num_hidden_layers} layers; vLLM serves windows in all layers of this family or"
            " in none, give another model"
        )
    if "sliding_attention" not in types:
        return {}
    if not size:
        raise ValueError(
            f"config.json of {hf.model_type}: sliding_window is {size}, and layers have windows;"
            " correct it, or give another model"
        )
    return dict(window=size, windowed=tuple(each == "sliding_attention" for each in types))
