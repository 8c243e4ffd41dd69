"""What this project relies on in other packages and no import or call in its text shows: attributes
of objects whose class is not named there, words with a meaning, parameters of what another package
calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contract:
    """``path`` exists. ``parameters``: its call takes them by name. ``words``: these texts stand in
    its source."""

    path: str
    used: str  # file of this project that relies on it
    parameters: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


BROADCAST = "vllm.distributed.device_communicators.shm_broadcast"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
SCHEDULED = (
    "forward_step_func",
    "data_iterator",
    "model",
    "num_microbatches",
    "seq_length",
    "micro_batch_size",
    "forward_only",
)
LAYER = "megatron.core.transformer.transformer_layer.TransformerLayerSubmodules"
BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
FLOAT16 = "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params"
ENGINE = "transformer_engine.pytorch"

VLLM = (
    # What generation returns.
    Contract("vllm.outputs.RequestOutput.outputs", "engine/request_tracking.py"),
    Contract("vllm.outputs.RequestOutput.prompt_logprobs", "engine/engine.py"),
    Contract("vllm.outputs.RequestOutput.finished", "engine/request_tracking.py"),
    Contract("vllm.logprobs.FlatLogprobs.token_ids", "engine/request_tracking.py"),
    Contract("vllm.logprobs.FlatLogprobs.logprobs", "engine/request_tracking.py"),
    Contract("vllm.logprobs.Logprob.logprob", "engine/engine.py"),
    Contract("vllm.v1.engine.llm_engine.LLMEngine.step", "engine/request_tracking.py"),
    # Requests that are open: begun, looked at, dropped.
    Contract("vllm.LLM.enqueue", "engine/request_tracking.py"),
    Contract("vllm.v1.engine.llm_engine.LLMEngine.abort_request", "engine/request_tracking.py"),
    Contract(
        "vllm.v1.engine.output_processor.OutputProcessor.request_states",
        "engine/request_tracking.py",
    ),
    Contract(
        "vllm.v1.engine.detokenizer.IncrementalDetokenizer.num_output_tokens",
        "engine/request_tracking.py",
    ),
    Contract(
        "vllm.v1.engine.detokenizer.IncrementalDetokenizer.output_token_ids",
        "engine/request_tracking.py",
    ),
    Contract(
        "vllm.v1.engine.output_processor.RequestState.detokenizer", "engine/request_tracking.py"
    ),
    Contract(
        "vllm.v1.engine.output_processor.RequestState.logprobs_processor",
        "engine/request_tracking.py",
    ),
    Contract("vllm.v1.engine.logprobs.LogprobsProcessor.logprobs", "engine/request_tracking.py"),
    Contract("vllm.config.scheduler.SchedulerConfig.max_num_seqs", "engine/engine.py"),
    # Words in the arguments of the engine and of its commands.
    Contract("vllm.config.parallel", "engine/arguments.py", words=("external_launcher",)),
    Contract("vllm.config.quantization", "engine/arguments.py", words=("fp8_per_tensor",)),
    Contract(
        "vllm.config.model.LogprobsMode", "engine/arguments.py", words=("processed_logprobs",)
    ),
    Contract(
        "vllm.config.model.ModelConfig", "engine/engine.py", words=("vllm",)
    ),  # generation_config
    Contract(
        "vllm.v1.engine.PauseMode", "weight_sync/fleet/commands.py", words=("abort", "wait", "keep")
    ),
    Contract(
        "vllm.envs",
        "engine/side_effects.py",
        words=("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"),
    ),
    # Its own allocator: the parts that are woken one by one, and what each allocation tells.
    Contract("vllm.v1.worker.gpu_worker.Worker", "protocols.py", words=("weights", "kv_cache")),
    Contract("vllm.device_allocator.cumem.AllocationData.handle", "engine/engine.py"),
    Contract("vllm.device_allocator.cumem.AllocationData.is_asleep", "engine/engine.py"),
    # The processors of logits.
    Contract("vllm.config.vllm.VllmConfig.use_v2_model_runner", "engine/annealed.py"),
    Contract("vllm.config.model.ModelConfig.logits_processors", "engine/arguments.py"),
    Contract("vllm.sampling_params.SamplingParams.extra_args", "engine/annealed.py"),
    Contract("vllm.v1.worker.gpu.buffer_utils.UvaBackedTensor.gpu", "engine/annealed.py"),
    # The segment of the tensor-parallel group.
    Contract(
        BROADCAST + ".MessageQueue.buffer",
        "engine/side_effects.py",
    ),
    Contract(
        BROADCAST + ".ShmRingBuffer.is_creator",
        "engine/side_effects.py",
    ),
    Contract(
        BROADCAST + ".ShmRingBuffer.shared_memory",
        "engine/side_effects.py",
    ),
    # The worker into which the receiver of weights is mixed.
    Contract("vllm.config.vllm.VllmConfig.model_config", "engine/weights/worker.py"),
    Contract("vllm.config.vllm.VllmConfig.device_config", "engine/weights/worker.py"),
    Contract("vllm.config.model.ModelConfig.dtype", "engine/weights/worker.py"),
    Contract(
        "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo.load_numel",
        "engine/weights/worker.py",
    ),
    Contract(
        "vllm.model_executor.layers.linear.LinearBase.quant_method", "engine/weights/worker.py"
    ),
    Contract(
        "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm",
        "engine/weights/worker.py",
        words=(".cpu_linear",),
    ),
    Contract("vllm.config.model.ModelConfig.model", "engine/weights/transfer_backend.py"),
)

MEGATRON = (
    # Its schedules and what they call.
    Contract(
        SCHEDULES + ".forward_backward_no_pipelining",
        "policy/passes/forward.py",
        SCHEDULED,
    ),
    Contract(
        SCHEDULES + ".forward_backward_pipelining_without_interleaving",
        "policy/passes/forward.py",
        SCHEDULED,
    ),
    Contract(
        SCHEDULES + ".forward_backward_pipelining_with_interleaving",
        "policy/passes/forward.py",
        SCHEDULED,
    ),
    Contract(
        "megatron.core.models.gpt.GPTModel.forward",
        "policy/passes/forward.py",
        ("input_ids", "position_ids", "packed_seq_params"),
    ),
    Contract(
        "megatron.core.transformer.module.Float16Module.forward",
        "policy/passes/forward.py",
        ("fp32_output",),
    ),
    Contract(
        "megatron.core.model_parallel_config.ModelParallelConfig.finalize_model_grads_func",
        "policy/passes/forward.py",
    ),
    Contract(
        "megatron.core.model_parallel_config.ModelParallelConfig.no_sync_func",
        "policy/passes/forward.py",
    ),
    Contract(
        "megatron.core.model_parallel_config.ModelParallelConfig.grad_scale_func",
        "policy/passes/forward.py",
    ),
    # Layer specifications, whose parts are replaced.
    Contract(LAYER + ".input_layernorm", "policy/model.py"),
    Contract(LAYER + ".pre_mlp_layernorm", "policy/model.py"),
    Contract(LAYER + ".self_attention", "policy/model.py"),
    Contract(
        "megatron.core.transformer.attention.SelfAttentionSubmodules.core_attention",
        "policy/model.py",
    ),
    Contract(
        "megatron.core.transformer.attention.SelfAttentionSubmodules.q_layernorm", "policy/model.py"
    ),
    Contract(
        "megatron.core.transformer.attention.SelfAttentionSubmodules.k_layernorm", "policy/model.py"
    ),
    # Buffers of weights and gradients.
    Contract("megatron.core.distributed.DistributedDataParallel.buffers", "policy/optimizer.py"),
    Contract(
        "megatron.core.distributed.DistributedDataParallel.expert_parallel_buffers",
        "policy/optimizer.py",
    ),
    Contract("megatron.core.distributed.DistributedDataParallel.ddp_config", "policy/optimizer.py"),
    Contract(
        "megatron.core.distributed.DistributedDataParallel.param_to_bucket_group",
        "policy/passes/forward.py",
    ),
    Contract(
        BUFFERS + "._ParamAndGradBucketGroup.finish_param_sync",
        "policy/passes/forward.py",
        ("skip_next_bucket_dispatch",),
    ),
    Contract(BUFFERS + "._ParamAndGradBuffer.data_parallel_group", "policy/optimizer.py"),
    Contract(BUFFERS + "._ParamAndGradBuffer.buckets", "policy/optimizer.py"),
    Contract(BUFFERS + "._ParamAndGradBucket.grad_data", "policy/optimizer.py"),
    # Optimizers.
    Contract("megatron.core.optimizer.ChainedOptimizer.chained_optimizers", "policy/optimizer.py"),
    Contract("megatron.core.optimizer.MegatronOptimizer.get_parameters", "policy/optimizer.py"),
    Contract(DISTRIBUTED + ".is_stub_optimizer", "policy/optimizer.py"),
    Contract(
        "megatron.core.optimizer.OptimizerConfig.use_precision_aware_optimizer_no_fp8_or_ds_fp8",
        "policy/optimizer.py",
    ),
    Contract(
        DISTRIBUTED + ".sharded_state_dict",
        "policy/state/checkpoint.py",
        ("is_loading", "metadata"),
        ("distrib_optim_sharding_type",),
    ),
    Contract(DISTRIBUTED, "policy/state/checkpoint.py", words=("fully_reshardable",)),
    Contract(DISTRIBUTED + ".sharded_param_state_fully_reshardable", "policy/state/checkpoint.py"),
    Contract(DISTRIBUTED + "._get_main_param_and_optimizer_states", "policy/state/stored_state.py"),
    Contract(DISTRIBUTED + "._set_main_param_and_optimizer_states", "policy/state/stored_state.py"),
    Contract(DISTRIBUTED + ".gbuf_ranges", "policy/state/stored_state.py"),
    Contract(FLOAT16 + ".float16_groups", "policy/state/stored_state.py"),
    Contract(FLOAT16 + ".fp32_from_float16_groups", "policy/state/stored_state.py"),
    Contract(FLOAT16 + ".fp32_from_fp32_groups", "policy/state/stored_state.py"),
    Contract(
        "megatron.core.optimizer.ChainedOptimizer",
        "policy/state/checkpoint.py",
        words=("chained_optim_avoid_prefix",),
    ),
)

TRANSFORMER_ENGINE = (
    Contract(
        ENGINE + ".module.base.TransformerEngineBaseModule._fp8_workspaces",
        "policy/state/offload.py",
    ),
    Contract(
        ENGINE + ".module.base",
        "policy/precision.py",
        words=("_high_precision_init_val",),
    ),
    Contract(
        ENGINE + ".optimizers.FusedAdam.store_param_remainders",
        "policy/optimizer.py",
    ),
    Contract(
        ENGINE + ".optimizers.FusedAdam.initialize_state",
        "policy/optimizer.py",
        ("param", "store_param_remainders"),
    ),
)

CONTRACTS = (*VLLM, *MEGATRON, *TRANSFORMER_ENGINE)

# Classes of ours that become a base of a class of theirs.
MIXINS = {"WeightReceiver": "vllm.v1.worker.gpu_worker.Worker"}
# Functions that take any keyword and hand it on to the constructor of a class.
FORWARDED = {"vllm.entrypoints.llm.LLM": "vllm.engine.arg_utils.EngineArgs"}
# Functions of ours that take the place of theirs, and are called with their arguments.
STAND_INS = {
    (
        "policy/patches.py",
        "_maybe_numpy",
    ): "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
    (
        "policy/patches.py",
        "_cpu_rng_state",
    ): "megatron.core.tensor_parallel.random._get_cuda_rng_state",
    (
        "policy/patches.py",
        "_set_cpu_rng_state",
    ): "megatron.core.tensor_parallel.random._set_cuda_rng_state",
}
# What megatron-core names and Transformer Engine has not, in code that this project does not reach.
NOT_REACHED = {ENGINE + ".cpp_extensions has no rmsnorm_fwd": "layers for inference alone"}
