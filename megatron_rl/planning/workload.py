"""The workload of a rank: tokens that it processes at a time, and sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.rules.layout_rules import replica_ranks
from megatron_rl.config.schema import Config
from megatron_rl.policy.batches.work_model import WorkModel
from megatron_rl.policy.passes.logprobs import LOGPROB_CHUNK_TOKENS


@dataclass(frozen=True)
class Workload:
    """The numbers that decide activations, logits and the share of the optimizer.

    Attributes:
        tokens_per_microbatch: the largest micro-batch of a data-parallel rank.
        tokens_per_minibatch: all its sequences at their longest.
        fused: layers of Transformer Engine.
        num_kept: most tokens that the sampler keeps for each of a response.
    """

    world_size: int
    tokens_per_microbatch: int
    tokens_per_minibatch: int
    logprob_chunk_tokens: int
    make_vocab_divisible_by: int
    fused: bool
    keep_reference: bool = False
    freeze_vision: bool = False
    num_kept: int = 0


def workload(
    config: Config, world_size: int, *, work: WorkModel, fused: bool, keep_reference: bool
) -> Workload:
    """The workload of a run of ``config`` on ``world_size`` ranks. ``work``: that of the policy's
    plans."""
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
    return Workload(
        world_size=world_size,
        tokens_per_microbatch=min(batch.tokens_per_microbatch, times * most_tokens),
        tokens_per_minibatch=times * sequences * longest,
        logprob_chunk_tokens=LOGPROB_CHUNK_TOKENS,
        num_kept=max(config.rollout.top_k, 0),
        make_vocab_divisible_by=config.model.make_vocab_divisible_by,
        fused=fused,
        keep_reference=keep_reference,
        freeze_vision=config.model.freeze_vision,
    )


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt with the longest response."""
    return config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
