"""Does the engine compute what the policy does? Some sequences, scored by both after a sync.

A digest proves that the bytes arrived. What an engine makes of them (fused, packed, quantized
copies) shows only in its numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_rl.data.sequences import sequence_batch
from megatron_rl.errors import WeightSyncError
from megatron_rl.passes import TokenScores
from megatron_rl.runtime.launch import World
from megatron_rl.types import Image, Prompt, SequenceBatch, SyncReport

NUM_SEQUENCES = 4
MAX_TOKENS = 64
# Collective: the policy's scores at temperature 1, whatever it trains with.
ScoreBatch = Callable[[SequenceBatch], TokenScores]


class Scoring(Protocol):
    """What is asked of the engine; see ``protocols.RolloutEngine``."""

    @property
    def replica(self) -> int: ...

    def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[float]]: ...


@dataclass(frozen=True)
class CheckSequence:
    """Tokens after the first ``num_context`` are compared; the places of ``images`` stand before.

    Example: ``CheckSequence((5, 7, 9))`` compares 7 and 9.
    """

    token_ids: Sequence[int]
    num_context: int = 1
    images: tuple[Image, ...] = ()


def check_sequences(
    prompts: Sequence[Prompt], image_token_id: int | None = None
) -> list[CheckSequence]:
    """The ends of the first prompts with something to predict. Up to half are whole prompts with
    images: only these show a stale vision tower. Raises ValueError where there are none."""
    texts = [
        CheckSequence(prompt.token_ids[-MAX_TOKENS:])
        for prompt in prompts
        if len(prompt.token_ids) > 1 and not prompt.images
    ]
    pictures = [
        CheckSequence(prompt.token_ids, _last(prompt.token_ids, image_token_id) + 1, prompt.images)
        for prompt in prompts
        if prompt.images and prompt.token_ids[-1] != image_token_id
    ]
    if not texts and not pictures:
        raise ValueError(
            f"weight_sync.logprob_check_every: none of the {len(prompts)} training prompts has two"
            " text tokens; set it to 0 or fix data.train"
        )
    return [*pictures[: NUM_SEQUENCES // 2], *texts][:NUM_SEQUENCES]


def _last(token_ids: Sequence[int], wanted: int | None) -> int:
    """The last index of ``wanted``."""
    return max(place for place, token in enumerate(token_ids) if token == wanted)


@dataclass
class LogprobCheck:
    """Compares logprobs at temperature 1 of the tokens of each sequence behind its context.

    Due at the first sync, at version 1 and whenever version % ``every`` == 0.
    ``tolerance``: largest mean difference in nats; None: any.
    """

    score: ScoreBatch
    engine: Scoring
    world: World
    sequences: Sequence[CheckSequence]
    every: int
    tolerance: float | None
    _is_first: bool = field(default=True, init=False)

    def expected(self, version: int) -> Float[Tensor, " tokens"] | None:
        """Collective. The policy's logprobs of the compared tokens, equal on all ranks; None when
        no comparison is due. Needs the policy's weights on the device."""
        # Version 1 is the first after an update: new adapters are zero and change nothing before.
        is_due = self._is_first or version == 1 or version % self.every == 0
        self._is_first = False
        if not is_due:
            return None
        rows = self.sequences
        pairs = [
            (row.token_ids[: row.num_context], row.token_ids[row.num_context :]) for row in rows
        ]
        return self.score(sequence_batch(pairs, images=[row.images for row in rows])).logprobs.cpu()

    def check(self, report: SyncReport, expected: Float[Tensor, " tokens"]) -> SyncReport:
        """Collective. The engine scores all sequences; returns the report with mean and largest
        absolute difference over all tokens, in nats, each of the replica where it is worst.

        Only the mean is compared with the tolerance: one improbable token may differ by rounding,
        wrong weights shift all.

        Raises:
            WeightSyncError: on every rank: the mean is above the tolerance, or not a number.
        """
        ids = [one.token_ids for one in self.sequences]
        rows = self.engine.score(ids, [one.images for one in self.sequences])
        # The engine scores all tokens but the first: the logprob of token n is number n - 1.
        wanted = [row[one.num_context - 1 :] for one, row in zip(self.sequences, rows, strict=True)]
        scored = torch.tensor(list(chain.from_iterable(wanted)))
        difference = (scored - expected).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        place = difference.argmax()
        values = (difference.mean(), difference[place], scored[place], expected[place])
        mean, *at_worst = (value.item() for value in values)
        of_all = self.world.all_gather((mean, self.engine.replica, *at_worst))
        # Tuples are compared by their first value, the mean: the replica where it is worst.
        mean, replica, largest, engine_says, policy_says = max(of_all)
        if self.tolerance is not None and mean > self.tolerance:
            raise WeightSyncError(
                f"step {report.version}: after the weight sync rollout engine (replica {replica})"
                f" and policy differ by {mean:.3g} nats in the logprob of a token on average, by"
                f" {largest:.3g} at most ({engine_says:.4g} and {policy_says:.4g}),"
                f" weight_sync.logprob_check_tolerance is {self.tolerance:g}. The engine does not"
                " hold the policy's weights, or computes another model; where both are right and"
                " only rounding differs, raise it"
            )
        largest = max(largest for _, _, largest, _, _ in of_all)
        return replace(report, logprob_check_diff=mean, logprob_check_diff_max=largest)
