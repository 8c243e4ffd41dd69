"""Rollouts on vLLM servers: generation and training on separate devices, at the same time.

Rank 0 asks the servers (``server_dispatch.py``), all ranks push weights
(``weight_sync/fleet/fleet.py``).
While the policy trains on the groups of a step, servers sample those of later ones with weights
that are at most ``source.staleness`` updates old. Where that is above 0 new weights are staged
beside those in use, while the servers sample, and each goes over to them by itself.

Servers come and go. One that is lost is given up, and others answer what it was asked. One that
comes gets the weights at the next publication, or at once where the trainer waits for it. Where
none is left the trainer says so, leaves a checkpoint where it can, and waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol, TypeVar

import numpy as np
from jaxtyping import Int

from megatron_rl.protocols import CheckedWeights
from megatron_rl.rollouts.exchange import token_rows, token_versions
from megatron_rl.rollouts.experience import Experience, Responses
from megatron_rl.rollouts.metrics import Clock
from megatron_rl.rollouts.prompt_stream import FinishedGroup, PromptStream
from megatron_rl.rollouts.rollouts import none_wanted
from megatron_rl.rollouts.server_dispatch import ServerDispatcher
from megatron_rl.rollouts.server_sampling import ServerSampling
from megatron_rl.rollouts.server_tasks import News, NoServerError
from megatron_rl.rollouts.step_end import StepEnd
from megatron_rl.rollouts.step_record import StepRecord
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.types import Completion, Image, Prompt, Sampling, Score, SyncReport
from megatron_rl.weight_sync.fleet.fleet import FleetSync
from megatron_rl.weight_sync.fleet.weight_history import WeightHistory

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class ScoreChecks(Protocol):
    """See ``logprob_check.LogprobCheck``."""

    def expected(self, version: int) -> Any: ...

    def check(self, version: int, expected: Any) -> tuple[float, float]: ...


@dataclass(frozen=True)
class Told:
    """What rank 0 tells the others: all but the tokens. ``groups``: their numbers in the stream;
    ``start``: the first of the step; ``facts``: of each response its length, whether it is
    truncated, and the oldest version of its weights."""

    facts: Int[np.ndarray, "rows 3"]
    scores: list[Score]
    groups: Sequence[int] = ()
    start: int = 0
    num_refused: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerParts:
    """What ``Servers`` is made of. ``held``: weights that the fleet takes in place of the policy's,
    where servers may still want those of the version before; ``dispatcher``: makes that of rank 0,
    from a saved state; ``sampling``: of what servers are asked; ``prompts``: the
    stream of this rank, on rank 0 the dispatcher's; ``end``: from responses to experience;
    ``save``: leaves a checkpoint of the step that is finished; ``display``: shows how far a step
    is; ``record``: of what each step is trained on, None: none is kept."""

    world: World
    policy: CheckedWeights
    fleet: FleetSync
    held: WeightHistory | None
    dispatcher: Callable[[Mapping[str, Any] | None], ServerDispatcher]
    prompts: PromptStream
    sampling: ServerSampling
    end: StepEnd
    save: Callable[[int], None]
    staleness: int
    display: Display
    record: StepRecord | None = None


class Servers:
    """Implements ``protocols.RolloutSource``; see the head of this file."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts = parts
        self._world = parts.world
        self._dispatcher: ServerDispatcher | None = None
        self._saved: Mapping[str, Any] | None = None
        self._published = -1
        self.checks: ScoreChecks | None = None

    @property
    def _main(self) -> ServerDispatcher:
        """On rank 0."""
        if self._dispatcher is None:
            self._dispatcher = self._parts.dispatcher(self._saved)
            self._saved = None
        return self._dispatcher

    def next(self, step: int) -> Experience:
        """See protocols.RolloutSource."""
        clock = Clock()
        with clock("rollout"):
            self._wait(step)
            mine: list[FinishedGroup] = []
            told = self._world.from_main(lambda: self._take(step, mine))
            responses = _responses(self._prompts(told, mine), told, mine)
        experience = self._hooked(step, told, responses, clock)
        record = self._parts.record
        if record is not None:
            self._world.from_main(lambda: record.write(step, experience, told.groups, told.start))
        return experience

    def _hooked(self, step: int, told: Told, responses: Responses, clock: Clock) -> Experience:
        """With what sampling hooks ask again, and what the end of the step makes of it."""
        metrics = told.metrics
        again = self._parts.sampling.ask_again(self, step, responses, clock)
        if again is None:
            experience = self._parts.end(step, responses, clock)
        else:
            experience = again.noted_in(self._parts.end(step, again.responses, clock))
            metrics = {**metrics, **_ages(step, again.responses)}
        return replace(experience, discarded_groups=told.num_refused, source_metrics=metrics)

    def _wait(self, step: int) -> None:
        """Collective: until the step has its groups; says how far it is."""
        display = self._parts.display
        with display.phase(f"step {step}: waiting for responses", announced=False):
            self._met(step - 1, lambda: self._main.wait(display.generating(f"step {step}")))

    def _take(self, step: int, mine: list[FinishedGroup]) -> Told:
        """Rank 0: the groups of the step; they go into the list, and not to the others."""
        batch, groups = self._main.take()
        assert batch.step == step - 1, f"the scheduler is at step {batch.step + 1}"
        if not groups:
            raise ValueError(none_wanted(step, batch.num_refused))
        mine += groups
        completions = _completions(groups)
        ages = step - 1 - token_versions(completions)
        if ages.max() > self._parts.staleness:
            raise RuntimeError(
                f"step {step}: a response is {ages.max()} updates old, source.staleness is"
                f" {self._parts.staleness}"
            )
        metrics = {
            "source/staleness_mean": float(ages.mean()),
            "source/staleness_max": float(ages.max()),
            "source/mixed_share": fmean(len(one.spans) > 1 for one in completions),
            **self._main.counts(),
        }
        return replace(
            _told(groups),
            groups=batch.groups,
            start=batch.start,
            num_refused=batch.num_refused,
            metrics=metrics,
        )

    def _prompts(self, told: Told, mine: Sequence[FinishedGroup]) -> list[Prompt]:
        """Of the groups of a step. Rank 0's stream belongs to its dispatcher."""
        if self._world.is_main:
            return [group.prompt for group in mine]
        stream = self._parts.prompts
        prompts = [stream.of_step(told.start, number) for number in told.groups]
        stream.forget_below(told.groups[-1])
        return prompts

    @contextmanager
    def training(self) -> Iterator[None]:
        """See protocols.RolloutSource. Policy and engines share no device: nothing is moved."""
        yield

    @contextmanager
    def generation(self) -> Iterator[None]:
        """See protocols.RolloutSource."""
        yield

    def publish(self, version: int) -> SyncReport:
        """See protocols.RolloutSource. In lockstep it waits until what is wanted of the old weights
        is sampled; of those before them, where weights are staged. A server that does not take the
        weights is given up."""
        self._parts.policy.check_weights(version)
        if self._published < 0 < version and self._saved is None:
            raise ValueError(
                f"resume: step {version} has no rollouts that source=servers could go on from (the"
                " prompts or the source have changed); start with resume=never in a new run_dir"
            )
        checks = self.checks
        expected = None if checks is None else checks.expected(version)
        servers = self._met(0, lambda: self._main.drained(version))
        if self._parts.held is not None:
            self._parts.held.hold(version)
        self._parts.fleet.keep(servers)
        self._parts.sampling.published(version)
        self._published = version
        report = self._push(servers, version, staged=self._parts.staleness > 0)
        if checks is None or expected is None:
            return report
        try:
            mean, largest = checks.check(version, expected)
        except NoServerError:  # on every rank; whoever comes gets compared the next time
            return report
        return replace(report, logprob_check_diff=mean, logprob_check_diff_max=largest)

    def _push(
        self, servers: Mapping[str, str], version: int, *, staged: bool = False
    ) -> SyncReport:
        """Collective: weights of a published version into these servers."""
        if self._parts.held is not None:
            self._parts.held.use(version)
        report = self._parts.fleet.sync(version, servers, staged=staged)
        updated = {name: servers[name] for name in report.updated}
        self._world.from_main(
            lambda: self._main.published(version, updated, report.lost, staged=staged)
        )
        return report.sync

    def _met(self, finished: int, work: Callable[[], Result | News]) -> Result:
        """Collective: what ``work`` gives on rank 0, once there are servers for it. Those that come
        get the published weights. ``finished``: the last step, for a checkpoint; 0 where the policy
        is already further."""
        while True:
            outcome = self._world.from_main(work)
            if not isinstance(outcome, News):
                return outcome
            if outcome.kind == "join":
                is_newest = outcome.version is None
                self._push(outcome.servers, self._published if is_newest else outcome.version)
            else:
                self._starve(finished)

    def _starve(self, finished: int) -> None:
        """Nobody is left to ask. What is open in lockstep may want the weights of the version
        before, which no checkpoint has; then the last one stands."""
        may_save = self._world.from_main(lambda: self._main.is_settled())
        if self._world.is_main:
            logger.warning(
                "no server is left: the run waits for one to register in run_dir/servers"
                " (python -m megatron_rl.serve)%s",
                ""
                if may_save
                else "; without a checkpoint, since responses are open that want"
                " older weights than the policy's",
            )
        if finished > 0 and may_save:
            self._parts.save(finished)

    def run(self, prompts: Sequence[Prompt], sampling: Sampling, what: str) -> Responses:
        """Collective, inside ``generation``: scored responses to prompts that are no part of
        training, beside what the servers do for it. Tokens lie on rank 0."""
        return self.ask(prompts, sampling, what, Clock())

    def ask(
        self, prompts: Sequence[Prompt], sampling: Sampling, what: str, clock: Clock
    ) -> Responses:
        """``run``, and adds the seconds that it took."""
        with clock("rollout"), self._parts.display.phase(what, announced=False):
            return self._answered(prompts, sampling)

    def _answered(self, prompts: Sequence[Prompt], sampling: Sampling) -> Responses:
        mine: list[FinishedGroup] = []
        told = self._met(0, lambda: self._answer(prompts, sampling, mine))
        return _responses(prompts, told, mine)

    def _answer(
        self, prompts: Sequence[Prompt], sampling: Sampling, mine: list[FinishedGroup]
    ) -> Told | News:
        """Rank 0."""
        groups = self._main.generate(prompts, sampling)
        if isinstance(groups, News):
            return groups
        mine += groups
        return _told(groups)

    replica = 0

    def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[float]]:
        """Collective: see ``protocols.RolloutEngine``. Servers are asked in turn."""
        return self._world.from_main(lambda: self._main.score(sequences, images))

    def state(self) -> dict[str, Any]:
        """See protocols.RolloutSource. Collective. In lockstep it waits until nothing is wanted of
        older weights than the policy's: those are in no checkpoint."""
        self._met(0, lambda: self._main.settled())
        state = self._world.from_main(lambda: self._main.state())
        return state | self._parts.sampling.state()

    def restore(self, state: dict[str, Any]) -> None:
        """See protocols.RolloutSource."""
        assert self._dispatcher is None, "a source is restored before it begins"
        if "scheduler" not in state:
            raise ValueError(
                "resume: the checkpoint is of a run without source=servers; go on with the source"
                " of that run, or start with resume=never in a new run_dir"
            )
        self._parts.prompts.restore(state["prompts"])
        self._saved = state
        self._parts.sampling.restore(state)


def _completions(groups: Sequence[FinishedGroup]) -> list[Completion]:
    """One group after the other."""
    return [one for group in groups for one in group.completions]


def _ages(step: int, responses: Responses) -> dict[str, float]:
    """Where each response is of one version, as in lockstep."""
    ages = step - 1 - responses.weight_versions
    return {
        "source/staleness_mean": float(np.average(ages, weights=responses.lengths)),
        "source/staleness_max": float(ages.max()),
    }


def _told(groups: Sequence[FinishedGroup]) -> Told:
    facts = []
    for one in _completions(groups):
        facts.append((len(one.token_ids), one.truncated, one.weight_version))
    scores = [score for group in groups for score in group.scores]
    return Told(np.array(facts, dtype=np.int64).reshape(-1, 3), scores)


def _responses(prompts: Sequence[Prompt], told: Told, mine: Sequence[FinishedGroup]) -> Responses:
    """Equal on all ranks but for the tokens, which lie on rank 0. ``mine``: there alone."""
    completions = _completions(mine)
    size = len(told.scores) // len(prompts)
    tokens = token_rows(range(len(completions)), completions)
    columns = {**tokens.columns, "weight_versions": token_versions(completions)}
    return Responses(
        prompts=[prompt for prompt in prompts for _ in range(size)],
        group_ids=np.repeat(np.arange(len(prompts)), size),
        lengths=told.facts[:, 0],
        truncated=told.facts[:, 1].astype(bool),
        weight_versions=told.facts[:, 2],
        scores=told.scores,
        tokens=replace(tokens, columns=columns),
        holders=np.zeros(len(told.scores), dtype=np.int64),
    )
