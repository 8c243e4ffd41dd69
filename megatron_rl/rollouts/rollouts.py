"""Prompts in, experience out: the source of a trainer's responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_rl.hooks import ScoredGroup
from megatron_rl.loss import Method
from megatron_rl.rollouts.demonstrations import DEMONSTRATED
from megatron_rl.rollouts.dispatcher import Answer, StepSummary
from megatron_rl.rollouts.jobs import GenerationJob, TrainingJob
from megatron_rl.rollouts.post_rollout import PostRollout
from megatron_rl.rollouts.rows.exchange import token_rows, token_versions
from megatron_rl.rollouts.rows.experience import Experience, Responses
from megatron_rl.rollouts.rows.metrics import Clock
from megatron_rl.rollouts.rows.partials import of_all_rows, response_maxima, response_sums
from megatron_rl.rollouts.rows.verdicts import excluded_share
from megatron_rl.rollouts.step_record import StepRecord
from megatron_rl.runtime.launch import World
from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.scheduling.token_level import PartialRules
from megatron_rl.scheduling.whole_groups import Rules
from megatron_rl.types import Completion, Prompt, Sampling, SyncReport


class Engines(Protocol):
    """Where responses are generated, as all ranks see it; every method is collective.

    ``has_versions``: whether tokens of one response may be of several versions of the weights, or
    of older ones, so that each carries its own.
    """

    @property
    def has_versions(self) -> bool: ...

    def step(self, step: int, clock: Clock) -> SampledStep:
        """Until a step has its groups."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, what: str, clock: Clock
    ) -> Responses:
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
        engines: Those of this launch, or servers.
        job: The prompts, how they are sampled, and when a step has its groups.
        post: From responses to experience: rollout hooks, the log.
        record: Of what each step is trained on; None: none is kept.
    """

    world: World
    engines: Engines
    job: TrainingJob
    post: PostRollout
    record: StepRecord | None = None

    def next(self, step: int) -> Experience:
        """See protocols.RolloutSource."""
        with self.engines.generation():
            return self.collect(step)

    def collect(self, step: int) -> Experience:
        """``next``, of engines that may generate. Under dynamic sampling (DAPO, 2503.14476 eq 11)
        the groups are the first that the method wants, in the order of the prompts.

        Some responses are logged, also when none was wanted: whatever stops the run in this step,
        they show what the policy answered.

        Raises:
            ValueError: no group was wanted, too many responses have no verdict, or a rollout hook
                failed.
        """
        clock = Clock()
        summary, prompts, completions, refused = self.engines.step(step, clock)
        with clock("rollout"):
            responses = responses_of(
                prompts,
                summary.answers,
                completions,
                self.world.rank,
                with_versions=self.engines.has_versions,
            )
        groups = summary.groups
        self._excluded_share(step, responses, summary)
        if not groups.groups:
            self.post.log(step, responses)
            raise ValueError(none_wanted(step, groups.num_refused))
        plan = self.job.plan
        again = plan.ask_again(self.engines, step, responses, clock, refused)
        everything = again.responses if again else responses
        share = self._excluded_share(step, everything, summary)
        judged = self.job.verdicts.judged(everything)
        if not len(judged):
            raise ValueError(
                f"step {step}: no group has {self.job.verdicts.min_group} responses with a verdict;"
                " correct the verifier or its limits"
            )
        experience = self.post(step, judged, clock)
        looked_at = len(groups.groups) + groups.num_refused
        metrics = dict(summary.metrics)
        if self.engines.has_versions:
            metrics |= age_metrics(step, judged, self.world)
        experience = replace(
            experience,
            discarded_groups=groups.num_refused,
            tries=-(-looked_at // self.job.rules.groups_per_step),
            unused_tokens=summary.discarded_tokens,
            excluded_tokens=everything.num_sampled_tokens - judged.num_sampled_tokens,
            excluded_share=share,
            source_metrics=metrics,
            annealing=plan.of_step(step).annealing,
        )
        if again is not None:
            experience = again.apply_to(experience)
        record = self.record
        if record is not None:
            self.world.from_main(
                lambda: record.write(step, experience, groups.groups, groups.start)
            )
        return experience

    def _excluded_share(self, step: int, responses: Responses, summary: StepSummary) -> float:
        """Of all that the step looked at; ValueError as of ``excluded_share``."""
        scores = [score for _, of_group in summary.refused.values() for score in of_group]
        if summary.groups.groups:  # else the responses are some of those that were refused
            scores += responses.scores
        try:
            return excluded_share(scores, self.job.verdicts.max_excluded_share, f"step {step}")
        except ValueError:
            self.post.log(step, responses)
            raise

    def run(self, prompts: Sequence[Prompt], sampling: Sampling, what: str) -> Responses:
        """Collective, inside ``generation``: ``sampling.num_responses`` scored responses to each of
        some prompts that are no part of training."""
        return self.engines.generate(prompts, sampling, what, Clock())

    def training(self) -> AbstractContextManager[None]:
        """See protocols.RolloutSource."""
        return self.engines.training()

    @contextmanager
    def generation(self) -> Iterator[None]:
        """See protocols.RolloutSource."""
        with self.engines.generation():
            yield

    def publish(self, version: int) -> SyncReport:
        """See protocols.RolloutSource."""
        return self.engines.publish(version)

    def state(self) -> dict[str, Any]:
        """See protocols.RolloutSource: the position in the prompts, responses that are open, and
        what sampling hooks remember."""
        return {
            "is_partial": self.job.is_partial,
            **self.engines.state(),
            **self.job.plan.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See protocols.RolloutSource."""
        is_partial = self.job.is_partial
        if state.get("is_partial") != is_partial:
            of_it = "without" if is_partial else "with"
            raise ValueError(
                f"resume: the checkpoint is of a run {of_it} source.partial; resume with the source"
                " of that run, or start with resume=never in a new run_dir"
            )
        if isinstance(self.job.rules, PartialRules):
            _check_open_groups(state, self.job.rules.groups_in_flight)
        self.job.stream.restore(state["prompts"])
        self.engines.restore(state)
        self.job.plan.restore(state)


def _check_open_groups(state: Mapping[str, Any], most: int) -> None:
    num_open = len(state["scheduler"]["end"]["groups"])
    if num_open > most:
        raise ValueError(
            f"resume: the checkpoint has {num_open} groups that are begun,"
            f" source.partial.groups_in_flight is {most}; resume with as many as before"
        )


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
        """Asks for prompts and tokens, before they are forgotten."""
        prompts = [job.prompt(group, summary.visits[group]) for group in summary.shown]
        size = job.rules.responses_per_group
        completions = []
        for number, answer in enumerate(summary.answers):
            if answer.holder == rank:
                group, response = divmod(number, size)
                completion = job.store.get((summary.shown[group], response))
                if answer.spans[0].version == DEMONSTRATED:
                    completion = job.demonstration(prompts[group], response)
                assert completion is not None, f"rank {rank} lacks the tokens of answer {number}"
                completions.append(completion)
        refused = [
            ScoredGroup.of(job.prompt(group, visit), scores)
            for group, (visit, scores) in summary.refused.items()
        ]
        return cls(summary, prompts, completions, refused)


def responses_of(
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    completions: Sequence[Completion],
    rank: int,
    *,
    with_versions: bool,
) -> Responses:
    """Scored responses on ``rank``, which has the tokens of those that it holds.

    Args:
        prompts: of each group; all groups have equally many responses.
        completions: of those whose holder is ``rank``, in order.
        with_versions: adds a column with the version of each token.
    """
    holders = np.array([answer.holder for answer in answers], dtype=np.int64)
    tokens = token_rows(np.flatnonzero(holders == rank), completions)
    if with_versions:
        columns = {**tokens.columns, "weight_versions": token_versions(completions)}
        tokens = replace(tokens, columns=columns)
    size = len(answers) // len(prompts)
    return Responses(
        prompts=[prompt for prompt in prompts for _ in range(size)],
        group_ids=np.repeat(np.arange(len(prompts)), size),
        lengths=np.array([answer.length for answer in answers], dtype=np.int64),
        truncated=np.array([answer.truncated for answer in answers], dtype=bool),
        weight_versions=np.array([answer.spans[0].version for answer in answers], dtype=np.int64),
        scores=[score for answer in answers if (score := answer.score) is not None],
        tokens=tokens,
        holders=holders,
    )


def age_metrics(step: int, responses: Responses, world: World) -> dict[str, float]:
    """Collective: how many updates older than the policy the weights were that sampled the tokens
    of a step. Demonstrations have no age."""
    lengths = responses.tokens.lengths
    versions = responses.tokens.columns["weight_versions"]
    ages = np.where(versions >= 0, step - 1 - versions, 0)
    spread = response_maxima(versions, lengths) + response_maxima(-versions, lengths)
    partials = np.stack(
        [
            response_sums(ages, lengths),
            response_maxima(ages, lengths),
            response_sums(ages > 0, lengths),
            spread > 0,
        ],
        axis=1,
    )
    table = of_all_rows(responses, partials, world)
    num_tokens = int(responses.lengths.sum())
    return {
        "source/staleness_mean": float(table[:, 0].sum() / num_tokens),
        "source/staleness_max": float(table[:, 1].max()),
        "source/mixed_share": float(table[:, 3].sum() / len(responses)),
        "source/old_tokens_share": float(table[:, 2].sum() / num_tokens),
    }


def step_rules(method: Method, prompts_per_step: int, responses_per_prompt: int) -> Rules:
    """Which groups a step trains, of responses by its own weights."""
    filtered = method.config.filters.dynamic_sampling is not None
    limit = method.max_sampling_tries * prompts_per_step if filtered else None
    return Rules(prompts_per_step, responses_per_prompt, limit)


def none_wanted(step: int, num_refused: int) -> str:
    """The message where dynamic sampling leaves a step nothing."""
    return (
        f"dynamic sampling: all {num_refused} groups of step {step} were entirely right or entirely"
        " wrong (samples.jsonl has some of the last); use easier or harder prompts, raise"
        " method.filters.dynamic_sampling.max_tries or switch it off (null)"
    )


def source_rules(method: Method, sizes: Any, source: Any) -> StepRules:
    """Which groups a step trains, and how old they may be, by the sections ``batch`` and ``source``
    of the configuration."""
    rules = step_rules(method, sizes.prompts_per_step, sizes.responses_per_prompt)
    lockstep = source.schedule == "lockstep"
    partial = source.partial
    if partial.groups_in_flight is None:
        return replace(rules, staleness=source.staleness, lockstep=lockstep)
    return PartialRules(
        rules.groups_per_step,
        rules.responses_per_group,
        partial.groups_in_flight,
        partial.max_age,
        max_rounds=method.max_sampling_tries if rules.is_filtered else None,
        staleness=source.staleness,
        lockstep=lockstep,
    )
