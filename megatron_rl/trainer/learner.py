"""The learning half of a step: from the responses of a rollout to optimizer steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_rl.loss import Credit, Method, ResponseBatch
from megatron_rl.passes import EXPERTS, Output, TokenScores, UpdateResult
from megatron_rl.protocols import Policy, Teacher
from megatron_rl.rollouts.rows.experience import Experience
from megatron_rl.rollouts.rows.metrics import credit_metrics, token_metrics, update_metrics
from megatron_rl.signals import Signals, StepView
from megatron_rl.trainer.health import Health, Minibatch
from megatron_rl.trainer.minibatch_loss import MinibatchLoss
from megatron_rl.trainer.placement import Placed, Placement


@dataclass(frozen=True)
class MinibatchPlan:
    """How a rollout is cut into optimizer steps: whole groups, ``prompts_per_minibatch`` at a time,
    ``epochs_per_rollout`` times."""

    prompts_per_minibatch: int
    epochs_per_rollout: int
    seed: int

    def minibatches(self, step: int, experience: Experience) -> Iterator[list[int]]:
        """Kept rows of each minibatch, equal on every rank; later epochs go through the groups in a
        fresh seeded order."""
        assert experience.credit is not None, "rows are dropped by the credit: call score first"
        keep = experience.credit.keep
        order = torch.arange(experience.responses.num_groups)
        for epoch in range(self.epochs_per_rollout):
            if epoch > 0:
                # A hash of integers is the same in every process, unlike that of a text.
                generator = torch.Generator().manual_seed(hash((self.seed, step, epoch)) % 2**63)
                order = torch.randperm(experience.responses.num_groups, generator=generator)
            for groups in order.split(self.prompts_per_minibatch):
                yield (torch.isin(experience.group_ids, groups) & keep).nonzero().flatten().tolist()


@dataclass(frozen=True)
class Learner:
    """Scores a rollout and trains on it."""

    policy: Policy
    method: Method
    signals: Signals  # of the method; their state is part of checkpoints
    health: Health
    plan: MinibatchPlan
    placement: Placement
    # Updates compute logprobs in the same number format as ``Policy.score``, so an update's own
    # forward can replace a pass for the old logprobs.
    update_matches_score: bool
    # Updates route tokens to the experts chosen in the pass that gives the old logprobs.
    records_experts: bool = False
    teachers: Sequence[Teacher] = ()  # those of ``model.teacher``

    def score(self, experience: Experience) -> Experience:
        """Collective: brings tokens to their owners, and adds the credit, what the method reads of
        the step, and the reference and old logprobs that are needed.

        An experience returned without old logprobs is ``on_policy``: decided here, nowhere else.
        """
        experience = self.placement.to_owners(experience)
        if self.signals.needs("ref"):
            experience = replace(experience, ref=self._scores(experience, reference=True))
        if self.signals.needs("old"):  # the credit is computed from old logprobs
            experience = self._with_old(experience)
        view = self.view(experience)
        of_tokens, columns = self.signals.after_rollout(view)
        experience = replace(experience, token_columns=of_tokens, columns=columns)
        credit = self._credit(experience)
        for signal in self.signals.members:
            signal.after_credit(view, credit)
        experience = replace(experience, credit=credit)
        if experience.old is not None or self._update_gives_old_logprobs(experience):
            return experience
        return self._with_old(experience)

    def view(
        self,
        experience: Experience,
        placed: Placed | None = None,
        rows: Sequence[int] | None = None,
    ) -> StepView:
        """What signals get to see of ``rows``; None: of all rows."""
        if placed is None or rows is None:
            assert experience.local is not None
            placed = Placed(experience.scored_tokens, experience.local)
            rows = range(len(experience.responses))
        tokens = placed.tokens.columns
        ranks = self.placement
        return StepView(
            experience, rows, placed.local, tokens, self.policy, ranks, teachers=self.teachers
        )

    def _credit(self, experience: Experience) -> Credit:
        """Collective where the method reads tokens: advantages, KL weights and kept rows."""
        return self.method.credit(
            ResponseBatch(
                rewards=self._shaped_rewards(experience),
                correct=experience.correct,
                group_ids=experience.group_ids,
                response_tokens=experience.loss_tokens,
                columns=experience.columns,
            )
        )

    def _shaped_rewards(self, experience: Experience) -> Float[Tensor, " responses"]:
        """Where the method reads token ids, each owner shapes the rewards of its rows."""
        lengths = experience.loss_tokens
        if not self.method.reads_token_ids:
            return self.method.shape_rewards(experience.rewards, lengths, experience.truncated)
        tokens = experience.responses.tokens
        here = torch.from_numpy(tokens.rows)
        shaped = self.method.shape_rewards(
            experience.rewards[here],
            lengths[here],
            experience.truncated[here],
            torch.from_numpy(tokens.columns["token_ids"]),
        )
        return self.view(experience).of_all_rows({"rewards": shaped})["rewards"]

    def _update_gives_old_logprobs(self, experience: Experience) -> bool:
        """Whether the step has one update, over all rows: its forward is the pass that old logprobs
        would need. (Metrics want the old logprobs of rows without an update too.)"""
        assert experience.credit is not None
        every_row = bool(experience.credit.keep.all())
        one_minibatch = experience.responses.num_groups <= self.plan.prompts_per_minibatch
        seen_once = one_minibatch and self.plan.epochs_per_rollout == 1
        return self.update_matches_score and seen_once and every_row

    def _with_old(self, experience: Experience) -> Experience:
        scores = self._scores(experience)
        columns = dict(scores.columns)
        experts = columns.pop(EXPERTS, None)
        experience = replace(experience, old=TokenScores(scores.logprobs, columns))
        return experience if experts is None else experience.with_experts(experts)

    def _scores(self, experience: Experience, *, reference: bool = False) -> TokenScores:
        assert experience.local is not None
        outputs = () if reference else tuple(self.signals.score_outputs)
        if self.records_experts and not reference:
            outputs = (*outputs, Output(EXPERTS))
        return self.policy.score(experience.local, outputs, reference=reference).map(Tensor.cpu)

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
            placed = self.placement.rebalanced_for(experience, rows)
            view = self.view(experience, placed, rows)
            # A signal may run a pass of the policy: every rank calls them in the same order.
            columns = {**experience.columns, **self.signals.before_minibatch(view)}
            minibatch = Minibatch(step, number, replace(experience, columns=columns), rows)
            self.health.before(minibatch)
            result = self._update(minibatch, placed)
            self.health.after(minibatch, result)
            updates.append(result)
        updated = update_metrics(updates)
        old = experience.old
        if old is None:  # the step had one update, which returned the scores it was asked for
            (update,) = updates
            assert update.scores is not None
            old = update.scores.map(Tensor.cpu)
        of_tokens = token_metrics(experience, old, self.placement.world)
        self.health.check_mismatch(step, of_tokens, skipped=updated.get("optim/skipped", 0) > 0)
        updated["optim/empty_minibatches"] = num_empty
        return {**credit_metrics(experience), **updated, **of_tokens}

    def _update(self, minibatch: Minibatch, placed: Placed) -> UpdateResult:
        """Collective: one optimizer step; returns the old scores too if no pass computed them."""
        experience = minibatch.experience
        loss = MinibatchLoss(
            self.method, self.signals, experience, minibatch.rows, placed.tokens, placed.local
        )
        scores = self.signals.score_outputs if experience.on_policy else None
        result = self.policy.update(loss.batch, loss, self.signals.update_outputs, scores=scores)
        # Drops the scores of sequences that signals have added to the batch.
        return loss.of_responses(result)
