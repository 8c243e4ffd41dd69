"""What a layer keeps for its backward, and which of its modules are run again there instead."""

from megatron_rl.config.model_config import ITEM_BYTES
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.models import Architecture
from megatron_rl.models.base import LinearAttention, Vision

FLOAT32_BYTES = ITEM_BYTES["float32"]


def selective_modules(experts: bool, *, fused: bool, delayed_fp8: bool = False) -> list[str]:
    """megatron's names of modules whose results are dropped and computed again.

    ``fused``: layers of Transformer Engine. Attention is not among them: flash attention keeps
    nothing but its arguments and its result.

    A dense layer runs its feed-forward part again (``mlp``), which keeps the most for its
    backward. With experts that would repeat their exchange between ranks too, so that only what is
    cheap is run again: the activation between their two matrices (``moe_act``, for grouped experts
    only) and the norm before them. Megatron's own layers have no grouped experts, and delayed
    scaling allows neither: there the whole of the experts is run again (``moe``).

    Examples: ``selective_modules(False, fused=True)`` is ``["mlp"]``;
    ``selective_modules(True, fused=True)`` is ``["moe_act", "layernorm"]``.
    """
    if not experts:
        return ["mlp"]
    if fused and not delayed_fp8:
        return ["moe_act", "layernorm"]
    return ["moe"]


def layer_activations(
    arch: Architecture, parallel: ParallelConfig, tokens: int, element: int, fused: bool
) -> int:
    """Bytes that one layer keeps of ``tokens`` tokens for its backward.

    ``element``: bytes of a number; ``fused``: layers of Transformer Engine (else megatron's own
    with torch's norm and attention).

    Per token: for each of two norms, or four, its input and its output (unfused, in 16 bits: the
    input twice in float32, and the output), latent vectors before and after their norms, likewise
    queries and keys where there is one norm over all heads, queries, keys, values and the
    attention's output (unfused: that twice, and the rotary tables), ``feed_forward_activations``.
    Tensor ranks share what they split; with sequence parallelism also the norms. Full recomputation
    keeps the layer's input only. With selective recomputation fused layers run the second norm
    again too, and keep its input only.
    """
    tensor = parallel.tensor
    shared = tensor if parallel.sequence else 1
    if parallel.recompute == "full":
        return tokens * arch.hidden_size * element // shared
    norm_bytes = 2 * element
    if not fused and element < FLOAT32_BYTES:
        norm_bytes = 2 * FLOAT32_BYTES + element
    norms = 2 * (arch.input_norms + arch.output_norms) * arch.hidden_size * norm_bytes / shared
    if parallel.recompute == "selective" and fused and arch.input_norms:
        norms -= arch.hidden_size * element / shared
    query_widths = 2 if fused else 3
    query_widths += 2 * arch.gated_outputs  # the gate, and what it multiplies
    heads = query_widths * arch.num_heads + 2 * arch.num_kv_heads
    attention = heads * arch.head_dim / tensor
    if not fused:
        attention += 4 * arch.head_dim
    if arch.heads_norm:  # queries and keys before and behind it, in float32
        counted = (arch.num_heads + arch.num_kv_heads) * arch.head_dim
        attention += 2 * counted * FLOAT32_BYTES / element / tensor
    if arch.latent is not None:
        latents = arch.latent_dim + (arch.latent.query_rank or 0)
        attention += 2 * latents / shared
    if arch.linear is not None:  # the mean of a layer
        share = arch.linear_layers / arch.num_layers
        attention += share * (linear_activations(arch.linear, fused) / tensor - attention)
    feed_forward = feed_forward_activations(arch, parallel, fused)
    return int(tokens * (norms + element * (attention + feed_forward)))


def linear_activations(linear: LinearAttention, fused: bool) -> int:
    """Numbers that a gated delta net keeps of a token between its two matrices.

    Fused: what goes into the filter and comes out, queries and keys after their norm and once for
    every value head, gates, the rule's result before and after its norm, and its product with the
    gate. Torch's stand-ins keep, in float32, each chunk's arrays and its products of tokens with
    tokens: factors as counted over saved tensors.
    """
    keys = linear.key_heads * linear.key_dim
    if fused:
        wide = 2 * linear.key_dim + 4 * linear.value_dim
        return 2 * linear.filtered + 2 * keys + linear.value_heads * wide
    wide = 11 * linear.key_dim + 14 * linear.value_dim + 5 * 64
    return 12 * keys + linear.value_heads * wide


def feed_forward_activations(arch: Architecture, parallel: ParallelConfig, fused: bool) -> float:
    """Numbers that the feed-forward part of one layer keeps of a token on one rank.

    Five widths, for each expert a token visits: gate and up, the activated gate, up once more, and
    their product. Fused: three, for gate and up serve the backward as they are. The clamped unit of
    GPT-OSS, which no kernel fuses, keeps eight. An expert also
    keeps its token going in and coming out. The expert that every token visits is cut as a dense
    layer is. First layers without experts count as those with.

    Selective recomputation runs this part again as a whole and keeps nothing of it. Of fused
    experts it runs the activation again, and keeps gate and up (under delayed FP8 scaling it keeps
    nothing of them either, which is not counted).
    """
    selective = parallel.recompute == "selective"
    widths = 3 if fused else 5
    if arch.biased:
        widths = 8
    if arch.num_experts == 0:
        return 0 if selective else widths * arch.ffn_hidden_size / parallel.tensor
    if selective and not fused:
        return 0
    if selective:
        widths = 2
    shared = parallel.tensor if parallel.sequence else 1
    width = widths * arch.expert_ffn_hidden_size / parallel.expert_tensor
    of_shared = widths * arch.shared_ffn_hidden_size / parallel.tensor
    return of_shared + arch.experts_per_token * (width + 2 * arch.hidden_size) / shared


def run_again_activations(
    arch: Architecture, parallel: ParallelConfig, tokens: int, element: int, fused: bool
) -> int:
    """Bytes that recomputation dropped and the one layer whose backward runs has again."""
    if parallel.recompute == "none":
        return 0
    keeps_all = parallel.model_copy(update={"recompute": "none"})
    whole = layer_activations(arch, keeps_all, tokens, element, fused)
    if parallel.recompute == "full":
        return whole  # and the inputs of all layers are still kept
    return whole - layer_activations(arch, parallel, tokens, element, fused)


def tower_activations(
    vision: Vision, parallel: ParallelConfig, tokens: int, element: int, *, frozen: bool
) -> int:
    """Bytes that the tower keeps of images of ``tokens`` tokens for its backward; none where it is
    frozen.

    Per patch, in ``element`` bytes: its pixels; what each block keeps (see ``tower_block``, or its
    input alone, if it is run again); six widths of each merger. The tower is whole on every tensor
    rank, and so are its activations.
    """
    if frozen:
        return 0
    patches = tokens * vision.merge**2
    blocks = vision.depth * vision.hidden_size * element * patches
    if parallel.recompute == "none":
        blocks = vision.depth * tower_block(vision, tokens, element)
    ends = vision.patch_numbers + 6 * (1 + vision.num_deep) * vision.hidden_size
    return patches * ends * element + blocks


def tower_block(vision: Vision, tokens: int, element: int) -> int:
    """Bytes that one block of the tower keeps of images of ``tokens`` tokens.

    Per patch, with its width h and its feed-forward width f: 2 h numbers in float32 (inputs of the
    norms), and in ``element`` bytes 11 h (norms, queries, keys and values before and after their
    rotation, attention) and 4 f (gate, up, the activated gate, their product).
    """
    width = vision.hidden_size
    numbers = 11 * width + 4 * vision.ffn_hidden_size
    return tokens * vision.merge**2 * (2 * width * FLOAT32_BYTES + numbers * element)
