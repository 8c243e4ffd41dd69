"""Engines in the processes of the policy: those of a launch, and their turns with the policy on one
device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from megatron_rl.data.token_rows import RowNumbers
from megatron_rl.protocols import CheckedWeights, Generator, Reward, RolloutEngine, WeightSync
from megatron_rl.rollouts.backends.colocation import Colocation
from megatron_rl.rollouts.backends.launch import LaunchBackend, worker_name
from megatron_rl.rollouts.dispatcher import Dispatcher, StepSummary
from megatron_rl.rollouts.jobs import PromptsJob, TrainingJob
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.rollouts.rollouts import SampledStep, responses_of
from megatron_rl.rollouts.rows.exchange import on_main
from megatron_rl.rollouts.rows.experience import Response, Responses
from megatron_rl.rollouts.rows.metrics import Clock
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.types import Prompt, Sampling, SyncReport


class LaunchEngines:
    """The engines of a launch, which generate when all ranks do; every token is sampled with the
    newest weights, and outside of ``step`` and ``generate`` engines are idle."""

    def __init__(self, backend: LaunchBackend, world: World, job: TrainingJob) -> None:
        self.has_versions = job.is_partial
        self.backend = backend
        self._world = world
        self._job = job
        self._dispatcher: Dispatcher | None = None  # on rank 0, from the first step on
        self._saved: Mapping[str, Any] | None = None

    def step(self, step: int, clock: Clock) -> SampledStep:
        """See rollouts.Engines."""
        job = self._job
        job.plan.published(step - 1)
        dispatcher = self._main(step - 1) if self._world.is_main else None
        summary = self.backend.run(job, dispatcher, f"step {step}", clock)
        with clock("rollout"):
            sampled = SampledStep.of(summary, job, self._world.rank)
            self._carry(summary)
        if summary.groups.level is not None:
            metrics = {
                "source/group_age_max": summary.groups.age,
                "source/step_tokens": summary.groups.level,
                "source/open_tokens": job.store.num_tokens,
            }
            sampled = sampled._replace(summary=replace(summary, metrics=metrics))
        return sampled

    def _main(self, version: int) -> Dispatcher:
        """On rank 0, for a step by weights of ``version``."""
        if self._dispatcher is None:
            rules = self._job.rules
            if self._saved is None:
                scheduler = Scheduler(rules, step=version, version=version)
            else:
                scheduler = Scheduler.restored(rules, self._saved["scheduler"])
            self._dispatcher = self.backend.dispatcher(self._job, scheduler)
            if self._saved is not None:
                self._dispatcher.restore(self._saved)
                self._saved = None
        scheduler = self._dispatcher.scheduler
        if scheduler.version < version:
            scheduler.end.skip_to(version)  # others may have had the steps between
            scheduler.published(version)
            for replica in range(len(self.backend.leaders)):
                scheduler.switch(worker_name(replica), version)
        return self._dispatcher

    def _carry(self, summary: StepSummary) -> None:
        """Collective: drops what the step has used up, and gives every rank what the others have
        got of responses that continue."""
        groups = summary.groups
        store = self._job.store
        if groups.level is not None:
            is_leader = self._world.rank == self.backend.leader
            mine = store.unfinished(groups, summary.ended) if is_leader else []
            for of_rank in self._world.all_gather(mine):
                store.begin_step(of_rank)
        store.forget([*groups.groups, *groups.refused])
        store.clear_new()
        self._job.stream.forget(groups.step, groups.end)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, what: str, clock: Clock
    ) -> Responses:
        """See rollouts.Engines."""
        job = PromptsJob(prompts, sampling, self._job.demonstrations)
        return generated(
            job, self.backend, self._world, what, clock, with_versions=self.has_versions
        )

    def state(self) -> dict[str, Any]:
        """See rollouts.Engines."""
        return self._world.from_main(self._state)

    def _state(self) -> dict[str, Any]:
        if self._dispatcher is None and self._saved is not None:
            return {name: self._saved[name] for name in ("scheduler", "scores", "store", "prompts")}
        dispatcher = self._dispatcher or self._main(0)
        prompts = self._job.stream.state()
        return {**dispatcher.state(), "store": self._job.store.state(), "prompts": prompts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See rollouts.Engines."""
        self._job.store.restore(state["store"])
        self._dispatcher = None
        self._saved = state


def generated(
    job: PromptsJob,
    backend: LaunchBackend,
    world: World,
    what: str,
    clock: Clock,
    *,
    with_versions: bool = False,
) -> Responses:
    """Collective: scored responses to the prompts of a job."""
    dispatcher = backend.dispatcher(job, Scheduler(job.rules)) if world.is_main else None
    summary = backend.run(job, dispatcher, what, clock)
    _, prompts, completions, _ = SampledStep.of(summary, job, world.rank)
    return responses_of(
        prompts, summary.answers, completions, world.rank, with_versions=with_versions
    )


class LaunchSampler:
    """Answers prompts with the engines of a launch, where nothing is trained."""

    def __init__(
        self,
        engine: Generator,
        reward: Reward,
        decode: Callable[[Sequence[int]], str],
        world: World,
        display: Display,
    ) -> None:
        self.world = world
        self.backend = LaunchBackend(engine, RewardThread(reward, decode), world, display)
        self._decode = decode

    def run(self, prompts: Sequence[Prompt], sampling: Sampling, what: str) -> Responses:
        """Collective. ``sampling.num_responses`` scored responses for each prompt."""
        return generated(PromptsJob(prompts, sampling), self.backend, self.world, what, Clock())

    def shown(self, responses: Responses, rows: RowNumbers) -> list[Response] | None:
        """Collective: see ``exchange.on_main``."""
        return on_main(responses, rows, self._decode, self.world)


class ColocatedEngines:
    """Policy and engine in the same processes, on the same devices, taking turns.

    ``weight_sync`` hands the memory over too (``ColocatedSync``).
    """

    def __init__(
        self,
        launch: LaunchEngines,
        policy: CheckedWeights,
        engine: RolloutEngine,
        weight_sync: WeightSync,
        colocation: Colocation,
    ) -> None:
        self.launch = launch
        self.engine = engine
        self.weight_sync = weight_sync
        self.colocation = colocation
        self._policy = policy
        self._clock = Clock()
        self._published: int | None = None  # None: the engine must generate nothing

    @property
    def has_versions(self) -> bool:
        return self.launch.has_versions

    def step(self, step: int, clock: Clock) -> SampledStep:
        """See rollouts.Engines, as are the other methods."""
        return self.launch.step(step, clock)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, what: str, clock: Clock
    ) -> Responses:
        return self.launch.generate(prompts, sampling, what, clock)

    def state(self) -> dict[str, Any]:
        return self.launch.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.launch.restore(state)

    @contextmanager
    def training(self) -> Iterator[None]:
        """See rollouts.Engines."""
        with self._clock("reload"):
            self.colocation.to_policy()
        yield

    @contextmanager
    def generation(self) -> Iterator[None]:
        """See rollouts.Engines. When the policy has the memory (after a checkpoint, say) it
        is handed over first, without a sync unless the engine lost its weights in its sleep."""
        assert self._published is not None, (
            "the engine generates with published weights: call publish first"
        )
        if self.colocation.owner == "policy":
            if self.engine.weight_version == self._published:
                with self.colocation.to_engine():
                    pass
            else:
                self._sync(self._published)
        with self.colocation.policy_restored():
            yield
        self.colocation.ledger.record("generate")

    def publish(self, version: int) -> SyncReport:
        """See rollouts.Engines. The report has the memory of all phases since the last one.

        Weights change in an update only: those that are checked here are the ones that are saved
        and exported.
        """
        self._policy.check_weights(version)
        self.colocation.ledger.record("update")
        report = self._sync(version)
        measured = self.colocation.ledger.end_step()
        measured["time/reload_s"] = self._clock.seconds["reload"]
        self._clock = Clock()
        return replace(report, measured=measured)

    def _sync(self, version: int) -> SyncReport:
        self._published = None  # whatever fails from here on, the engine generates nothing
        with self.colocation.policy_restored():
            report = self.weight_sync.sync(version)
        self._published = version
        return report
