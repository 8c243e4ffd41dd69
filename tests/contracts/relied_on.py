"""What this project relies on in other packages and no import or call in its text shows: attributes
of objects whose class is not named there, parameters of what another package calls.

Never run: the type checker reads it with the sources of these packages (test_contracts.py).
"""

from __future__ import annotations

from typing import Any

from megatron.core.distributed.param_and_grad_buffer import (
    _ParamAndGradBucket,
    _ParamAndGradBucketGroup,
    _ParamAndGradBuffer,
)
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from transformer_engine.pytorch.optimizers import FusedAdam
from vllm import LLM
from vllm.config.model import ModelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.vllm import VllmConfig
from vllm.device_allocator.cumem import AllocationData
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, ShmRingBuffer
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from megatron_rl.policy.model import HiddenStates


def what_generation_returns(output: RequestOutput, flat: FlatLogprobs, one: Logprob) -> Any:
    return (
        output.outputs,
        output.finished,
        output.prompt_logprobs,
        flat.token_ids,
        flat.logprobs,
        (one.logprob),
    )


def requests_that_are_open(
    llm: LLM, engine: LLMEngine, processor: OutputProcessor, state: RequestState
) -> Any:
    return (
        llm.enqueue,
        engine.step,
        engine.abort_request,
        processor.request_states,
        (
            state.detokenizer,
            state.logprobs_processor,
        ),
    )


def tokens_so_far(detokenizer: IncrementalDetokenizer, logprobs: LogprobsProcessor) -> Any:
    return detokenizer.num_output_tokens, detokenizer.output_token_ids, logprobs.logprobs


def experts_of_tokens(state: RequestState, output: CompletionOutput) -> Any:
    return state.routed_experts_chunks, output.routed_experts


def experts_in_the_cache(runner: GPUModelRunner, batch: InputBatch, table: BlockTable) -> Any:
    places = batch.req_id_to_index, batch.block_table.block_tables, table.block_table.np
    return runner.input_batch, runner.kv_cache_config.num_blocks, table.block_size, places


def configurations(config: VllmConfig, model: ModelConfig, scheduler: SchedulerConfig) -> Any:
    of_worker = config.model_config, config.device_config, model.dtype, model.model
    return of_worker, config.use_v2_model_runner, model.logits_processors, scheduler.max_num_seqs


def memory_of_the_engine(data: AllocationData, queue: MessageQueue, ring: ShmRingBuffer) -> Any:
    return data.handle, data.is_asleep, queue.buffer, ring.is_creator, ring.shared_memory


def processors_of_logits(params: SamplingParams, tensor: UvaBackedTensor) -> Any:
    return params.extra_args, tensor.gpu


def the_worker_that_receives_weights(worker: Worker, layer: LayerReloadingInfo) -> Any:
    worker.model_runner.reload_weights(weights_iterator=iter(()))
    return worker.reload_weights, worker.device, worker.vllm_config, layer.load_numel


def schedules_and_what_they_call(any: Any, group: _ParamAndGradBucketGroup) -> None:
    for schedule in (
        forward_backward_no_pipelining,
        forward_backward_pipelining_without_interleaving,
        forward_backward_pipelining_with_interleaving,
    ):
        schedule(
            forward_step_func=any,
            data_iterator=any,
            model=any,
            num_microbatches=any,
            seq_length=any,
            micro_batch_size=any,
            forward_only=any,
        )
    HiddenStates.forward(
        any, input_ids=any, position_ids=any, attention_mask=any, packed_seq_params=any
    )
    Float16Module.forward(any, fp32_output=any)
    group.finish_param_sync(skip_next_bucket_dispatch=any)


def hooks_of_schedules(config: ModelParallelConfig) -> Any:
    return config.finalize_model_grads_func, config.no_sync_func, config.grad_scale_func


def parts_of_layers(layer: TransformerLayerSubmodules, attention: SelfAttentionSubmodules) -> Any:
    norms = layer.input_layernorm, layer.pre_mlp_layernorm
    return (
        norms,
        layer.self_attention,
        attention.core_attention,
        (
            attention.q_layernorm,
            attention.k_layernorm,
        ),
    )


def buffers_of_gradients(buffer: _ParamAndGradBuffer, bucket: _ParamAndGradBucket) -> Any:
    return buffer.data_parallel_group, buffer.buckets, bucket.grad_data


def optimizers(
    chain: ChainedOptimizer, plain: MegatronOptimizer, half: Float16OptimizerWithFloat16Params
) -> Any:
    groups = half.float16_groups, half.fp32_from_float16_groups, half.fp32_from_fp32_groups
    return groups, chain.chained_optimizers, plain.get_parameters


def distributed_optimizer(part: DistributedOptimizer, config: OptimizerConfig, any: Any) -> Any:
    part.sharded_state_dict(any, is_loading=any, metadata=any)
    states = part._get_main_param_and_optimizer_states, part._set_main_param_and_optimizer_states
    stored = part.gbuf_ranges, part.sharded_param_state_fully_reshardable, part.is_stub_optimizer
    return states, stored, config.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def optimizer_of_transformer_engine(adam: FusedAdam, any: Any) -> Any:
    adam.initialize_state(param=any, store_param_remainders=any)
    return adam.store_param_remainders
