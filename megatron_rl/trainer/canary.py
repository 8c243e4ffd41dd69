"""Does the engine compute what the policy computes? A few fixed sequences, scored by both after a weight sync.

A digest proves that the bytes arrived. What an engine makes of them (fused, packed, quantised copies) shows only in its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_rl.data.packing import plan_microbatches
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.protocols import Policy, RolloutEngine
from megatron_rl.runtime.digest import WeightSyncError
from megatron_rl.runtime.launch import World
from megatron_rl.types import Prompt

NUM_SEQUENCES, MAX_TOKENS = 4, 64


def canary_sequences(prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """The ends of the first prompts that have something to predict. Raises ValueError when there is none."""
    found = [prompt.token_ids[-MAX_TOKENS:] for prompt in prompts if len(prompt.token_ids) > 1 and prompt.multimodal is None]
    if not found:
        raise ValueError(
            f"weight_sync.canary_every: none of the {len(prompts)} training prompts is text of two tokens; set it to 0, or mend data.train"
        )
    return found[:NUM_SEQUENCES]


class Canary:
    """Compares logprobs at temperature 1 of every token but the first of each sequence."""

    def __init__(
        self,
        policy: Policy,
        engine: RolloutEngine,
        world: World,
        sequences: Sequence[Sequence[int]],
        *,
        every: int,
        tolerance: float | None,
    ) -> None:
        """Due at the first sync and at every version that ``every`` divides. ``tolerance``: largest mean difference in nats; None: any."""
        self._policy, self._engine, self._world, self._sequences = policy, engine, world, sequences
        self._every, self._tolerance, self._first = every, tolerance, True

    def expected(self, version: int) -> Float[Tensor, " tokens"] | None:
        """Collective. What the policy says, equal on all ranks; None when no comparison is due. Needs the policy's weights."""
        due, self._first = self._first or version % self._every == 0, False
        if not due:
            return None
        lengths, policy = [len(tokens) for tokens in self._sequences], self._policy
        plan = plan_microbatches(
            lengths,
            range(len(lengths)),
            data_parallel_size=policy.data_parallel_size,
            tokens_per_microbatch=sum(lengths),
            multiple=policy.microbatch_multiple,
        )
        batch = sequence_batch([(tokens[:1], tokens[1:]) for tokens in self._sequences])
        return policy.logprobs(batch, plan[policy.data_parallel_rank], temperature=1.0).logprobs.cpu()

    def check(self, version: int, expected: Float[Tensor, " tokens"]) -> tuple[float, float]:
        """Collective. Every replica scores all sequences; returns mean and largest absolute difference over all tokens, in nats, each
        of the replica where it is largest. The mean is what is judged: nobody sampled these tokens, and rounding may be large at one
        that is improbable, while wrong weights differ everywhere.

        Raises:
            WeightSyncError: on every rank: the mean is above the tolerance, or not a number.
        """
        scored = torch.tensor([value for row in self._engine.score(self._sequences) for value in row])
        difference = (scored - expected).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        worst, place = difference.max(0)
        mine = (difference.mean().item(), self._engine.replica, worst.item(), scored[place].item(), expected[place].item())
        everyone = self._world.all_gather(mine)
        mean, replica, largest, engine_says, policy_says = max(everyone)
        if self._tolerance is not None and mean > self._tolerance:
            raise WeightSyncError(
                f"step {version}: after the weight sync rollout engine (replica {replica}) and policy differ by {mean:.3g} nats in the "
                f"logprob of a token on average, by {largest:.3g} at most ({engine_says:.4g} and {policy_says:.4g}), "
                f"weight_sync.canary_tolerance is {self._tolerance:g}. "
                "The engine does not hold the policy's weights, or computes another model; where both are right and only rounding "
                "differs, raise it"
            )
        return mean, max(worst for _, _, worst, _, _ in everyone)
