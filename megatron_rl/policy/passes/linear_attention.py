"""The gated delta net over packed sequences: megatron's layer with what it lacks here, and torch in
the place of the kernels of flash-linear-attention where that is not installed."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common, gdn
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_rl.models.base import LinearAttention
from megatron_rl.policy.passes.attention import RMSNorm, positions

HAS_KERNELS = common.HAVE_FLA  # before it is replaced
CHUNK = 64  # tokens


def linear_fields(linear: LinearAttention) -> dict[str, Any]:
    """megatron's fields for such a model.

    Raises:
        ValueError: the run is to be deterministic, which the kernels are not.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic and HAS_KERNELS:
        raise ValueError(
            "trainer.deterministic = true: kernels of flash-linear-attention may give other bits"
            " for the same input; set it to false, or give a model without linear attention"
        )
    return dict(
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(each) for each in linear.layers],
        linear_conv_kernel_dim=linear.kernel,
        linear_key_head_dim=linear.key_dim,
        linear_value_head_dim=linear.value_dim,
        linear_num_key_heads=linear.key_heads,
        linear_num_value_heads=linear.value_heads,
        # megatron would refuse packed sequences; torch's operations here are deterministic.
        deterministic_mode=False,
    )


class DeltaNorm(RMSNorm):
    """Norm of each head's output. It multiplies by its weight also where others do by 1 + weight.

    Tensor ranks have other heads, so that its gradients are summed over them: in the backward, for
    megatron sums such gradients under sequence parallelism alone.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_centered = False
        weight: Any = self.weight
        weight.sequence_parallel = False

    def forward(self, x: Tensor) -> Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight)
        return self.normed(x, weight)


class DeltaNet(GatedDeltaNet):
    """megatron's gated delta net, with decay rates in float32 whatever the parameters' format."""

    def _compute_g_and_beta(self, rate: Tensor, bias: Tensor, *inputs: Tensor) -> Any:
        return super()._compute_g_and_beta(rate.float(), bias.float(), *inputs)


def set_delta_net(layer: ModuleSpec) -> None:
    """Puts the net into the place of the attention of ``layer``, with matrices of its classes."""
    linear = layer.submodules.self_attention.submodules
    parts = GatedDeltaNetSubmodules(linear.linear_qkv, DeltaNorm, linear.linear_proj)
    layer.submodules.self_attention = ModuleSpec(DeltaNet, submodules=parts)
    # In checkpoints norms have the names that they have in layers of Transformer Engine.
    keys = layer.submodules.sharded_state_dict_keys_map
    if "input_layernorm." in keys:
        keys["input_layernorm."] = "self_attention.in_proj.layer_norm_"


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """``silu(sum_j weight[:, -1 - j] * x[t - j])`` over the tokens of t's sequence up to t.

    ``x``: ``[1, tokens, channels]``, ``weight``: ``[channels, kernel]``.
    """
    assert bias is None, "the filters of these families have no bias"
    place = positions(cu_seqlens, x.shape[1])[:, None]
    states, taps = x.float(), weight.float()
    total = states * taps[:, -1]
    for back in range(1, weight.shape[1]):
        earlier = F.pad(states, (0, 0, back, 0))[:, : x.shape[1]]
        total = total + earlier * (place >= back) * taps[:, -1 - back]
    return F.silu(total).to(x.dtype), None


def l2norm(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x * x) + 1e-6)`` over the last axis, in float32."""
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """The gated delta rule of each sequence, of each head, from a state S of zeros::

        S_t = exp(g_t) S_(t-1) + k_t beta_t (v_t - exp(g_t) S_(t-1)^T k_t)^T
        o_t = S_t^T q_t / sqrt(key_dim)

    Inputs and result are ``[1, tokens, heads, dim]``, ``g`` and ``beta`` ``[1, tokens, heads]``.
    A chunk of tokens at a time, in float32. What a chunk writes given an empty state is the
    solution of a triangular system, found for all chunks at once; then the states pass from chunk
    to chunk, of all sequences together. Source: Yang et al. 2024, arXiv:2406.06484 section 3 and
    arXiv:2412.06464 section 3.3.
    """
    lengths = cu_seqlens.diff()
    size = min(CHUNK, int(lengths.max()))
    counts = (lengths + size - 1) // size
    ends = counts.cumsum(0)
    # Token p of chunk c: behind those of earlier chunks of its sequence; the end of its last one
    # is filled with tokens of zeros, which neither write nor decay.
    owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    within = torch.arange(len(owner), device=counts.device) - (ends - counts)[owner]
    column = within[:, None] * size + torch.arange(size, device=counts.device)
    is_token = column < lengths[owner, None]
    places = torch.where(is_token, cu_seqlens[:-1][owner, None] + column, q.shape[1])

    def chunked(x: Tensor) -> Tensor:  # [1, tokens, heads, ...] to [chunks, heads, size, ...]
        zero = x.new_zeros(1, *x.shape[2:])
        return torch.cat([x[0], zero]).float()[places].transpose(1, 2)

    queries, keys, values, rates = map(chunked, (q, k, v, beta))
    decay = chunked(g).cumsum(-1)
    between = decay[..., :, None] - decay[..., None, :]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = between.masked_fill(later, -torch.inf).exp()
    scaled = keys * rates[..., None]
    system = (scaled @ keys.mT) * between  # its diagonal is taken as 1
    sides = torch.cat([values * rates[..., None], scaled * decay.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    written, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    queries = queries * k.shape[-1] ** -0.5
    inside = (queries @ keys.mT) * between
    queries = queries * decay.exp()[..., None]
    keys = keys * (decay[..., -1:] - decay).exp()[..., None]
    kept = decay[..., -1].exp()[..., None, None]

    order = torch.argsort(counts, descending=True, stable=True)
    first = (ends - counts)[order]
    state = q.new_zeros(len(counts), q.shape[2], k.shape[-1], v.shape[-1], dtype=torch.float32)
    outputs, done = [], []
    for number in range(int(counts.max())):
        rows = first[: int((counts > number).sum())] + number
        state = state[: len(rows)]
        new = written[rows] - read[rows] @ state
        outputs.append(queries[rows] @ state + inside[rows] @ new)
        state = state * kept[rows] + keys[rows].mT @ new
        done.append(rows)
    out = torch.cat(outputs)[torch.argsort(torch.cat(done))]
    return out.transpose(1, 2)[is_token][None].to(v.dtype), None


# Places of kernels in megatron, and what stands in for them.
STAND_INS = (
    (common, "HAVE_FLA", True),
    (common, "l2norm", l2norm),
    (gdn, "causal_conv1d", causal_conv),
    (gdn, "chunk_gated_delta_rule", delta_rule),
)
