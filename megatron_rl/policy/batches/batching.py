"""Packed micro-batches of this rank, made from rows of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.policy.batches.microbatches import Microbatch, Packer, padded_lengths
from megatron_rl.policy.batches.packing_plan import Plan, PlanRule, plan_microbatches
from megatron_rl.policy.parallel import Ranks
from megatron_rl.policy.passes.prefix_sharing import plan_shared_prompts
from megatron_rl.types import SequenceBatch, Sequences


class _OnDemand(Sequence[Microbatch]):
    """Micro-batches that are packed when first taken: a device then works on the ones before."""

    def __init__(self, pack: Callable[[int], Microbatch], count: int) -> None:
        self._pack = cache(pack)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        return self._pack(range(self._count)[number])


@dataclass(frozen=True)
class Batching:
    """Plans micro-batches for all data-parallel ranks alike, and packs those of this rank.
    Implements ``protocols.BatchSharding``."""

    config: TransformerConfig
    ranks: Ranks
    rule: PlanRule  # of the plans for all data-parallel ranks
    # Of this rank. Where it shares prompts or takes images, responses to a prompt are neighbors.
    packer: Packer

    @property
    def data_rank(self) -> int:
        return self.ranks.data_rank

    @property
    def owners(self) -> Sequence[int]:
        return self.ranks.replica_roots

    def plan(self, sequences: Sequences, rows: Sequence[int]) -> Plan:
        """See protocols.BatchSharding. A micro-batch may be empty.

        Raises:
            ValueError: a row alone has more tokens than a micro-batch may have.
        """
        return self._plan(sequences, rows, self.rule)

    def alone(self, sequences: Sequences) -> list[list[int]]:
        """Micro-batches of all rows for one data-parallel rank."""
        rule = replace(self.rule, data_parallel_size=1)
        return self._plan(sequences, range(sequences.num_responses), rule)[0]

    def _plan(self, sequences: Sequences, rows: Sequence[int], rule: PlanRule) -> Plan:
        has_images = self.packer.vision is not None and self.packer.vision.processor is not None
        if sequences.prompt_index is not None and (self.packer.share or has_images):
            return plan_shared_prompts(sequences, rows, rule, only_images=not self.packer.share)
        return plan_microbatches(sequences.lengths.tolist(), rows, rule)

    def give(self, values: Tensor) -> None:
        if self.ranks.replica_group is not None:
            dist.broadcast(values, self.owners[self.data_rank], group=self.ranks.replica_group)

    def packed(
        self, batch: SequenceBatch, microbatches: Sequence[Sequence[int]], *, prompts: bool = False
    ) -> Sequence[Microbatch]:
        """``microbatches`` (rows of ``batch``) as a pass takes them, each packed when it is first
        taken; ``prompts``: that of ``Packer.pack``. Collective where experts are dispatched by
        all-gather."""
        assert len(microbatches) % self.rule.multiple == 0, (
            f"{len(microbatches)} micro-batches do not form groups of {self.rule.multiple}"
        )
        totals = self._least_totals(batch, microbatches)
        vision = self.packer.vision
        if vision and vision.has_tower and vision.processor and batch.images is not None:
            rows = chain.from_iterable(microbatches)
            vision.processor.keep(chain.from_iterable(batch.images[row] for row in rows))
        pack = partial(self.packer.pack, batch, prompts=prompts)
        return _OnDemand(lambda at: pack(microbatches[at], totals[at]), len(microbatches))

    def _least_totals(
        self, batch: SequenceBatch, microbatches: Sequence[Sequence[int]]
    ) -> list[int]:
        """The packed length that each micro-batch is filled up to; 0 where any length will do."""
        totals = [0] * len(microbatches)
        if self.config.num_moe_experts and self.config.moe_token_dispatcher_type == "allgather":
            # This dispatcher gathers tokens of equal number from every rank.
            totals = self._packed_tokens(batch, microbatches)
            over_ranks = torch.tensor(totals, device=self.packer.device)
            dist.all_reduce(over_ranks, op=dist.ReduceOp.MAX)
            totals = over_ranks.tolist()
        if self.ranks.pipeline > 1 and not self.config.variable_seq_lengths:
            # Stages exchange tensors whose length both ends know: one length for all.
            longest = max(self._packed_tokens(batch, microbatches, at_least=max(totals, default=0)))
            totals = [longest] * len(microbatches)
        return totals

    def _packed_tokens(
        self, batch: SequenceBatch, microbatches: Sequence[Sequence[int]], at_least: int = 0
    ) -> list[int]:
        packer = self.packer
        return [
            int(padded_lengths(batch, rows, packer.multiples, at_least, packer.share).sum())
            for rows in microbatches
        ]
