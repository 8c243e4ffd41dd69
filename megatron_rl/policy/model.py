"""From an architecture to megatron-core model chunks that end in hidden states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.config.schema import ParallelConfig, PrecisionConfig
from megatron_rl.policy.activations import selective_modules
from megatron_rl.policy.attention import PackedAttention, Packing, RMSNorm
from megatron_rl.policy.families import Architecture
from megatron_rl.policy.layout import padded_vocab
from megatron_rl.policy.machine import this_machine
from megatron_rl.policy.precision import model_fields


class HiddenStates(GPTModel):
    """A GPT whose last stage returns ``[tokens, 1, hidden]`` states, whole on every tensor rank, instead of logits.

    The output layer keeps its weight but is not applied: the log-probability of response tokens needs it for a few rows only.
    """

    def _preprocess(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """megatron's, with the rotary angles of every packed token by its position where boundaries cannot tell them."""
        decoder_input, angles, *rest = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if isinstance(packed_seq_params, Packing) and packed_seq_params.positions is not None:
            # The fused kernel counts positions from the boundaries, and would take the wrong angles.
            assert not self.config.apply_rope_fusion, "shared prompts need the rotary angles unfused"
            angles = angles.index_select(0, packed_seq_params.positions)
        return decoder_input, angles, *rest

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.post_process or not self.config.sequence_parallel:
            return hidden_states
        # The gradient that comes back is complete on every tensor rank, hence split (not reduced) by the backward.
        return gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp)

    def head_weight(self) -> Tensor:
        """This rank's rows of the output layer (those of the embedding when they are tied)."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def fused_kernels(experts: bool) -> dict[str, Any]:
    """megatron's fused kernels: on with layers of Transformer Engine, off with megatron's own, which are plain torch.

    Rotary angles are then applied by a kernel that reads the boundaries of packed sequences on the
    device, context parallel or not; the plain way fetches them to the host in every layer.
    ``bias_activation_fusion`` is the activation between the matrices of the feed-forward part. The
    experts of a rank are one layer with numbered weights (see ``weights.GROUPED_EXPERT``).
    """
    on = this_machine().transformer_engine is not None
    return dict(
        apply_rope_fusion=on,
        bias_activation_fusion=on,
        moe_permute_fusion=on and experts,
        moe_grouped_gemm=on and experts,
        # The head is megatron's own layer with any specification, and would need apex for this.
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )


def one_length() -> bool:
    """Whether the micro-batches of a pass through a pipeline are packed to one length.

    Of different lengths, stages tell each other each before its message, and megatron stops the
    device there. A CPU does not wait for that, and saves the padding, which changes results by their
    rounding: sums are split up differently.
    """
    return torch.cuda.is_available()


def recomputation(arch: Architecture, parallel: ParallelConfig, precision: PrecisionConfig) -> dict[str, Any]:
    """megatron's fields for ``parallel.recompute``."""
    if parallel.recompute == "none":
        return {}
    if parallel.recompute == "full":
        return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    fused = this_machine().transformer_engine is not None
    delayed = precision.fp8 is not None and precision.fp8.recipe == "delayed"
    modules = selective_modules(arch.num_experts > 0, fused=fused, delayed_fp8=delayed)
    return dict(recompute_granularity="selective", recompute_modules=modules)


def transformer_config(arch: Architecture, parallel: ParallelConfig, precision: PrecisionConfig) -> TransformerConfig:
    """megatron's configuration for ``arch``. ``calculate_per_token_loss`` is set here because DDP reads it when it wraps."""
    on_cpu = not torch.cuda.is_available()
    interleaved = parallel.virtual_pipeline is not None
    fields: dict[str, Any] = dict(
        num_layers=arch.num_layers, hidden_size=arch.hidden_size, num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads, kv_channels=arch.head_dim, ffn_hidden_size=arch.ffn_hidden_size,
        normalization="RMSNorm", layernorm_epsilon=arch.norm_eps, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, add_qkv_bias=arch.qkv_bias, qk_layernorm=arch.qk_norm, attention_dropout=0.0, hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor, pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline, context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert, expert_tensor_parallel_size=parallel.expert_tensor or 1,
        sequence_parallel=parallel.sequence, num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        # Batched point-to-point swaps the two messages between the two ranks of an interleaved pipeline of two stages; unbatched
        # and overlapped is right for every layout.
        variable_seq_lengths=parallel.pipeline > 1 and not one_length(), batch_p2p_comm=False, overlap_p2p_comm=interleaved,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True, use_cpu_initialization=on_cpu, perform_initialization=False,
        **fused_kernels(arch.num_experts > 0), **recomputation(arch, parallel, precision), **model_fields(precision, arch.num_experts),
    )  # fmt: skip
    if arch.num_experts:
        fields |= dict(
            num_moe_experts=arch.num_experts, moe_router_topk=arch.experts_per_token, moe_ffn_hidden_size=arch.expert_ffn_hidden_size,
            moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, moe_router_pre_softmax=False, moe_router_dtype="fp32",
        )  # fmt: skip
        if (parallel.expert_tensor or 1) > 1 and on_cpu:
            fields["moe_token_dispatcher_type"] = "allgather"  # gloo has no all-gather of unequal sizes
    return TransformerConfig(**fields)


def layer_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Transformer Engine's layers where it is installed, else megatron's own with attention and norm of this package."""
    experts, qk_norm = config.num_moe_experts, config.qk_layernorm
    if this_machine().transformer_engine is not None:
        from megatron.core.extensions.transformer_engine import TENorm  # absent without Transformer Engine

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=qk_norm
        )
        norm: Any = TENorm
    else:
        layer = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, qk_layernorm=qk_norm, normalization="RMSNorm")
        norm = RMSNorm
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = norm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        if qk_norm:
            attention.q_layernorm = attention.k_layernorm = norm
    layers = [layer] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def build_chunks(config: TransformerConfig, arch: Architecture, hf: Any, divisible_by: int, max_tokens: int) -> list[torch.nn.Module]:
    """This rank's model chunks (one a virtual stage), weights not set, in the precision of ``config``."""
    chunks: list[torch.nn.Module] = []
    stages = config.virtual_pipeline_model_parallel_size
    for vp_stage in range(stages) if stages else [None]:
        place = dict(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
        model = HiddenStates(
            config=config,
            transformer_layer_spec=layer_spec(config, vp_stage),
            vocab_size=padded_vocab(arch.vocab_size, divisible_by, config.tensor_model_parallel_size),
            max_sequence_length=max_tokens,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=arch.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
            vp_stage=vp_stage,
        )
        if arch.rope_type != "default":
            frequencies, attention_factor = ROPE_INIT_FUNCTIONS[arch.rope_type](hf, torch.device("cpu"))
            assert attention_factor == 1.0, f"rope type {arch.rope_type} scales attention by {attention_factor}"
            model.rotary_pos_emb.inv_freq = frequencies
        if torch.cuda.is_available():
            model = model.cuda(torch.cuda.current_device())
        chunks.append(Float16Module(config, model) if config.bf16 else model)
    return chunks


__all__ = ["HiddenStates", "ModuleSpec", "build_chunks", "layer_spec", "transformer_config"]
