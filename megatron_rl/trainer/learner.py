"""The learning half of a step: from the responses of a rollout to optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.loss import Method
from megatron_rl.protocols import Policy
from megatron_rl.rollouts.experience import Experience
from megatron_rl.rollouts.metrics import credit_metrics, token_metrics, update_metrics
from megatron_rl.runtime.launch import World
from megatron_rl.signals.end_token import EndTokens, with_end_token
from megatron_rl.signals.histories import Histories
from megatron_rl.signals.masked_images import mask_seed, with_masked_images
from megatron_rl.trainer.health import Health, Minibatch
from megatron_rl.trainer.objective import MinibatchLoss, credit_of, on_cpu
from megatron_rl.trainer.placement import Placed, Placement
from megatron_rl.types import TokenScores, UpdateResult


@dataclass(frozen=True)
class MinibatchPlan:
    """How a rollout is cut into optimizer steps: whole groups, ``prompts_per_minibatch`` at a time,
    ``epochs_per_rollout`` times."""

    prompts_per_minibatch: int
    epochs_per_rollout: int
    seed: int

    def is_single(self, experience: Experience) -> bool:
        """Whether the whole rollout is one minibatch, seen once."""
        return self.epochs_per_rollout == 1 and experience.num_groups <= self.prompts_per_minibatch

    def minibatches(self, step: int, experience: Experience) -> Iterator[list[int]]:
        """Kept rows of each minibatch, equal on every rank; later epochs go through the groups in a
        fresh seeded order."""
        assert experience.credit is not None, "rows are dropped by the credit: call score first"
        keep = experience.credit.keep
        order = torch.arange(experience.num_groups)
        for epoch in range(self.epochs_per_rollout):
            if epoch > 0:
                # A hash of integers is the same in every process, unlike that of a text.
                seed = hash((self.seed, step, epoch)) % 2**63
                generator = torch.Generator().manual_seed(seed)
                order = torch.randperm(experience.num_groups, generator=generator)
            for groups in order.split(self.prompts_per_minibatch):
                members = torch.isin(experience.group_ids, groups)
                yield (members & keep).nonzero().flatten().tolist()


@dataclass(frozen=True)
class Learner:
    """Scores a rollout and trains on it.

    ``update_matches_score``: the policy's updates compute logprobs in the number format of its
    scores, so that those of an update's own forward may stand in for a pass of their own.
    ``histories``: what the method remembers of prompts; those of the checkpoints.
    """

    policy: Policy
    method: Method
    health: Health
    plan: MinibatchPlan
    placement: Placement
    update_matches_score: bool
    histories: Histories = field(default_factory=Histories)

    def score(self, experience: Experience) -> Experience:
        """Collective: brings tokens to their owners, and adds the credit and the reference and old
        logprobs that are needed.

        What comes back without old logprobs is ``on_policy``: decided here and nowhere else.
        """
        needs = self.method.needs
        experience = self.placement.at_home(experience)
        if needs.ref_logprobs:
            experience = replace(experience, ref=self._scores(experience, reference=True))
        experience = self._with_masks(experience)
        if needs.response_statistics:  # the credit is computed from old logprobs
            experience = replace(experience, old=self._scores(experience))
        credit = credit_of(experience, self.method, self._world, self.histories)
        experience = replace(experience, credit=credit)
        if needs.response_statistics or self._update_gives_old_logprobs(experience):
            return experience
        return replace(experience, old=self._scores(experience))

    def _with_masks(self, experience: Experience) -> Experience:
        """Collective where the method asks, before the updates, how likely the responses are behind
        masked images."""
        needs = self.method.needs
        if needs.mask_ratio is None:
            return experience
        seed = mask_seed(self.plan.seed, experience.step)
        experience = replace(experience, mask_seed=seed)
        if needs.masked_in_update:
            return experience
        assert experience.share is not None
        share = with_masked_images(experience.share, needs.mask_ratio, seed)
        return replace(experience, masked=on_cpu(self.policy.score(share)))

    @property
    def _world(self) -> World:
        return self.placement.world

    def _update_gives_old_logprobs(self, experience: Experience) -> bool:
        """Whether the step has one update, over all rows: its forward is the pass that old logprobs
        would need. (Metrics want the old logprobs of rows without an update too.)"""
        assert experience.credit is not None
        every_row = bool(experience.credit.keep.all())
        return self.update_matches_score and self.plan.is_single(experience) and every_row

    def _scores(self, experience: Experience, *, reference: bool = False) -> TokenScores:
        assert experience.share is not None
        asked = {"reference": reference}
        if self.method.needs.prompt_logprobs and not reference:
            asked["prompts"] = True
        return on_cpu(self.policy.score(experience.share, **asked))

    def update(self, step: int, experience: Experience) -> dict[str, float]:
        """Collective: one optimizer step per minibatch; minibatches whose rows were all dropped are
        skipped. Returns the metrics of the scored experience and its updates.

        Raises:
            NonFiniteError: too many optimizer steps in a row were skipped.
            ValueError: sampler and trainer disagree more than ``mismatch_limits`` allows.
        """
        updates: list[UpdateResult] = []
        num_empty = 0
        for number, rows in enumerate(self.plan.minibatches(step, experience), start=1):
            if not rows:
                # Rows are equal on every rank, so all of them skip the collectives below.
                num_empty += 1
                continue
            placed = self.placement.lent(experience, rows)
            # Each of these three may be a pass of the policy: every rank runs them in this order.
            sums = self._log_ratio_sums(experience, placed)
            looked_at = replace(
                experience,
                log_ratio_sums=sums,
                peaks=self._peaks(placed),
                end_start=self._end_start(placed, rows, len(experience.responses)),
            )
            minibatch = Minibatch(step, number, looked_at, rows)
            self.health.before(minibatch)
            loss = MinibatchLoss(self.method, minibatch.experience, rows, placed.tokens)
            share = loss.share(placed.share)
            result = self.policy.update(share, loss, with_scores=experience.on_policy)
            # Without the scores of what ``loss.share`` has added.
            result = loss.of_responses(result)
            self.health.after(minibatch, result)
            updates.append(result)
        updated = update_metrics(updates)
        old = _old_scores(experience, updates)
        of_tokens = token_metrics(experience, old, self._world)
        self.health.check_mismatch(step, of_tokens, skipped=updated.get("optim/skipped", 0) > 0)
        return {
            **credit_metrics(experience),
            **updated,
            "optim/empty_minibatches": num_empty,
            **of_tokens,
        }

    def _log_ratio_sums(self, experience: Experience, placed: Placed) -> Tensor | None:
        """Collective: how far the policy has moved from the old one on each response of a
        minibatch, by a pass of its own, where the method reads it."""
        if not self.method.needs.log_ratio_sums:
            return None
        num_rows = len(experience.responses)
        if experience.on_policy:
            # Before the only update of a step the policy is still the old one.
            return torch.zeros(num_rows, dtype=torch.float64)
        logprobs = on_cpu(self.policy.score(placed.share)).logprobs.numpy()
        moved = logprobs - placed.tokens.columns["old_logprobs"]
        # [rows of the experience]; 0 of those that the minibatch has not.
        return self.placement.response_sums(placed, moved, num_rows)

    def _peaks(self, placed: Placed) -> Tensor | None:
        """Collective: where the policy is most uncertain in a minibatch, by a pass of its own,
        where the method reads it. Every rank is told the entropy of every token."""
        if not self.method.needs.nucleus:
            return None
        entropies = on_cpu(self.policy.score(placed.share, nucleus=True)).nucleus_entropy
        assert entropies is not None
        everything = self.placement.of_all_tokens(entropies)
        starts = self.histories.starts
        # The first minibatch of a run has no start yet, and sets it: the anchor is the last of
        # four.
        peaks = self.method.peaks(everything, starts.get("peak_entropy"))
        starts["peak_entropy"] = peaks[3].item()
        return peaks

    def _end_start(self, placed: Placed, rows: Sequence[int], num_rows: int) -> Tensor | None:
        """Collective before the first update: how likely the token after a response was at the
        start of the run, where the method reads it."""
        token_id = self.method.needs.end_token
        if token_id is None:
            return None
        starts = self.histories.starts
        if "end_logprob" not in starts:
            tokens = placed.tokens
            is_end = EndTokens.of(tokens.lengths).is_end
            scores = on_cpu(self.policy.score(with_end_token(placed.share, token_id)))
            # At the first token of each response, so that the sum over it is the number itself.
            values = np.zeros(int(tokens.lengths.sum()), dtype=np.float32)
            values[tokens.offsets[:-1]] = scores.logprobs[is_end].numpy()
            sums = self.placement.response_sums(placed, values, num_rows)
            starts["end_logprob"] = sums[list(rows)].mean().item()
        return torch.tensor(starts["end_logprob"], dtype=torch.float64)


def _old_scores(experience: Experience, updates: Sequence[UpdateResult]) -> TokenScores:
    """Those of the experience; of its only update where that is on-policy."""
    if experience.old is not None:
        return experience.old
    (update,) = updates
    assert update.scores is not None, "protocols.Policy.update returns the scores it is asked for"
    return on_cpu(update.scores)
