"""Partial rollouts by the engines of the training processes: a step ends when it has its groups,
and what has not ended goes on in the next one with its tokens, sampled by its weights.

Which groups a step trains, and which tokens of which weights they have, follows from the lengths of
responses alone (``scheduling/partial.py``): the same bits for any timing and any number of
replicas. A response goes on as a prompt with tokens behind it, so that keys and values are those of
the weights that sample what follows. Sampler logprobs and versions of all its tokens are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.rollouts.annealed import sampling_of_step
from megatron_rl.rollouts.exchange import token_rows, token_versions
from megatron_rl.rollouts.experience import Experience, Responses
from megatron_rl.rollouts.metrics import Clock
from megatron_rl.rollouts.ownership import Ranks
from megatron_rl.rollouts.partial_dispatch import PartialOrder, PartialOutcome
from megatron_rl.rollouts.partial_groups import Answer, PartialGroups, cut
from megatron_rl.rollouts.rollouts import Sampler, sampling_seed
from megatron_rl.rollouts.step_end import StepEnd
from megatron_rl.rollouts.streaming import Replica
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Sampling, Score, VersionSpan

Row = tuple[int, int]  # a group and a response of it


@dataclass(frozen=True)
class Fact:
    """A response that is trained, but for its tokens, which ``holder`` has."""

    holder: int
    truncated: bool
    spans: tuple[VersionSpan, ...]
    score: Score


@dataclass(frozen=True)
class PartialRollouts:
    """In the place of ``Rollouts``. ``sampling`` is that of a training step; its seed is replaced
    in every step."""

    sampler: Sampler
    groups: PartialGroups
    sampling: Sampling
    seed: int
    end: StepEnd

    def collect(self, step: int) -> Experience:
        """The responses of one training step. Raises ValueError when a rollout hook failed."""
        self.groups.admit(step)
        sampling = sampling_of_step(self.sampling, step)
        order = PartialOrder(
            self.groups,
            step,
            replace(sampling, seed=sampling_seed(self.seed, step)),
            f"step {step}",
        )
        clock = Clock()
        outcome, replica = self.sampler.streaming.run(order, clock)
        with clock("rollout"):
            facts = self._facts(outcome)
            responses = self._responses(outcome, replica, facts)
            self._carry(outcome, replica)
        metrics = self._metrics(outcome, facts)
        experience = self.end(step, responses, clock)
        return replace(
            experience,
            unused_tokens=outcome.unused_tokens,
            source_metrics=metrics,
            annealing=sampling.annealing,
        )

    def _facts(self, outcome: PartialOutcome) -> Mapping[Row, Fact]:
        """Of each response of the step, in canonical order; equal on every rank."""
        leaders = self.sampler.streaming.leaders
        facts: dict[Row, Fact] = {}
        for number in outcome.step.groups:
            for response in range(self.groups.rules.responses_per_group):
                request = Request(outcome.step.step, number, response)
                if request in outcome.ended:
                    event, score = outcome.ended[request]
                    holder = int(leaders[event.replica])
                    there = self.groups.so_far(request)
                    earlier = () if there is None else there.spans
                    version = self.sampler.weight_version
                    spans = (*earlier, VersionSpan(version, event.length))
                    fact = Fact(holder, event.truncated, spans, score)
                else:
                    answer = self.groups[number].answers[response]
                    assert answer.score is not None, "a group that is trained is whole"
                    holder = int(leaders[number % len(leaders)])
                    completion = answer.completion
                    fact = Fact(holder, completion.truncated, completion.spans, answer.score)
                facts[number, response] = fact
        return facts

    def _responses(
        self, outcome: PartialOutcome, replica: Replica, facts: Mapping[Row, Fact]
    ) -> Responses:
        holders: Ranks = np.array([fact.holder for fact in facts.values()], dtype=np.int64)
        here = np.flatnonzero(holders == self.sampler.world.rank)
        names = list(facts)
        completions = []
        for row in here:
            number, response = names[row]
            ended_now = replica.completions.get(Request(outcome.step.step, number, response))
            completions.append(ended_now or self.groups[number].answers[response].completion)
        tokens = token_rows(here, completions)
        columns = {**tokens.columns, "weight_versions": token_versions(completions)}
        size = self.groups.rules.responses_per_group
        return Responses(
            prompts=[self.groups[number].prompt for number, _ in names],
            group_ids=np.repeat(np.arange(len(outcome.step.groups)), size),
            lengths=np.array([fact.spans[-1].end for fact in facts.values()], dtype=np.int64),
            truncated=np.array([fact.truncated for fact in facts.values()], dtype=bool),
            weight_versions=np.array(
                [fact.spans[0].version for fact in facts.values()], dtype=np.int64
            ),
            scores=[fact.score for fact in facts.values()],
            tokens=replace(tokens, columns=columns),
            holders=holders,
        )

    def _carry(self, outcome: PartialOutcome, replica: Replica) -> None:
        """Collective: closes the groups of the step, and gives every rank what the others have
        got, up to the level."""
        for number in outcome.step.groups:
            self.groups.close(number)
        world = self.sampler.world
        mine: list[tuple[int, int, Answer]] = []
        if world.rank == self.sampler.streaming.leader:
            mine = self._unfinished(outcome, replica)
        for of_rank in world.all_gather(mine):
            for number, response, answer in of_rank:
                self.groups.note(number, response, answer)

    def _unfinished(
        self, outcome: PartialOutcome, replica: Replica
    ) -> list[tuple[int, int, Answer]]:
        """What this replica has of groups that are not trained."""
        trained = set(outcome.step.groups)
        found = []
        for request, completion in {**replica.paused, **replica.completions}.items():
            if request.group in trained:
                continue
            if request in outcome.ended:
                answer = Answer(completion, outcome.ended[request][1])
            else:
                length = self.groups.length(request) + outcome.step.level
                answer = Answer(cut(completion, length), None)
            found.append((request.group, request.response, answer))
        return found

    def _metrics(self, outcome: PartialOutcome, facts: Mapping[Row, Fact]) -> dict[str, float]:
        """Ages in updates; those of groups in steps."""
        step = outcome.step.step
        sums = np.zeros(3)
        oldest = 0
        num_mixed = 0
        for fact in facts.values():
            start = 0
            for version, end in fact.spans:
                age = step - 1 - version
                sums += (end - start) * np.array([1, age, age > 0])
                oldest = max(oldest, age)
                start = end
            num_mixed += len(fact.spans) > 1
        num_tokens, ages, num_old = sums.tolist()
        return {
            "source/staleness_mean": ages / num_tokens,
            "source/staleness_max": oldest,
            "source/mixed_share": num_mixed / len(facts),
            "source/old_tokens_share": num_old / num_tokens,
            "source/group_age_max": step - min(outcome.step.first_steps),
            "source/step_tokens": outcome.step.level,
            "source/open_tokens": self.groups.num_tokens,
        }

    def state(self) -> dict[str, Any]:
        """The open groups with their tokens, and the position in the prompts."""
        return self.groups.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the state belongs to another run."""
        self.groups.restore(state)
