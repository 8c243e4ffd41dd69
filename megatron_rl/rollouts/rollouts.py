"""Prompts in, experience out: the source of a trainer's responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_rl.hooks import ScoredGroup
from megatron_rl.loss import Method
from megatron_rl.protocols import CheckedWeights
from megatron_rl.rollouts.demonstrations import DEMONSTRATED
from megatron_rl.rollouts.dispatcher import StepSummary
from megatron_rl.rollouts.jobs import GenerationJob
from megatron_rl.rollouts.post_rollout import PostRollout
from megatron_rl.rollouts.rows.exchange import expert_rows, token_rows, token_versions
from megatron_rl.rollouts.rows.experience import Experience, Responses
from megatron_rl.rollouts.rows.metrics import Clock
from megatron_rl.rollouts.rows.partials import of_all_rows, response_maxima, response_sums
from megatron_rl.rollouts.rows.verdicts import excluded_share
from megatron_rl.rollouts.step_record import StepRecord
from megatron_rl.runtime.launch import World
from megatron_rl.scheduling.end_of_step import StepGroups, StepRules
from megatron_rl.types import Completion, Prompt, Sampling, SyncReport, num_appended


class SampledStep(NamedTuple):
    """The responses of a step, as a rank has them.

    Attributes:
        prompts: Of the summary's groups.
        completions: Of the answers whose tokens lie on this rank, in order.
        refused: Groups that dynamic sampling refused.
    """

    summary: StepSummary
    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    refused: Sequence[ScoredGroup]

    @classmethod
    def of(cls, summary: StepSummary, job: GenerationJob, rank: int) -> SampledStep:
        """Collects prompts and tokens, before the job forgets them."""
        prompts = [job.stream.prompt(group, summary.visits[group]) for group in summary.shown]
        size = job.rules.responses_per_group
        completions = []
        for number, answer in enumerate(summary.answers):
            if answer.holder != rank:
                continue
            # Answers are in canonical order: group after group, ``size`` of each.
            group, response = divmod(number, size)
            completion = job.store.get((summary.shown[group], response))
            if answer.spans[0].version == DEMONSTRATED:
                completion = job.demonstration(prompts[group], response)
            assert completion is not None, f"rank {rank} lacks the tokens of answer {number}"
            completions.append(completion)
        refused = [
            ScoredGroup.of(job.stream.prompt(group, visit), scores)
            for group, (visit, scores) in summary.refused.items()
        ]
        return cls(summary, prompts, completions, refused)

    def responses(
        self, rank: int, sampling: Sampling, *, with_versions: bool, with_sampled: bool = False
    ) -> Responses:
        """As rows, with what ``sampling`` asks for beside the sampled tokens. ``with_versions``:
        adds a column with the version of each token; ``with_sampled``: one that tells sampled
        tokens from those that environments have appended."""
        answers = self.summary.answers
        holders = np.array([answer.holder for answer in answers], dtype=np.int64)
        rows = np.flatnonzero(holders == rank)
        tokens = token_rows(
            rows,
            self.completions,
            num_kept=sampling.num_kept,
            num_likely=sampling.num_likely,
            with_sampled=with_sampled,
        )
        appended = np.array([num_appended(one.spans) for one in answers], dtype=np.int64)
        if with_versions:
            columns = {**tokens.columns, "weight_versions": token_versions(self.completions)}
            tokens = replace(tokens, columns=columns)
        size = len(answers) // len(self.prompts)
        versions = [answer.spans[0].version for answer in answers]
        prompts = [prompt for prompt in self.prompts for _ in range(size)]
        experts = None
        if sampling.expert_width:
            here = [prompts[row] for row in rows]
            experts = expert_rows(rows, self.completions, here, sampling.expert_width)
        return Responses(
            prompts=prompts,
            group_ids=np.repeat(np.arange(len(self.prompts)), size),
            lengths=np.array([answer.length for answer in answers], dtype=np.int64),
            truncated=np.array([answer.truncated for answer in answers], dtype=bool),
            weight_versions=np.array(versions, dtype=np.int64),
            scores=[score for answer in answers if (score := answer.score) is not None],
            tokens=tokens,
            holders=holders,
            experts=experts,
            num_appended=appended if with_sampled else None,
        )


class Engines(Protocol):
    """Where responses are generated, as all ranks see it; every method is collective.

    ``has_versions``: whether tokens of one response may be of several versions of the weights, or
    of older ones, so that each carries its own. ``has_turns``: whether responses may have tokens
    that an environment has appended.
    """

    @property
    def has_versions(self) -> bool: ...

    @property
    def has_turns(self) -> bool: ...

    def step(self, step: int, clock: Clock) -> SampledStep:
        """Generates until a step has its groups."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, what: str, clock: Clock
    ) -> SampledStep:
        """Scored responses to prompts that are no part of the stream. ``what`` names this
        generation where its progress is shown."""

    def training(self) -> AbstractContextManager[None]:
        """See protocols.RolloutSource, as are the next two."""

    def generation(self) -> AbstractContextManager[None]: ...

    def publish(self, version: int) -> SyncReport: ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the job, equal on all ranks."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse."""


@dataclass(frozen=True)
class Rollouts:
    """Implements ``protocols.RolloutSource`` for any engines and any end of a step.

    Attributes:
        policy: Whose weights are published.
        engines: Those of this launch, or servers.
        job: The prompts, how they are sampled, and when a step has its groups.
        post: From responses to experience: rollout hooks, the log.
        record: Writes down what each step is trained on; None: no record is kept.
    """

    world: World
    policy: CheckedWeights
    engines: Engines
    job: GenerationJob
    post: PostRollout
    record: StepRecord | None = None

    def next(self, step: int) -> Experience:
        with self.engines.generation():
            return self.collect(step)

    def collect(self, step: int) -> Experience:
        """``next``, inside ``generation``. Under dynamic sampling (DAPO, 2503.14476 eq 11) the
        groups are the first that the method wants, in the order of the prompts.

        Some responses are logged, also when the method wanted no group: whatever stops the run in
        this step, they show what the policy answered.

        Raises:
            ValueError: no group was wanted, too many responses have no verdict, or a rollout hook
                failed.
        """
        clock = Clock()
        sampled = self.engines.step(step, clock)
        sampling, resampling = self.job.plan.of_step(step), self.job.plan.hooks
        with clock("rollout"):
            responses = self._responses(sampled, sampling)
        summary = sampled.summary
        groups = summary.groups
        self._excluded_share(step, responses, summary)
        num_refused = len(groups.refused)
        if not groups.groups:
            self.post.log(step, responses)
            raise ValueError(
                f"dynamic sampling: all {num_refused} groups of step {step} were entirely right or"
                " entirely wrong (samples.jsonl has some of the last); use easier or harder"
                " prompts, raise method.filters.dynamic_sampling.max_tries or switch it off (null)"
            )
        # Before hooks of scored rollouts and credit: a group is trained with all of its responses.
        again = resampling.run(
            self.run, step, sampling, responses, clock, self.world.all_gather, sampled.refused
        )
        share = self._excluded_share(step, again.responses, summary)
        judged = self.job.verdicts.judged(again.responses)
        if not len(judged):
            raise ValueError(
                f"step {step}: no group has {self.job.verdicts.min_group} responses with a verdict;"
                " correct the verifier or its limits"
            )
        experience = self.post(step, judged, clock)
        ages = age_metrics(step, judged, self.world) if self.engines.has_versions else {}
        looked_at = len(groups.groups) + num_refused
        num_sampled = again.responses.num_sampled_tokens
        experience = replace(
            experience,
            discarded_groups=num_refused,
            sampling_rounds=-(-looked_at // self.job.rules.groups_per_step),
            discarded_tokens=summary.discarded_tokens,
            dropped_tokens=experience.dropped_tokens + again.dropped_tokens,
            excluded_tokens=num_sampled - judged.num_sampled_tokens,
            excluded_share=share,
            hook_metrics={**again.metrics, **experience.hook_metrics},
            source_metrics={**summary.metrics, **ages},
            annealing=sampling.annealing,
        )
        if (record := self.record) is not None:
            self.world.from_main(lambda: record.write(step, experience, groups.groups))
        return experience

    def _excluded_share(self, step: int, responses: Responses, summary: StepSummary) -> float:
        """``excluded_share`` of all responses that the step looked at."""
        scores = [score for _, of_group in summary.refused.values() for score in of_group]
        if summary.groups.groups:  # else the responses are some of those that were refused
            scores += responses.scores
        try:
            return excluded_share(scores, self.job.verdicts.max_excluded_share, f"step {step}")
        except ValueError:
            self.post.log(step, responses)
            raise

    def run(
        self, prompts: Sequence[Prompt], sampling: Sampling, what: str, clock: Clock | None = None
    ) -> Responses:
        """Collective, inside ``generation``: ``sampling.num_responses`` scored responses to each of
        some prompts that are no part of training."""
        sampled = self.engines.generate(prompts, sampling, what, clock or Clock())
        return self._responses(sampled, sampling)

    def _responses(self, sampled: SampledStep, sampling: Sampling) -> Responses:
        with_versions = self.engines.has_versions
        return sampled.responses(
            self.world.rank,
            sampling,
            with_versions=with_versions,
            with_sampled=self.engines.has_turns,
        )

    def training(self) -> AbstractContextManager[None]:
        """See protocols.RolloutSource, as are the methods below."""
        return self.engines.training()

    def generation(self) -> AbstractContextManager[None]:
        return self.engines.generation()

    def publish(self, version: int) -> SyncReport:
        """Weights change in an update only: those that are checked here are saved and exported."""
        self.policy.check_weights(version)
        return self.engines.publish(version)

    def state(self) -> dict[str, Any]:
        """The position in the prompts, open responses, and what sampling hooks remember."""
        state = {"is_partial": self.job.rules.is_partial, **self.engines.state()}
        hooks = self.job.plan.hooks
        return {**state, "hooks": hooks.state()} if hooks.hooks else state

    def restore(self, state: dict[str, Any]) -> None:
        rules = self.job.rules
        if state.get("is_partial") != rules.is_partial:
            of_it = "without" if rules.is_partial else "with"
            raise ValueError(
                f"resume: the checkpoint is of a run {of_it} source.partial; resume with the source"
                " of that run, or start with resume=never in a new run_dir"
            )
        most = rules.groups_in_flight
        if most is not None and (begun := len(state["scheduler"]["end"]["groups"])) > most:
            raise ValueError(
                f"resume: the checkpoint has {begun} groups that are begun,"
                f" source.partial.groups_in_flight is {most}; resume with as many as before"
            )
        self.job.stream.restore(state["prompts"])
        self.engines.restore(state)
        self.job.plan.hooks.restore(state.get("hooks", {}))


def age_metrics(step: int, responses: Responses, world: World) -> dict[str, float]:
    """Collective: how many updates older than the policy the weights were that sampled the tokens
    of a step. Demonstrations have no age."""
    lengths = responses.tokens.lengths
    versions = responses.tokens.columns["weight_versions"]
    sampled = responses.tokens.columns.get("sampled")
    num_tokens = int(responses.lengths.sum())
    if sampled is not None and responses.num_appended is not None:
        lengths, versions = response_sums(sampled, lengths).astype(np.int64), versions[sampled]
        num_tokens -= int(responses.num_appended.sum())
    # Step s trains the policy of s - 1 updates.
    ages = np.where(versions >= 0, step - 1 - versions, 0)
    # The largest version less the smallest of each response: above 0 where it has several.
    spread = response_maxima(versions, lengths) + response_maxima(-versions, lengths)
    sums = (response_sums(ages, lengths), response_sums(ages > 0, lengths))
    partials = np.column_stack([*sums, response_maxima(ages, lengths), spread > 0])
    table = of_all_rows(responses, partials, world)
    return {
        "source/staleness_mean": float(table[:, 0].sum() / num_tokens),
        "source/staleness_max": float(table[:, 2].max()),
        "source/mixed_share": float(table[:, 3].sum() / len(responses)),
        "source/old_tokens_share": float(table[:, 1].sum() / num_tokens),
    }


def open_metrics(groups: StepGroups, job: GenerationJob) -> dict[str, float]:
    """Metrics of a step that ended at a number of tokens, when its open responses are kept."""
    if groups.level is None:
        return {}
    ages = [groups.step - first for first in groups.first_steps]
    return {
        "source/group_age_max": max(ages, default=0),
        "source/step_tokens": groups.level,
        "source/open_tokens": job.store.num_tokens,
    }


def step_rules(
    method: Method, prompts_per_step: int, responses_per_prompt: int, **source: Any
) -> StepRules:
    """Which groups a step of the method trains. ``source``: other fields of the rules."""
    is_filtered = method.config.filters.dynamic_sampling is not None
    rounds = method.max_sampling_tries if is_filtered else None
    return StepRules(prompts_per_step, responses_per_prompt, rounds, **source)
