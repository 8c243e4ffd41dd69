"""What GPT-OSS asks of megatron's layers: biases throughout, sinks, and a clamped gated unit."""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

ALPHA = 1.702
LIMIT = 7.0


class ClampedGlu(torch.nn.Module):
    """``g * sigmoid(ALPHA * g) * (u + 1)`` with ``g`` of the even and ``u`` of the odd numbers of
    the last axis; ``g`` at the most LIMIT, ``u`` within it on both sides. Source: the reference
    implementation of gpt-oss (github.com/openai/gpt-oss, gpt_oss/torch/model.py, ``swiglu``).

    Example: ``[0.5, 9.0]`` becomes ``[0.5 * sigmoid(0.851) * 8]``, 2.8030.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, gate_and_up: Tensor) -> Tensor:
        gate = gate_and_up[..., ::2].clamp(max=LIMIT)
        up = gate_and_up[..., 1::2].clamp(-LIMIT, LIMIT)
        return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def bias_fields() -> dict[str, Any]:
    """megatron's fields for such a model. ``ClampedGlu`` goes where megatron would put an
    activation of Transformer Engine, see ``set_experts``."""
    return dict(
        add_bias_linear=True,
        softmax_type="learnable",
        use_te_activation_func=True,
        bias_activation_fusion=False,
    )


class ExpertOutput(RowParallelLinear):
    """megatron's second matrix of an expert, with two remedies for its bias.

    Its gradient must not be summed over the tensor ranks under sequence parallelism: they have
    other experts, or are the data-parallel ranks of this one. The result is a view where one rank
    has the whole matrix, to which the bias may not be added in place.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        bias: Any = self.bias
        bias.sequence_parallel = False

    def forward(self, input_: Tensor) -> Any:
        output, bias = super().forward(input_)
        return output.clone(), bias


def set_experts(layer: ModuleSpec) -> None:
    """Gives the experts of ``layer`` the classes above."""
    parts = layer.submodules.mlp.keywords["submodules"].experts.keywords["submodules"]
    parts.activation_func = ClampedGlu
    if parts.linear_fc2 is RowParallelLinear:
        parts.linear_fc2 = ExpertOutput


def with_sinks(
    sinks: Tensor, scale: float, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Arguments of attention ``[sequences, tokens, heads, head_dim]`` in which each query sees one
    more key, the first one, whose score is the sink of its head and whose value is 0.

    Two more dimensions of a head make that score: in a query both hold the sink, in that key they
    hold ``1 / scale`` and its rounding error. Without a mask a query is added in front too, so that
    causal attention stays what it was.
    """
    wanted = torch.tensor(1.0 / scale, dtype=torch.float64)
    rounded = wanted.to(key.dtype)
    parts = torch.stack([rounded, (wanted - rounded).to(key.dtype)]).to(key.device)
    size = query.shape[-1]
    column = sinks.to(query.dtype).view(-1, 1).expand(*query.shape[:-1], 2)
    query = torch.cat([query, column], -1)
    key, value = (torch.nn.functional.pad(x, (0, 2, 0, 0, 1, 0)) for x in (key, value))
    key[:, 0, :, size:] = parts
    if mask is None:
        return torch.nn.functional.pad(query, (0, 0, 0, 0, 1, 0)), key, value, None
    return query, key, value, torch.nn.functional.pad(mask, (1, 0), value=True)
