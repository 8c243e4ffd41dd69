"""From rows of a batch to the packed micro-batches of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.policy.microbatches import Microbatch, Multiples, Packer, padded_lengths
from megatron_rl.policy.packing_plan import plan_microbatches
from megatron_rl.policy.parallel import Ranks
from megatron_rl.policy.prefix_sharing import plan_shared_prompts
from megatron_rl.policy.vision import Eyes
from megatron_rl.types import SequenceBatch


@dataclass(frozen=True)
class Batching:
    """Plans micro-batches for all data-parallel ranks alike, and packs those of this rank.

    Attributes:
        tokens_per_microbatch: most tokens (prompt + response) of one micro-batch.
        prefix_sharing: neighbors with the same ``prompt_index`` compute their prompt once.
        multiple: the number of micro-batches of a pass is a multiple of this.
        multiples: what packed lengths must divide by.
        eyes: of a model that sees.
    """

    config: TransformerConfig
    ranks: Ranks
    tokens_per_microbatch: int
    prefix_sharing: bool
    multiple: int
    multiples: Multiples
    device: torch.device
    eyes: Eyes | None = None

    def plan(self, batch: SequenceBatch, rows: Sequence[int]) -> list[list[int]]:
        """The micro-batches of this data-parallel rank, each a list of rows; one may be empty.

        Every rank plans for all of them, from lengths that all know: no message is needed.

        Raises:
            ValueError: a row alone has more tokens than a micro-batch may have.
        """
        sizes = dict(
            data_parallel_size=self.ranks.data,
            tokens_per_microbatch=self.tokens_per_microbatch,
            multiple=self.multiple,
        )
        if self.prefix_sharing and batch.prompt_index is not None:
            by_rank = plan_shared_prompts(batch, rows, **sizes)
        else:
            by_rank = plan_microbatches(batch.lengths.tolist(), rows, **sizes)
        return by_rank[self.ranks.data_rank]

    def packed(
        self, batch: SequenceBatch, microbatches: Sequence[Sequence[int]]
    ) -> list[Microbatch]:
        """``microbatches`` (rows of ``batch``) as a pass takes them. Collective where experts are
        dispatched by all-gather."""
        assert len(microbatches) % self.multiple == 0, (
            f"{len(microbatches)} micro-batches do not form groups of {self.multiple}"
        )
        totals = self._least_totals(batch, microbatches)
        ranks = self.ranks
        packer = Packer(
            self.multiples,
            ranks.context_rank,
            ranks.context,
            self.device,
            self.prefix_sharing,
            self.eyes,
        )
        return [
            packer.pack(batch, rows, total)
            for rows, total in zip(microbatches, totals, strict=True)
        ]

    def _least_totals(
        self, batch: SequenceBatch, microbatches: Sequence[Sequence[int]]
    ) -> list[int]:
        """The packed length that each micro-batch is filled up to; 0 where any length will do."""
        totals = [0] * len(microbatches)
        if self.config.num_moe_experts and self.config.moe_token_dispatcher_type == "allgather":
            # This dispatcher gathers tokens of equal number from every rank.
            totals = self._packed_tokens(batch, microbatches)
            over_ranks = torch.tensor(totals, device=self.device)
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
        return [
            int(padded_lengths(batch, rows, self.multiples, at_least, self.prefix_sharing).sum())
            for rows in microbatches
        ]
