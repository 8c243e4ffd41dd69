"""Engines in the processes of the policy: what they generate, and who has the memory of the device
that both share."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_rl.data.token_rows import RowNumbers
from megatron_rl.protocols import Generator, Offloadable, Reward, RolloutEngine, WeightSync
from megatron_rl.rollouts.backends.launch import LaunchBackend
from megatron_rl.rollouts.dispatcher import Dispatcher, StepSummary
from megatron_rl.rollouts.environments.turns import Turns
from megatron_rl.rollouts.jobs import GenerationJob, answers_to
from megatron_rl.rollouts.logprob_check import LogprobCheck
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.rollouts.rollouts import SampledStep, open_metrics
from megatron_rl.rollouts.rows.exchange import on_main
from megatron_rl.rollouts.rows.experience import Response, Responses
from megatron_rl.rollouts.rows.metrics import Clock
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.memory import Ledger
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.types import Prompt, Sampling, SyncReport


@dataclass
class Colocation:
    """Who holds the memory of a device that policy and engine share: they take turns.

    The phases of a step, in order: update -> offload -> wake_weights -> sync -> wake_kv_cache ->
    generate -> sleep -> reload. At the end of each the ``ledger`` records memory use.

    ``offload``: what of the policy leaves the device while the engine has it. Its weights leave
    after the sync, which reads them.
    """

    policy: Offloadable
    engine: RolloutEngine
    weight_sync: WeightSync
    offload: Sequence[str]
    ledger: Ledger
    check: LogprobCheck | None = None
    owner: Literal["policy", "engine"] = "policy"
    _published: int | None = None  # None: the engine must generate nothing
    _reload_s: float = 0.0  # since the last publication

    @contextmanager
    def training(self) -> Iterator[None]:
        """See protocols.RolloutSource."""
        begin_s = time.perf_counter()
        self.to_policy()
        self._reload_s += time.perf_counter() - begin_s
        yield

    @contextmanager
    def generation(self) -> Iterator[None]:
        """See protocols.RolloutSource. When the policy has the memory (after a checkpoint, say) it
        is handed over first, without a sync unless the engine lost its weights while asleep."""
        assert self._published is not None, (
            "the engine generates with published weights: call publish first"
        )
        if self.owner == "policy":
            if self.engine.weight_version == self._published:
                with self.to_engine():
                    pass
            else:
                self._sync(self._published)
        with self.policy_restored():
            yield
        self.ledger.record("generate")

    def publish(self, version: int) -> SyncReport:
        """See protocols.RolloutSource. Reports the memory of all phases since the last publish."""
        self.ledger.record("update")
        report = self._sync(version)
        measured = self.ledger.end_step() | {"time/reload_s": self._reload_s}
        self._reload_s = 0.0
        return replace(report, measured=measured)

    def _sync(self, version: int) -> SyncReport:
        self._published = None  # whatever fails from here on, the engine generates nothing
        with self.policy_restored():
            # The policy scores first: its weights may be off the device when the engine is awake.
            expected = None if self.check is None else self.check.expected(version)
            with self.to_engine():
                report = self.weight_sync.sync(version)
                self.ledger.record("sync")
            if self.check is not None and expected is not None:
                report = self.check.check(report, expected)
        self._published = version
        return report

    @contextmanager
    def to_engine(self) -> Iterator[None]:
        """Hands the memory to the engine. Inside this context both hold their weights, to sync."""
        assert self.owner == "policy", "the engine has the memory already"
        self.owner = "engine"
        with self.policy_restored():
            self.policy.offload([part for part in self.offload if part != "weights"])
            self.ledger.record("offload")
            self.engine.wake(("weights",))
            self.ledger.record("wake_weights")
            yield
            self.policy.offload([part for part in self.offload if part == "weights"])
            self.engine.wake(("kv_cache",))
            self.ledger.record("wake_kv_cache")

    def to_policy(self) -> None:
        """Hands the memory to the policy: the engine sleeps, what was offloaded comes back. Does
        nothing when the policy has the memory."""
        if self.owner == "policy":
            return
        self.engine.sleep()
        self.ledger.record("sleep")
        self.policy.reload()
        self.ledger.record("reload")
        self.owner = "policy"

    @contextmanager
    def policy_restored(self) -> Iterator[None]:
        """On an exception gives the policy its memory back; failures of that are added as notes."""
        try:
            yield
        except BaseException as error:
            if self.owner == "engine":
                self._clean_up(error)
            raise

    def _clean_up(self, error: BaseException) -> None:
        actions = {"engine.sleep": self.engine.sleep, "policy.reload": self.policy.reload}
        for name, action in actions.items():
            try:
                action()
            except Exception as failure:  # noqa: BLE001 (noted on the exception that matters)
                error.add_note(f"Cleanup also failed: {name}(): {failure}")
        self.owner = "policy"


class ColocatedEngines:
    """Implements ``rollouts.Engines``: the engines of a launch, on which all ranks generate at the
    same time. Every token is sampled with the newest weights, and outside of ``step`` and
    ``generate`` engines are idle."""

    def __init__(
        self, backend: LaunchBackend, world: World, job: GenerationJob, colocation: Colocation
    ) -> None:
        self.has_versions = job.rules.is_partial
        self.backend = backend
        self.colocation = colocation
        self._world = world
        self._job = job
        self._dispatcher: Dispatcher | None = None  # on rank 0, from the first step on
        self._saved: Mapping[str, Any] | None = None

    @property
    def has_turns(self) -> bool:
        return self.backend.turns is not None

    def step(self, step: int, clock: Clock) -> SampledStep:
        """See rollouts.Engines, as are the other methods."""
        job = self._job
        job.plan.published(step - 1)
        dispatcher = self._main(step - 1) if self._world.is_main else None
        summary = self.backend.run(job, dispatcher, f"step {step}", clock)
        with clock("rollout"):
            # Before the tokens of the step leave the store.
            sampled = SampledStep.of(summary, job, self._world.rank)
            discarded = summary.discarded_tokens - self._carry(summary)
        metrics = open_metrics(summary.groups, job)
        summary = replace(summary, metrics=metrics, discarded_tokens=discarded)
        return sampled._replace(summary=summary)

    def _main(self, version: int) -> Dispatcher:
        """Rank 0's dispatcher, for a step sampled with weights of ``version``."""
        if self._dispatcher is None:
            # Not earlier: an evaluation in between would receive the scores that it asks for.
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
            scheduler.end.skip_to(version)  # a warm start may have had the steps in between
            scheduler.published(version)
            for worker in scheduler.queue.workers:
                scheduler.switch(worker, version)
        return self._dispatcher

    def _carry(self, summary: StepSummary) -> int:
        """Collective: drops what the step has used up, and gives every rank the tokens of responses
        that continue in the next step. Returns how many of these were sampled."""
        groups = summary.groups
        store = self._job.store
        num_kept = 0
        if groups.level is not None:
            # The ranks of a replica have the same tokens: its leader sends them.
            is_leader = self._world.rank == self.backend.leader
            mine = store.unfinished(groups, summary.ended) if is_leader else []
            for of_rank in self._world.all_gather(mine):
                num_kept += store.begin_step(of_rank)
        store.forget(groups.gone)
        store.clear_new()
        self._job.stream.forget(groups.step, groups.end)
        return num_kept

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, what: str, clock: Clock
    ) -> SampledStep:
        return self.backend.answers(
            answers_to(prompts, sampling, self._job.demonstrations), what, clock
        )

    def training(self) -> AbstractContextManager[None]:
        return self.colocation.training()

    def generation(self) -> AbstractContextManager[None]:
        return self.colocation.generation()

    def publish(self, version: int) -> SyncReport:
        return self.colocation.publish(version)

    def state(self) -> dict[str, Any]:
        return self._world.from_main(self._state)

    def _state(self) -> dict[str, Any]:
        if self._dispatcher is None and self._saved is not None:
            return {name: self._saved[name] for name in ("scheduler", "scores", "store", "prompts")}
        dispatcher = self._dispatcher or self._main(0)
        return {**dispatcher.state(), **self._job.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._job.store.restore(state["store"])
        self._dispatcher = None
        self._saved = state


class LaunchSampler:
    """Answers prompts with the engines of a launch, where nothing is trained."""

    def __init__(
        self,
        engine: Generator,
        reward: Reward,
        decode: Callable[[Sequence[int]], str],
        world: World,
        display: Display,
        turns: Turns | None = None,
    ) -> None:
        self.world = world
        self.backend = LaunchBackend(engine, RewardThread(reward, decode), world, display, turns)
        self._decode = decode

    def run(self, prompts: Sequence[Prompt], sampling: Sampling, what: str) -> Responses:
        """Collective. ``sampling.num_responses`` scored responses for each prompt."""
        sampled = self.backend.answers(answers_to(prompts, sampling), what, Clock())
        has_turns = self.backend.turns is not None
        return sampled.responses(
            self.world.rank, sampling, with_versions=False, with_sampled=has_turns
        )

    def shown(self, responses: Responses, rows: RowNumbers) -> list[Response] | None:
        """Collective: see ``exchange.on_main``."""
        return on_main(responses, rows, self._decode, self.world)
