"""Engines on other devices: generation and training at the same time, on vLLM servers.

Rank 0 asks the servers (``servers.py``), all ranks push weights (``weight_sync/fleet/fleet.py``);
``scheduling/README.md`` says how. Servers come and go. One that is lost is marked dead, and others
answer what it was asked. One that comes gets the weights at the next publication, or at once where
the trainer waits for it. Where none is left the trainer logs it, leaves a checkpoint where it can,
and waits.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_rl.rollouts.backends.readiness import FleetEvent, NoServerError
from megatron_rl.rollouts.backends.servers import ServerBackend
from megatron_rl.rollouts.jobs import GenerationJob, answers_to
from megatron_rl.rollouts.logprob_check import LogprobCheck
from megatron_rl.rollouts.rollouts import SampledStep
from megatron_rl.rollouts.rows.metrics import Clock
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.types import Image, Prompt, Sampling, SyncReport
from megatron_rl.weight_sync.fleet.fleet import FleetSync
from megatron_rl.weight_sync.fleet.weight_history import WeightHistory

Result = TypeVar("Result")
_WITHOUT_CHECKPOINT = (
    "; without a checkpoint, since responses are open that want older weights than the policy's"
)
logger = logging.getLogger(__name__)


@dataclass
class ServerEngines:
    """Implements ``rollouts.Engines``; see the head of this file.

    Attributes:
        held: Weights that the fleet takes in place of the policy's, where servers may still need
            those of the version before.
        make_backend: Makes the backend of rank 0, from a saved state.
        save: Leaves a checkpoint of a finished step.
        checks: Due at some publications; None: never.
        has_turns: Whether environments append to responses.
    """

    world: World
    fleet: FleetSync
    held: WeightHistory | None
    make_backend: Callable[[Mapping[str, Any] | None], ServerBackend]
    save: Callable[[int], None]
    display: Display
    job: GenerationJob
    checks: LogprobCheck | None = None
    has_turns: bool = False
    has_versions = True
    replica = 0  # for the logprob check: all servers are one
    _backend: ServerBackend | None = None
    _saved: Mapping[str, Any] | None = None
    _published: int = -1

    @property
    def _main(self) -> ServerBackend:
        """The backend, on rank 0."""
        if self._backend is None:
            self._backend = self.make_backend(self._saved)
            self._saved = None
        return self._backend

    def step(self, step: int, clock: Clock) -> SampledStep:
        """See rollouts.Engines, as are the other methods."""
        what = f"step {step}"
        phase = self.display.phase(f"{what}: waiting for responses", announced=False)
        with clock("rollout"), phase:
            sampled = self._sampled(self.job, step - 1, lambda: self._next(step, what))
            if not self.world.is_main:
                self.job.stream.forget(sampled.summary.groups.step, sampled.summary.groups.end)
            return sampled

    def _next(self, step: int, what: str) -> SampledStep | FleetEvent:
        """Rank 0: a step when it has its groups."""
        event = self._main.wait(self.display.generating(what))
        if isinstance(event, FleetEvent):
            return event
        sampled = self._main.take()
        groups = sampled.summary.groups
        assert groups.step == step - 1, f"the scheduler is at step {groups.step + 1}"
        spans = [answer.spans[0] for answer in sampled.summary.answers]
        age = step - 1 - min((one.version for one in spans if one.version >= 0), default=step - 1)
        # Partial rollouts have an age in steps, which the scheduler bounds.
        if groups.level is None and age > self.job.rules.staleness:
            raise RuntimeError(
                f"step {step}: a response is {age} updates old,"
                f" source.staleness is {self.job.rules.staleness}"
            )
        return sampled

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, what: str, clock: Clock
    ) -> SampledStep:
        """Runs beside the servers' work for training. The tokens lie on rank 0."""
        known = self.job.demonstrations
        job = answers_to(prompts, sampling, known, lockstep=self.job.rules.lockstep)
        with clock("rollout"), self.display.phase(what, announced=False):
            return self._sampled(job, 0, lambda: self._main.generate(job))

    def _sampled(
        self, job: GenerationJob, finished: int, work: Callable[[], SampledStep | FleetEvent]
    ) -> SampledStep:
        """Collective: what ``work`` gives on rank 0, whose tokens stay there."""
        mine: list[SampledStep] = []

        def on_main() -> Any:
            found = work()
            if isinstance(found, FleetEvent):
                return found
            mine.append(found)
            return found.summary

        summary = self._met(finished, on_main)
        return mine[0] if mine else SampledStep.of(summary, job, self.world.rank)

    def training(self) -> AbstractContextManager[None]:
        """Policy and engines share no device: nothing is moved."""
        return nullcontext()

    generation = training

    def publish(self, version: int) -> SyncReport:
        """In lockstep it waits until all that needs the old weights is sampled; where weights are
        staged, all that needs those before them. A server that does not take them is marked dead.
        """
        if self._published < 0 < version and self._saved is None:
            raise ValueError(
                f"resume: step {version} has no rollouts that source=servers could resume from (the"
                " prompts or the source have changed); start with resume=never in a new run_dir"
            )
        expected = None if self.checks is None else self.checks.expected(version)
        servers = self._met(0, lambda: self._main.drained(version))
        if self.held is not None:
            self.held.hold(version)
        self.fleet.keep(servers)
        # After the drain, which may still sample as hooks decided for older versions; before the
        # push, after which requests ask for this version.
        self.job.plan.published(version)
        self._published = version
        report = self._push(servers, version, staged=self.job.rules.staleness > 0)
        if self.checks is None or expected is None:
            return report
        try:
            return self.checks.check(report, expected)
        except NoServerError:  # on every rank; servers that join are compared at the next check
            return report

    def _push(
        self, servers: Mapping[str, str], version: int, *, staged: bool = False
    ) -> SyncReport:
        """Collective: weights of a published version into these servers."""
        if self.held is not None:
            self.held.use(version)
        report = self.fleet.sync(version, servers, staged=staged)
        updated = {name: servers[name] for name in report.updated}
        self.world.from_main(
            lambda: self._main.published(version, updated, report.lost, staged=staged)
        )
        return report.sync

    def _met(self, finished: int, work: Callable[[], Result | FleetEvent]) -> Result:
        """Collective: what ``work`` gives on rank 0, once there are servers for it. Servers that
        join get the published weights. ``finished``: the last step, for a checkpoint; 0 where the
        policy is already further."""
        while True:
            outcome = self.world.from_main(work)
            if not isinstance(outcome, FleetEvent):
                return outcome
            if outcome.kind == "join":
                version = self._published if outcome.version is None else outcome.version
                self._push(outcome.servers, version)
            else:
                self._wait_for_servers(finished, outcome)

    def _wait_for_servers(self, finished: int, event: FleetEvent) -> None:
        """No server is left: leaves a checkpoint, unless open responses in lockstep need the
        weights of the version before, which no checkpoint has."""
        if self.world.is_main:
            logger.warning(
                "no server is left: the run waits for one to register in run_dir/servers"
                " (python -m megatron_rl.serve)%s",
                "" if event.is_settled else _WITHOUT_CHECKPOINT,
            )
        if finished > 0 and event.is_settled:
            self.save(finished)

    def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[float]]:
        """Collective: see ``protocols.RolloutEngine``. Servers are asked in turn."""
        return self.world.from_main(lambda: self._main.score(sequences, images))

    def state(self) -> dict[str, Any]:
        """In lockstep it waits until nothing needs older weights than the policy's, which no
        checkpoint has."""
        self._met(0, lambda: self._main.settled())
        return self.world.from_main(lambda: self._main.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        assert self._backend is None, "a source is restored before it begins"
        if self.world.is_main:
            self.job.store.restore(state["store"])
        self._saved = state
