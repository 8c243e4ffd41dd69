"""megatron-core model chunks of an architecture, which end in hidden states."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.config.schema import ModelConfig, ParallelConfig, PrecisionConfig
from megatron_rl.models import Architecture
from megatron_rl.models.parameter_map import padded_vocab
from megatron_rl.policy.activations import selective_modules
from megatron_rl.policy.adapters import add_adapters
from megatron_rl.policy.hardware import this_machine
from megatron_rl.policy.layers import block_spec
from megatron_rl.policy.passes.biased_experts import bias_fields
from megatron_rl.policy.passes.latent_attention import set_packed_angles
from megatron_rl.policy.passes.linear_attention import linear_fields
from megatron_rl.policy.passes.vision import add_tower, embed, set_image_angles, set_tower_angles
from megatron_rl.policy.precision import model_fields


class HiddenStates(GPTModel):
    """A GPT whose last stage returns states instead of logits, whole on every tensor rank.

    They are ``[tokens, 1, hidden]``. The output layer keeps its weight but is not applied: logprobs
    need logits of response tokens alone, a chunk at a time.

    megatron-core 0.19 only fixes GPTModel and adds new architectures to HybridModel, whose layers
    are one sub-block each (a pattern of ``*``, ``-``, ``E``, ``G``). No other module names
    GPTModel. A move would need names and keys of checkpoints by sub-block (megatron reads those of
    a GPT into it), rotary positions of images, which HybridModel lacks, and a ``forward`` of our
    own, since HybridModel's has no methods to override before and after the layers.
    """

    embedding_scale = 1.0

    def _preprocess(
        self, *args: Any, packed_seq_params: Any = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """megatron's, with rotary angles by the ``positions`` of a packing that has them; of a
        vision-language model, with its positions and the features of its images."""
        has_images = self.position_embedding_type == "mrope"
        if has_images:
            kwargs["position_ids"] = packed_seq_params.rope_positions
            if self.pre_process:
                kwargs["decoder_input"] = embed(self, kwargs["input_ids"], packed_seq_params.images)
        found = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if self.pre_process and self.embedding_scale != 1.0:
            scale = torch.tensor(self.embedding_scale, dtype=found[0].dtype).item()
            found = (found[0] * scale, *found[1:])
        positions = getattr(packed_seq_params, "positions", None)
        if has_images or positions is None or found[1] is None:  # None: latent attention has them
            return found
        # The fused kernel counts positions from the boundaries of sequences, and would give wrong
        # angles to those that borrow their prompt.
        assert not self.config.apply_rope_fusion, "shared prompts need the rotary angles unfused"
        states, angles, *rest = found
        return states, angles.index_select(0, positions), *rest

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.post_process or not self.config.sequence_parallel:
            return hidden_states
        # The gradient of the logprobs is complete on every tensor rank, so that the backward must
        # split it, not reduce it.
        return gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
        )

    def head_weight(self) -> Tensor:
        """This rank's rows of the output layer (those of the embedding when they are tied)."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def gelu_tanh(gate: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh")


def fused_kernels(arch: Architecture) -> dict[str, Any]:
    """megatron's fused kernels: on with layers of Transformer Engine, off with megatron's own.

    The fused rotary kernel reads the boundaries of packed sequences on the device; the plain way
    fetches them to the host in every layer, and alone takes angles of every token (of images, and
    of latent attention).
    ``bias_activation_fusion`` is the activation between the matrices of the feed-forward part,
    which has a kernel for SiLU. The experts of a rank become one layer with numbered weights (see
    ``weights.GROUPED_EXPERT``). Gradients of matrices are added to ``main_grad`` by the product
    itself, without apex; with megatron's own layers on a GPU that takes apex.
    """
    on = this_machine().transformer_engine is not None
    experts = arch.num_experts > 0
    with_apex = torch.cuda.is_available() and layers._grad_accum_fusion_available
    return dict(
        apply_rope_fusion=on and not (arch.mrope_section or arch.latent),
        bias_activation_fusion=on and arch.activation == "silu",
        moe_permute_fusion=on and experts,
        moe_grouped_gemm=on and experts,
        gradient_accumulation_fusion=on or with_apex,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )


def one_length() -> bool:
    """Whether the micro-batches of a pass through a pipeline are padded to one length.

    With different lengths, stages announce each before its message, and megatron then stops the
    device. A CPU does not wait for that, and saves the padding, which changes the rounding of
    results: sums are split differently.
    """
    return torch.cuda.is_available()


def recomputation(
    arch: Architecture, parallel: ParallelConfig, precision: PrecisionConfig
) -> dict[str, Any]:
    """megatron's fields for ``parallel.recompute``."""
    if parallel.recompute == "none":
        return {}
    if parallel.recompute == "full":
        return dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    fused = this_machine().transformer_engine is not None
    delayed = precision.fp8 is not None and precision.fp8.recipe == "delayed"
    modules = selective_modules(arch.num_experts > 0, fused=fused, delayed_fp8=delayed)
    return dict(recompute_granularity="selective", recompute_modules=modules)


def expert_fields(arch: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    """megatron's fields for a model with experts.

    Raises:
        ValueError: gloo cannot run this layout.
    """
    fields: dict[str, Any] = dict(
        num_moe_experts=arch.num_experts,
        moe_router_topk=arch.experts_per_token,
        moe_ffn_hidden_size=arch.expert_ffn_hidden_size,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_pre_softmax=False,
        moe_router_dtype="fp32",
        moe_shared_expert_intermediate_size=arch.shared_ffn_hidden_size or None,
        moe_shared_expert_gate=arch.gated_outputs,
    )
    if arch.num_dense_layers:
        # A list: with it the layers of a checkpoint have keys of their own.
        fields["moe_layer_freq"] = [int(arch.has_experts(one)) for one in range(arch.num_layers)]
    if arch.sigmoid_router:
        fields |= dict(
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_topk_scaling_factor=arch.router_scale,
        )
    if arch.router_groups != (1, 1):
        fields["moe_router_num_groups"], fields["moe_router_group_topk"] = arch.router_groups
    if parallel.expert_tensor > 1 and not torch.cuda.is_available():
        # gloo has no all-gather of unequal sizes, which the other dispatcher needs. This one needs
        # micro-batches of one length, which a pipeline does not get.
        fields["moe_token_dispatcher_type"] = "allgather"
        if parallel.pipeline > 1:
            raise ValueError(
                f"parallel.expert_tensor = {parallel.expert_tensor}: without a GPU not together"
                f" with parallel.pipeline = {parallel.pipeline}; set one of them to 1"
            )
    return fields


def transformer_config(
    arch: Architecture, parallel: ParallelConfig, precision: PrecisionConfig
) -> TransformerConfig:
    """megatron's configuration for ``arch``."""
    on_cpu = not torch.cuda.is_available()
    fields: dict[str, Any] = dict(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        layernorm_zero_centered_gamma=arch.centered_norms,
        gated_linear_unit=True,
        activation_func=F.silu if arch.activation == "silu" else gelu_tanh,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        attention_output_gate=arch.gated_outputs,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.sequence,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        variable_seq_lengths=parallel.pipeline > 1 and not one_length(),
        # Batched point-to-point swaps the two messages between the two ranks of an interleaved
        # pipeline of two stages; unbatched and overlapped is right for every layout.
        batch_p2p_comm=False,
        overlap_p2p_comm=parallel.virtual_pipeline is not None,
        # Required for dense models too: megatron refuses its default with lengths that vary.
        moe_token_dispatcher_type="alltoall",
        mrope_section=list(arch.mrope_section) or None,
        calculate_per_token_loss=True,  # DDP reads it when it wraps a model
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        **fused_kernels(arch),
        **recomputation(arch, parallel, precision),
        **model_fields(precision, arch.num_experts),
    )
    if arch.num_experts:
        fields |= expert_fields(arch, parallel) | (bias_fields() if arch.biased else {})
    if arch.linear is not None:
        fields |= linear_fields(arch.linear)
    if arch.windowed:
        fields |= window_fields(arch, parallel)
    if arch.attention_factor != 1.0 or arch.query_scalar is not None:
        width = arch.query_scalar or arch.head_dim
        fields["softmax_scale"] = arch.attention_factor**2 / math.sqrt(width)
    if arch.latent is None:
        return TransformerConfig(**fields)
    return MLATransformerConfig(**fields, **latent_fields(arch))


def window_fields(arch: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    """megatron's fields for windows: how many tokens before itself a query sees, in which layers.

    Raises:
        ValueError: context ranks share sequences in layers of Transformer Engine.
    """
    if parallel.context > 1 and this_machine().transformer_engine is not None:
        raise ValueError(
            f"parallel.context = {parallel.context}: Transformer Engine has no windows over packed"
            " sequences that context ranks share; set it to 1"
        )
    layers = [int(has_window) for has_window in arch.windowed]
    return dict(window_size=(arch.window - 1, 0), window_attn_skip_freq=layers)


def latent_fields(arch: Architecture) -> dict[str, Any]:
    """megatron's fields for latent attention: its plain angles, whose frequencies are replaced by
    YaRN's later, and YaRN's factor of the scores, 1 where ``rotary_factor`` is 1."""
    assert arch.latent is not None
    return dict(
        q_lora_rank=arch.latent.query_rank,
        kv_lora_rank=arch.latent.rank,
        qk_head_dim=arch.latent.plain_dim,
        qk_pos_emb_head_dim=arch.latent.rotary_dim,
        v_head_dim=arch.latent.value_dim,
        rope_type="rope",
        rotary_base=arch.rope_theta,
        rotary_scaling_factor=arch.latent.rotary_factor,
        mscale_all_dim=arch.latent.softmax_factor,
    )


def keep_biases(model: torch.nn.Module) -> None:
    """Leaves the biases of routers in float32, and as they are: megatron would move them after
    every step, so that experts get equal loads."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.frozen_expert_bias = True
            module._maintain_float32_expert_bias()


def set_frequencies(angles: Any, arch: Architecture, hf: Any) -> None:
    """Sets scaled frequencies in place of megatron's plain ones, followed by those of the layers
    with windows where these differ: see ``TwoBasesAttention``."""
    if arch.rope_type != "default":
        rope = ROPE_INIT_FUNCTIONS[arch.rope_type]
        kind = None if arch.local_rope_theta is None else "full_attention"
        frequencies, attention_factor = rope(hf, torch.device("cpu"), layer_type=kind)
        assert attention_factor == arch.attention_factor, f"{arch.rope_type} scales attention"
        angles.inv_freq = frequencies
    if arch.local_rope_theta is not None:
        steps = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
        local = 1.0 / arch.local_rope_theta**steps
        angles.inv_freq = torch.cat([angles.inv_freq, local.to(angles.inv_freq.device)])


def build_chunks(
    config: TransformerConfig, arch: Architecture, hf: Any, settings: ModelConfig, max_tokens: int
) -> list[torch.nn.Module]:
    """This rank's model chunks, one for each virtual stage, in the precision of ``config``.

    Their weights are not set.
    """
    divisible_by = settings.make_vocab_divisible_by
    vocab_rows = padded_vocab(arch.vocab_size, divisible_by, config.tensor_model_parallel_size)
    virtual_stages = config.virtual_pipeline_model_parallel_size
    chunks: list[torch.nn.Module] = []
    for vp_stage in range(virtual_stages) if virtual_stages else [None]:
        place = dict(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
        model = HiddenStates(
            config=config,
            transformer_layer_spec=block_spec(config, arch, vp_stage),
            vocab_size=vocab_rows,
            max_sequence_length=max_tokens,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=arch.tied_embeddings,
            position_embedding_type="mrope" if arch.mrope_section else "rope",
            # Features of images take their places before the cut over tensor ranks.
            scatter_embedding_sequence_parallel=arch.vision is None,
            rotary_percent=arch.rotary_share,
            rotary_base=arch.rope_theta,
            vp_stage=vp_stage,
        )
        if arch.mrope_section:
            set_image_angles(model, arch.mrope_section, interleaved=arch.mrope_interleaved)
        if arch.vision is not None and model.pre_process:
            recompute = config.recompute_granularity is not None
            add_tower(model, hf, config, recompute=recompute, frozen=settings.freeze_vision)
        if arch.embedding_scale != 1.0:
            model.embedding_scale = arch.embedding_scale
        angles = set_packed_angles(model) if arch.latent else model.rotary_pos_emb
        set_frequencies(angles, arch, hf)
        if torch.cuda.is_available():
            model = model.cuda(torch.cuda.current_device())
        if arch.adapter_slots:
            add_adapters(model, arch, settings.lora.scale)
        chunks.append(Float16Module(config, model) if config.bf16 else model)
        keep_biases(model)
        if hasattr(model, "visual"):
            set_tower_angles(model.visual)
    return chunks
