"""Does the engine compute what the policy computes? A few fixed sequences, scored by both after a
weight sync.

A digest proves that the bytes arrived. What an engine makes of them (fused, packed, quantized
copies) shows only in its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_rl.data.sequences import sequence_batch
from megatron_rl.errors import WeightSyncError
from megatron_rl.protocols import RolloutEngine, WeightSync
from megatron_rl.runtime.launch import World
from megatron_rl.types import Prompt, SequenceBatch, SyncReport, TokenScores

NUM_SEQUENCES = 4
MAX_TOKENS = 64
# Collective: the policy's scores at temperature 1, whatever it trains with.
ScoreBatch = Callable[[SequenceBatch], TokenScores]


def check_sequences(prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """The ends of the first prompts that have something to predict. Raises ValueError when there is
    none."""
    sequences = [
        prompt.token_ids[-MAX_TOKENS:]
        for prompt in prompts
        if len(prompt.token_ids) > 1 and not prompt.images
    ]
    if not sequences:
        raise ValueError(
            f"weight_sync.logprob_check_every: none of the {len(prompts)} training prompts has two"
            " text tokens; set it to 0 or fix data.train"
        )
    return sequences[:NUM_SEQUENCES]


class LogprobCheck:
    """Compares logprobs at temperature 1 of every token but the first of each sequence."""

    def __init__(
        self,
        score: ScoreBatch,
        engine: RolloutEngine,
        world: World,
        sequences: Sequence[Sequence[int]],
        *,
        every: int,
        tolerance: float | None,
    ) -> None:
        """Due at the first sync and whenever version % ``every`` == 0. ``tolerance``: largest mean
        difference in nats; None: any."""
        self._score = score
        self._engine = engine
        self._world = world
        self._sequences = sequences
        self._every = every
        self._tolerance = tolerance
        self._first = True

    def expected(self, version: int) -> Float[Tensor, " tokens"] | None:
        """Collective. What the policy says, equal on all ranks; None when no comparison is due.
        Needs the policy's weights."""
        due = self._first or version % self._every == 0
        self._first = False
        if not due:
            return None
        batch = sequence_batch([(tokens[:1], tokens[1:]) for tokens in self._sequences])
        return self._score(batch).logprobs.cpu()

    def check(self, version: int, expected: Float[Tensor, " tokens"]) -> tuple[float, float]:
        """Collective. The engine scores all sequences; returns mean and largest absolute difference
        over all tokens, in nats, each of the replica where it is worst.

        Only the mean is compared with the tolerance: one improbable token may differ by rounding,
        wrong weights shift all.

        Raises:
            WeightSyncError: on every rank: the mean is above the tolerance, or not a number.
        """
        rows = self._engine.score(self._sequences)
        scored = torch.tensor([value for row in rows for value in row])
        difference = (scored - expected).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        worst, place = difference.max(0)
        of_replica = (
            difference.mean().item(),
            self._engine.replica,
            worst.item(),
            scored[place].item(),
            expected[place].item(),
        )
        of_all = self._world.all_gather(of_replica)
        mean, replica, largest, engine_says, policy_says = max(of_all)
        if self._tolerance is not None and mean > self._tolerance:
            raise WeightSyncError(
                f"step {version}: after the weight sync rollout engine (replica {replica}) and"
                f" policy differ by {mean:.3g} nats in the logprob of a token on average, by"
                f" {largest:.3g} at most ({engine_says:.4g} and {policy_says:.4g}),"
                f" weight_sync.logprob_check_tolerance is {self._tolerance:g}. The engine does not"
                " hold the policy's weights, or computes another model; where both are right and"
                " only rounding differs, raise it"
            )
        return mean, max(largest for _, _, largest, _, _ in of_all)


class CheckedSync:
    """A weight sync with the logprob check behind it: a difference is a failed sync."""

    def __init__(self, sync: WeightSync, logprob_check: LogprobCheck) -> None:
        self.inner = sync
        self._check = logprob_check

    def sync(self, version: int) -> SyncReport:
        """Collective. The engine can score when the inner sync returns.

        Raises:
            WeightSyncError: as the inner sync, and on every rank when the two sides differ.
        """
        # The policy scores first: its weights may be off the device when the engine is awake.
        expected = self._check.expected(version)
        report = self.inner.sync(version)
        if expected is None:
            return report
        mean, largest = self._check.check(version, expected)
        return replace(report, logprob_check_diff=mean, logprob_check_diff_max=largest)
