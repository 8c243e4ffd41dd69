"""Memory of a rank of each pipeline stage, in bytes, before anything is built.

Weights, gradients and optimizer are exact sums over the parameters of a stage. Activations are what
a layer saves for its backward with fused attention. FP8 layers keep bfloat16 weights and copies of
them in FP8. On the host of a CUDA device, page-locked copies of the policy count exactly: they are
made in blocks that lose less than 128 KiB for each tensor.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_rl.config.model_config import ITEM_BYTES
from megatron_rl.config.rules.engine_checks import token_bytes
from megatron_rl.config.rules.layout_rules import replica_ranks, stage_layers
from megatron_rl.config.schema import Config, ParallelConfig, PrecisionConfig, RolloutConfig
from megatron_rl.models import Architecture
from megatron_rl.models.experts import expert_width
from megatron_rl.models.parameter_map import padded_vocab
from megatron_rl.planning.engine_memory import EngineMemory, engine_memory
from megatron_rl.planning.parameter_counts import Counts, is_layer_matrix, is_trained, stage_counts
from megatron_rl.policy.activations import (
    FLOAT32_BYTES,
    layer_activations,
    run_again_activations,
    tower_activations,
    tower_block,
)
from megatron_rl.policy.batches.work_model import WorkModel
from megatron_rl.policy.passes.logprobs import LOGPROB_CHUNK_TOKENS

_FP8_COPIES = 2  # of one byte: by rows for the forward, by columns for the backward
# Weight and both moments; a weight in another format is written from the float32 one.
_CHECKPOINT_BYTES = 3 * FLOAT32_BYTES


@dataclass(frozen=True)
class Workload:
    """The numbers that decide activations, logits and the share of the optimizer."""

    world_size: int
    tokens_per_microbatch: int  # the largest micro-batch of a data-parallel rank
    tokens_per_minibatch: int  # all its sequences at their longest
    logprob_chunk_tokens: int
    make_vocab_divisible_by: int
    fused: bool  # layers of Transformer Engine
    keep_reference: bool = False
    freeze_vision: bool = False
    # Most tokens that the sampler keeps for each of a response, and those a loss reads beside it.
    num_kept: int = 0
    tokens_per_step: int = 0  # most of a step that a rank holds


@dataclass(frozen=True, kw_only=True)
class StageMemory(EngineMemory):
    """Bytes on one rank of a pipeline stage, by purpose: those of the policy, and its engine's."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int  # the live chunk, the kept tokens and the head's gradient of one micro-batch
    # The starting weights, on the host (a pass with them borrows the gradients' memory).
    reference: int
    fp8_copies: int  # copies of weights that FP8 layers keep between passes
    checkpoint_copy: int  # this rank's share of a checkpoint, on the host while threads write it
    # On the host, those that are replayed for the tokens of a step, and those that the engine keeps
    # for the tokens in its cache.
    experts: int
    teacher: int = 0  # weights of the largest one, on the device while it scores
    teacher_copies: int = 0  # those of all, on the host


def plan(
    arch: Architecture,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    rollout: RolloutConfig,
    load: Workload,
    device_gib: float,
) -> list[StageMemory]:
    """Memory of a rank of each pipeline stage."""
    engine = engine_memory(arch, rollout, device_gib)
    item_bytes = ITEM_BYTES[precision.params]
    gradient_bytes = FLOAT32_BYTES if precision.grad_reduce_in_float32 else item_bytes
    # The head's gradient is summed in float32: where gradients are, or it needs memory of its own.
    head_bytes = item_bytes if precision.grad_reduce_in_float32 else FLOAT32_BYTES
    numbers = partial(stage_counts, arch, parallel, load.make_vocab_divisible_by)
    trained = numbers(partial(is_trained, arch=arch, freeze_vision=load.freeze_vision))
    matrices = numbers(is_layer_matrix)
    layers = stage_layers(arch, parallel)
    stages = []
    for stage, (count, learning) in enumerate(zip(numbers(), trained, strict=True)):
        activations = _activation_bytes(arch, parallel, stage, item_bytes, load)
        activations += _vision_bytes(arch, parallel, stage, item_bytes, load)
        activations += _expert_bytes(arch, parallel, stage, rollout, load)
        stages.append(
            StageMemory(
                **vars(engine),
                stage=stage,
                weights=count.total * item_bytes,
                gradients=learning.total * gradient_bytes,
                optimizer=_optimizer_bytes(learning, parallel, precision, load.world_size),
                activations=activations,
                logits=_logit_bytes(arch, parallel, stage, load, head_bytes),
                # Of what is trained: the rest is the same in the policy.
                reference=learning.total * item_bytes * load.keep_reference,
                fp8_copies=_fp8_copy_bytes(matrices[stage].total, stage, layers, precision),
                checkpoint_copy=_checkpoint_bytes(
                    learning if arch.adapter_slots else count, learning, parallel, item_bytes, load
                ),
                experts=_held_experts(arch, rollout, engine.kv_cache, load),
            )
        )
    return stages


def _optimizer_bytes(
    count: Counts, parallel: ParallelConfig, precision: PrecisionConfig, world_size: int
) -> int:
    """Two moments of each parameter, and the float32 weights next to bfloat16 ones."""
    state_bytes = 2 * ITEM_BYTES[precision.adam_moments]
    if precision.params == "bfloat16":
        state_bytes += FLOAT32_BYTES
    if not parallel.distributed_optimizer:
        return state_bytes * count.total
    return state_bytes * _share(count, parallel, world_size)


def _share(count: Counts, parallel: ParallelConfig, world_size: int) -> int:
    """The part of one rank where data-parallel ranks share evenly."""
    # Context ranks hold the same weights as data ranks do, and share the work with them.
    ranks = world_size // (parallel.tensor * parallel.pipeline)
    expert_ranks = world_size // (parallel.expert_tensor * parallel.expert * parallel.pipeline)
    return math.ceil(count.dense / ranks) + math.ceil(count.experts / expert_ranks)


def _checkpoint_bytes(
    count: Counts, learning: Counts, parallel: ParallelConfig, item_bytes: int, load: Workload
) -> int:
    """Bytes that a rank copies to write its share of a checkpoint in the background."""
    all_of_them = _share(count, parallel, load.world_size)
    trained = _share(learning, parallel, load.world_size)
    frozen = all_of_them - trained  # weights alone
    size = _CHECKPOINT_BYTES * trained + item_bytes * frozen
    if load.keep_reference:
        size += item_bytes * trained
    return size


def _activation_bytes(
    arch: Architecture, parallel: ParallelConfig, stage: int, item_bytes: int, load: Workload
) -> int:
    """Bytes at the fullest moment of the schedule; at most those of the whole minibatch."""

    def of_a_layer(tokens: int) -> int:
        return layer_activations(arch, parallel, tokens, item_bytes, load.fused)

    tokens = math.ceil(load.tokens_per_microbatch / parallel.context)
    minibatch_tokens = math.ceil(load.tokens_per_minibatch / parallel.context)
    layers = stage_layers(arch, parallel)[stage]
    scheduled = live_layers(parallel, stage, layers) * of_a_layer(tokens)
    kept = min(scheduled, layers * of_a_layer(minibatch_tokens))
    return kept + run_again_activations(arch, parallel, tokens, item_bytes, load.fused)


def _vision_bytes(
    arch: Architecture, parallel: ParallelConfig, stage: int, item_bytes: int, load: Workload
) -> int:
    """Tower of the images in flight, and pixels of a micro-batch, as if all tokens were of images.

    Every context rank encodes the images of a sequence that it holds a part of.
    """
    if stage > 0 or arch.vision is None:
        return 0
    live = live_first_chunks(parallel) * load.tokens_per_microbatch
    tokens = min(live, load.tokens_per_minibatch)
    frozen = load.freeze_vision or bool(arch.adapter_slots)
    patches = load.tokens_per_microbatch * arch.vision.merge**2
    pixels = FLOAT32_BYTES * arch.vision.patch_numbers * patches
    kept = tower_activations(arch.vision, parallel, tokens, item_bytes, frozen=frozen)
    if parallel.recompute == "none" and not frozen:
        return pixels + kept
    return pixels + kept + tower_block(arch.vision, load.tokens_per_microbatch, item_bytes)


def live_first_chunks(parallel: ParallelConfig) -> int:
    """Micro-batches whose backward through the first chunk of the first stage is still to come, at
    most. See ``live_layers``; an interleaved schedule runs groups of one micro-batch a stage
    through each chunk in turn.

    Example: 4 stages of 2 chunks run 2 * 3 + 4 + 1 = 11 chunks ahead. Of each 8 the first 4 are
    first chunks: 4 of the first 8, and 3 of the last 3.
    """
    stages = parallel.pipeline
    chunks = parallel.virtual_pipeline or 1
    if chunks == 1:
        return stages
    chunks_ahead = 2 * (stages - 1) + (chunks - 1) * stages + 1
    rounds, rest = divmod(chunks_ahead, stages * chunks)
    return rounds * stages + min(rest, stages)


def live_layers(parallel: ParallelConfig, stage: int, layers: int) -> int:
    """Layers of ``stage`` times micro-batches whose backward is still to come, at most.

    One forward one backward runs ``stages - stage`` micro-batches ahead. The interleaved schedule
    runs ``2 (stages - stage - 1) + (chunks - 1) stages`` chunks ahead, and one more.
    """
    stages = parallel.pipeline
    chunks = parallel.virtual_pipeline or 1
    if chunks == 1:
        return (stages - stage) * layers
    chunks_ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    return math.ceil(chunks_ahead * layers / chunks)


def _logit_bytes(
    arch: Architecture, parallel: ParallelConfig, stage: int, load: Workload, gradient_bytes: int
) -> int:
    """The live chunk of logits, the tokens that the sampler kept, and the gradient of the head of
    one micro-batch: on the last stage only."""
    if stage < parallel.pipeline - 1:
        return 0
    rows = padded_vocab(arch.vocab_size, load.make_vocab_divisible_by, parallel.tensor)
    tokens = math.ceil(load.tokens_per_microbatch / parallel.context)
    chunk_tokens = min(load.logprob_chunk_tokens, tokens)
    # 32-bit ids of the micro-batch; of a chunk two 64-bit copies, and their logits twice.
    kept = load.num_kept * (4 * tokens + 24 * chunk_tokens)
    # Logits are [chunk_tokens, rows of this rank], the gradient [rows of this rank, hidden_size].
    row_bytes = FLOAT32_BYTES * chunk_tokens
    if not arch.adapter_slots:  # a frozen head has no gradient
        row_bytes += gradient_bytes * arch.hidden_size
    return kept + (rows // parallel.tensor) * row_bytes


def _expert_bytes(
    arch: Architecture, parallel: ParallelConfig, stage: int, rollout: RolloutConfig, load: Workload
) -> int:
    """Replayed experts on the device: of the micro-batches that are on their way, and the record of
    an old-policy pass."""
    if rollout.router_replay == "none":
        return 0
    tokens = (parallel.pipeline - stage) * load.tokens_per_microbatch
    if rollout.router_replay == "old_policy":
        tokens += load.tokens_per_step
    return tokens * expert_width(arch)


def _held_experts(arch: Architecture, rollout: RolloutConfig, cache: int, load: Workload) -> int:
    """``cache``: bytes of keys and values."""
    if rollout.router_replay == "none":
        return 0
    # Twice: as they were and on their way to other ranks, or as the step's and the minibatch's.
    tokens = 2 * load.tokens_per_step
    if rollout.router_replay == "rollout":
        tokens += cache // token_bytes(rollout, arch)
    return tokens * expert_width(arch)


def _fp8_copy_bytes(
    matrices: int, stage: int, layers: list[int], precision: PrecisionConfig
) -> int:
    """Bytes of the FP8 copies that Transformer Engine keeps between passes.

    ``matrices``: numbers in the weights of this stage's layers; ``layers``: of each stage. Weights
    that are kept in FP8 themselves have no copies: both forms are the weight, and count as its
    bfloat16. Scales are not counted (of mxfp8, the most: a 32nd).
    """
    fp8 = precision.fp8
    if fp8 is None or fp8.param_gather:
        return 0
    # Layers of this stage: those at both ends of the model stay in bfloat16.
    in_fp8 = layers[stage]
    if stage == 0:
        in_fp8 -= fp8.num_layers_at_start_in_bf16
    if stage == len(layers) - 1:
        in_fp8 -= fp8.num_layers_at_end_in_bf16
    return _FP8_COPIES * matrices * max(0, in_fp8) // layers[stage]


def workload(
    config: Config, world_size: int, *, work: WorkModel, fused: bool, keep_reference: bool
) -> Workload:
    """Of a run of ``config`` on ``world_size`` ranks. ``work``: that of the policy's plans."""
    batch = config.batch
    longest = longest_sequence(config)
    sequences = batch.prompts_per_minibatch * batch.responses_per_prompt
    data_ranks = world_size // replica_ranks(config.parallel)
    # Sequences are dealt to the ranks by their work, so that a rank may get one more than its even
    # share of the longest ones, or more tokens of short ones: a token of those is less work. It
    # gets no more than there are.
    most_work = (math.ceil(sequences / data_ranks) + 1) * int(work.work(np.array([longest]))[0])
    most_tokens = min(sequences * longest, most_work)
    times = config.method.sequences_per_response
    of_step = math.ceil(batch.prompts_per_step * batch.responses_per_prompt / data_ranks)
    return Workload(
        world_size=world_size,
        tokens_per_microbatch=min(batch.tokens_per_microbatch, times * most_tokens),
        tokens_per_minibatch=times * sequences * longest,
        logprob_chunk_tokens=LOGPROB_CHUNK_TOKENS,
        num_kept=max(config.rollout.top_k, 0) + config.method.tokens_beside,
        tokens_per_step=of_step * longest,
        make_vocab_divisible_by=config.model.make_vocab_divisible_by,
        fused=fused,
        keep_reference=keep_reference,
        freeze_vision=config.model.freeze_vision,
    )


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt with the longest response."""
    return config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
