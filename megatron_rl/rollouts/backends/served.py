"""Engines on other devices: generation and training at the same time, on vLLM servers.

Rank 0 asks the servers (``servers.py``), all ranks push weights (``weight_sync/fleet/fleet.py``).
While the policy trains on the groups of a step, servers sample those of later ones with weights
that are at most ``source.staleness`` updates old. Where that is above 0 new weights are staged
beside those in use, while the servers sample, and each goes over to them by itself.

Servers come and go. One that is lost is marked dead, and others answer what it was asked. One that
comes gets the weights at the next publication, or at once where the trainer waits for it. Where
none is left the trainer logs it, leaves a checkpoint where it can, and waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megatron_rl.protocols import CheckedWeights
from megatron_rl.rollouts.backends.server_parts import FleetEvent, NoServerError
from megatron_rl.rollouts.backends.servers import ServerBackend
from megatron_rl.rollouts.dispatcher import Answer
from megatron_rl.rollouts.jobs import TrainingJob
from megatron_rl.rollouts.logprob_check import LogprobCheck
from megatron_rl.rollouts.rollouts import SampledStep, responses_of
from megatron_rl.rollouts.rows.experience import Responses
from megatron_rl.rollouts.rows.metrics import Clock
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.types import Completion, Image, Prompt, Sampling, SyncReport
from megatron_rl.weight_sync.fleet.fleet import FleetSync
from megatron_rl.weight_sync.fleet.weight_history import WeightHistory

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedParts:
    """What ``ServerEngines`` is made of.

    Attributes:
        held: Weights that the fleet takes in place of the policy's, where servers may still want
            those of the version before.
        backend: Makes that of rank 0, from a saved state.
        save: Leaves a checkpoint of the step that is finished.
        display: Shows how far a step is.
    """

    world: World
    policy: CheckedWeights
    fleet: FleetSync
    held: WeightHistory | None
    backend: Callable[[Mapping[str, Any] | None], ServerBackend]
    save: Callable[[int], None]
    display: Display


class ServerEngines:
    """Implements ``rollouts.Engines``; see the head of this file."""

    has_versions = True
    replica = 0  # for the logprob check: all servers are one

    def __init__(self, parts: ServedParts, job: TrainingJob) -> None:
        self._parts = parts
        self._job = job
        self._world = parts.world
        self._staleness = job.rules.staleness
        self._backend: ServerBackend | None = None
        self._saved: Mapping[str, Any] | None = None
        self._published = -1
        self.checks: LogprobCheck | None = None

    @property
    def _main(self) -> ServerBackend:
        """On rank 0."""
        if self._backend is None:
            self._backend = self._parts.backend(self._saved)
            self._saved = None
        return self._backend

    def step(self, step: int, clock: Clock) -> SampledStep:
        """See rollouts.Engines."""
        with clock("rollout"):
            self._wait(step)
            mine: list[SampledStep] = []
            summary = self._world.from_main(lambda: self._take(step, mine).summary)
            if mine:
                return mine[0]
            sampled = SampledStep.of(summary, self._job, self._world.rank)
            self._job.stream.forget(summary.groups.step, summary.groups.end)
            return sampled

    def _wait(self, step: int) -> None:
        """Collective: until the step has its groups; says how far it is."""
        display = self._parts.display
        with display.phase(f"step {step}: waiting for responses", announced=False):
            self._met(step - 1, lambda: self._main.wait(display.generating(f"step {step}")))

    def _take(self, step: int, mine: list[SampledStep]) -> SampledStep:
        """Rank 0: the next step; its tokens go into the list, and not to the others."""
        sampled = self._main.take()
        summary = sampled.summary
        groups = summary.groups
        assert groups.step == step - 1, f"the scheduler is at step {groups.step + 1}"
        metrics = self._main.counts()
        if groups.level is None:
            oldest = min(
                (one.spans[0].version for one in summary.answers if one.spans[0].version >= 0),
                default=step - 1,
            )
            if step - 1 - oldest > self._staleness:
                raise RuntimeError(
                    f"step {step}: a response is {step - 1 - oldest} updates old,"
                    f" source.staleness is {self._staleness}"
                )
        else:
            metrics["source/group_age_max"] = groups.age
            metrics["source/step_tokens"] = groups.level
            metrics["source/open_tokens"] = self._job.store.num_tokens
        mine.append(sampled._replace(summary=replace(summary, metrics=metrics)))
        return mine[0]

    @contextmanager
    def training(self) -> Iterator[None]:
        """See rollouts.Engines. Policy and engines share no device: nothing is moved."""
        yield

    @contextmanager
    def generation(self) -> Iterator[None]:
        """See rollouts.Engines."""
        yield

    def publish(self, version: int) -> SyncReport:
        """See rollouts.Engines. In lockstep it waits until what is wanted of the old weights
        is sampled; of those before them, where weights are staged. A server that does not take the
        weights is marked dead."""
        self._parts.policy.check_weights(version)
        if self._published < 0 < version and self._saved is None:
            raise ValueError(
                f"resume: step {version} has no rollouts that source=servers could resume from (the"
                " prompts or the source have changed); start with resume=never in a new run_dir"
            )
        checks = self.checks
        expected = None if checks is None else checks.expected(version)
        servers = self._met(0, lambda: self._main.drained(version))
        if self._parts.held is not None:
            self._parts.held.hold(version)
        self._parts.fleet.keep(servers)
        self._job.plan.published(version)
        self._published = version
        report = self._push(servers, version, staged=self._staleness > 0)
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

    def _met(self, finished: int, work: Callable[[], Result | FleetEvent]) -> Result:
        """Collective: what ``work`` gives on rank 0, once there are servers for it. Those that come
        get the published weights. ``finished``: the last step, for a checkpoint; 0 where the policy
        is already further."""
        while True:
            outcome = self._world.from_main(work)
            if not isinstance(outcome, FleetEvent):
                return outcome
            if outcome.kind == "join":
                is_newest = outcome.version is None
                self._push(outcome.servers, self._published if is_newest else outcome.version)
            else:
                self._wait_for_servers(finished)

    def _wait_for_servers(self, finished: int) -> None:
        """No server is left. What is open in lockstep may want the weights of the version
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

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, what: str, clock: Clock
    ) -> Responses:
        """See rollouts.Engines: besides what the servers do for training. Tokens lie on rank 0."""
        mine: list[Completion] = []
        with clock("rollout"), self._parts.display.phase(what, announced=False):
            answers = self._met(0, lambda: self._generate(prompts, sampling, mine))
        return responses_of(prompts, answers, mine, self._world.rank, with_versions=True)

    def _generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, mine: list[Completion]
    ) -> list[Answer] | FleetEvent:
        """Rank 0."""
        found = self._main.generate(prompts, sampling)
        if isinstance(found, FleetEvent):
            return found
        mine += [completion for completion, _ in found]
        return [
            Answer(0, len(one.token_ids), one.truncated, one.spans, len(one.token_ids), score)
            for one, score in found
        ]

    def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[float]]:
        """Collective: see ``protocols.RolloutEngine``. Servers are asked in turn."""
        return self._world.from_main(lambda: self._main.score(sequences, images))

    def state(self) -> dict[str, Any]:
        """See rollouts.Engines. In lockstep it waits until nothing is wanted of older weights than
        the policy's: those are in no checkpoint."""
        self._met(0, lambda: self._main.settled())
        return self._world.from_main(lambda: self._main.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """See rollouts.Engines."""
        assert self._backend is None, "a source is restored before it begins"
        if self._world.is_main:
            self._job.store.restore(state["store"])
        self._saved = state
