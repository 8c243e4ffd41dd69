"""What megatron's latent attention lacks for packed sequences, and without Transformer Engine."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor


class LatentSelfAttention(MLASelfAttention):
    """megatron's, with the norms that its specification has: megatron's own would put a norm before
    the queries of a model that computes them from hidden states (Moonlight)."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return vars(submodules)


class WholeLinear(torch.nn.Module):
    """A matrix that every tensor rank has whole, as Transformer Engine's layers have it here.

    megatron's own would be cut over the ranks, and its result gathered. Under sequence parallelism
    each rank has its part of the tokens, so that gradients are summed over ranks.
    """

    def __init__(self, inputs: int, outputs: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        weight = torch.empty(outputs, inputs, dtype=config.params_dtype)
        self.weight: Any = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, states: Tensor) -> tuple[Tensor, None]:
        return F.linear(states, self.weight), None


class PackedAngles(RotaryEmbedding):
    """Rotary angles of every packed token, by its position: the layer would choose them by
    boundaries, which it fetches to the host. Not with context ranks: they have parts of sequences.
    """

    positions: Tensor | None = None

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> int:
        """megatron asks for it before each call."""
        self.positions = packed_seq_params.all_positions if self.cp_group.size() == 1 else None
        return packed_seq_params.max_seqlen_q

    def forward(self, max_seq_len: int, **options: Any) -> Tensor:
        angles = super().forward(max_seq_len, **options)
        return angles if self.positions is None else angles.index_select(0, self.positions)


def set_packed_angles(model: torch.nn.Module) -> PackedAngles:
    """Gives all layers of ``model`` one set of angles; returns it."""
    layers = [each for each in model.modules() if isinstance(each, LatentSelfAttention)]
    config = layers[0].config
    angles = PackedAngles(
        config.qk_pos_emb_head_dim,
        rotary_percent=1.0,
        rotary_base=config.rotary_base,
        use_cpu_initialization=config.use_cpu_initialization,
        cp_group=layers[0].pg_collection.cp,
    )
    for layer in layers:
        layer.rotary_pos_emb = angles
    return angles
