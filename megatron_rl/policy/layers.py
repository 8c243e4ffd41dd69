"""The layers of a model chunk: of Transformer Engine where that is there, else megatron's own."""

import math
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_rl.models import Architecture
from megatron_rl.models.parameter_map import LATENT_FUSED_NORMS
from megatron_rl.policy.hardware import this_machine
from megatron_rl.policy.passes.attention import (
    NormedAdd,
    PackedAttention,
    RMSNorm,
)
from megatron_rl.policy.passes.biased_experts import set_experts
from megatron_rl.policy.passes.latent_attention import LatentSelfAttention, WholeLinear
from megatron_rl.policy.passes.linear_attention import set_delta_net
from megatron_rl.policy.passes.self_attention import (
    NormedHeadsAttention,
    NormedTwoBasesAttention,
    TwoBasesAttention,
)


def block_spec(
    config: TransformerConfig, arch: Architecture, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of a chunk, and the norm behind the last one of the model."""
    first = get_transformer_layer_offset(config, vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    specs = {}
    kinds = list(map(arch.kind, range(arch.num_layers)))
    for has_experts, is_linear in set(kinds):
        experts = arch.num_experts if has_experts else None
        bare = bool(arch.adapter_slots) or not arch.input_norms
        layer, norm = layer_spec(config, experts, bare=bare)
        if not arch.input_norms:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
        if arch.output_norms:
            add = ModuleSpec(NormedAdd, params={"norm": norm, "config": config})
            layer.submodules.self_attn_bda = layer.submodules.mlp_bda = add
        if arch.biased:
            set_experts(layer)
        if arch.heads_norm:
            layer.submodules.self_attention.module = NormedHeadsAttention
        if arch.local_rope_theta is not None:
            attention = layer.submodules.self_attention
            attention.module = NormedTwoBasesAttention if arch.heads_norm else TwoBasesAttention
            attention.params["window_scale"] = 1 / math.sqrt(arch.query_scalar or arch.head_dim)
        if is_linear:
            set_delta_net(layer)
        specs[has_experts, is_linear] = layer
    layers = [specs[kind] for kind in kinds[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def layer_spec(
    config: TransformerConfig, experts: int | None, *, bare: bool = False
) -> tuple[ModuleSpec, Any]:
    """A layer of Transformer Engine where that is installed, else megatron's own; and its norm.

    The latter gets attention and norm of this package. ``experts``: None for a dense layer;
    ``bare``: linear layers have no norm inside.
    """
    qk_norm = config.qk_layernorm
    latent = config.multi_latent_attention
    if this_machine().transformer_engine is not None:
        # The module is there only with Transformer Engine.
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=qk_norm,
            multi_latent_attention=latent,
        )
        norm: Any = TENorm
        if bare:
            # There is no norm, or adapters want what comes behind it, which a fused layer keeps to
            # itself.
            layer.submodules.input_layernorm = norm
            attention = layer.submodules.self_attention.submodules
            if latent:
                attention.linear_q_up_proj = attention.linear_kv_up_proj = TEColumnParallelLinear
                attention.q_layernorm = attention.kv_layernorm = norm
            else:
                attention.linear_qkv = TEColumnParallelLinear
            if experts is None:  # else they have no adapters, and a norm of their own
                layer.submodules.pre_mlp_layernorm = norm
                layer.submodules.mlp.keywords["submodules"].linear_fc1 = TEColumnParallelLinear
    else:
        layer = get_gpt_layer_local_spec(
            num_experts=experts,
            qk_layernorm=qk_norm,
            multi_latent_attention=latent,
            normalization="RMSNorm",
        )
        norm = RMSNorm
        layer.submodules.input_layernorm = norm
        layer.submodules.pre_mlp_layernorm = norm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if latent:
            # In checkpoints norms have the names that they have in layers of Transformer Engine.
            layer.submodules.sharded_state_dict_keys_map = {
                name.removesuffix("weight"): fused.removesuffix("weight")
                for fused, name in LATENT_FUSED_NORMS.items()
            }
            attention.linear_q_down_proj = attention.linear_kv_down_proj = WholeLinear
            attention.q_layernorm = attention.kv_layernorm = norm
        elif qk_norm:
            attention.q_layernorm = norm
            attention.k_layernorm = norm
    if latent:
        layer.submodules.self_attention.module = LatentSelfAttention
    return layer, norm
