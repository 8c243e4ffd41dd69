"""The training loop. Readable top to bottom: run() is a run, step() is a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_rl.data.packing import plan_microbatches
from megatron_rl.data.shared_prompts import plan_shared_prompts
from megatron_rl.loss import Method
from megatron_rl.protocols import Entropy, Policy
from megatron_rl.runtime import failure
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.memory import resident_gib
from megatron_rl.trainer.evaluate import Evaluator
from megatron_rl.trainer.handover import HandOver
from megatron_rl.trainer.health import Health, Minibatch
from megatron_rl.trainer.metrics import Clock, entropy_metrics, mismatch_metrics, rollout_metrics, sync_metrics, update_metrics
from megatron_rl.trainer.objective import MinibatchLoss, Scored, on_cpu, response_batch
from megatron_rl.trainer.rollouts import Experience, NothingToLearn, Rollouts
from megatron_rl.trainer.run_folder import RunFolder
from megatron_rl.trainer.settings import Schedule
from megatron_rl.types import TokenScores

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """The objects a trainer drives; ``trainer/build.py`` makes them."""

    policy: Policy
    hand_over: HandOver
    method: Method
    rollouts: Rollouts
    evaluator: Evaluator
    folder: RunFolder
    world: World
    stop_requested: Callable[[], bool]
    display: Display
    health: Health


class Trainer:
    def __init__(self, parts: Parts, schedule: Schedule) -> None:
        self.parts, self.schedule = parts, schedule

    def run(self) -> None:
        """Trains to ``num_steps``, until the held-out score has stopped rising, or to the next step boundary after a stop request
        (then leaves a checkpoint and a ``requeue`` marker)."""
        parts, plan = self.parts, self.schedule
        parts.display.line(f"results go to {parts.folder.path}")
        finished = parts.folder.resume(parts.policy, parts.rollouts)
        failure.saved(finished)
        with parts.display.phase("first weight sync"):
            parts.hand_over.to_engine(finished)
        if finished == 0 and plan.evaluate_at_start:
            start = {"step": 0} | self._evaluate()
            parts.folder.log(start)
            parts.folder.scores.note(start)
        for step in range(finished + 1, plan.num_steps + 1):
            if parts.folder.scores.exhausted:
                log.info("evaluation.stop_after: %s, and none better since: the run ends", parts.folder.scores.as_text())
                break
            metrics = self.step(step)
            if self._evaluation_due(step):
                metrics |= self._evaluate()
            parts.folder.log(metrics)
            improved = parts.folder.scores.note(metrics)
            stop = parts.world.any(parts.stop_requested())
            self._keep(step, improved, stop or step == plan.num_steps or parts.folder.scores.exhausted)
            if stop:
                parts.folder.request_requeue(step)
                return
        parts.folder.finish(parts.policy)

    def _keep(self, step: int, improved: bool, ends: bool) -> None:
        """The checkpoint and the export that are due after ``step``. ``improved``: it has the best held-out score so far."""
        parts, plan = self.parts, self.schedule
        save = ends or (plan.save_best and improved) or (plan.save_every > 0 and step % plan.save_every == 0)
        export = plan.export_every > 0 and step % plan.export_every == 0
        if save or export:
            parts.hand_over.to_policy()
        if save:
            parts.folder.save(step, parts.policy, parts.rollouts)
            failure.saved(step)
        if export:
            parts.folder.export(step, parts.policy)

    def step(self, step: int) -> dict[str, float]:
        """One rollout phase, its optimizer steps and the weight sync; returns the metrics of the step."""
        parts, clock = self.parts, Clock()
        with clock("step"):
            with parts.hand_over.generation():
                experience = self._collect(step, clock)
            with clock("reload"):
                parts.hand_over.to_policy()
            with clock("logprob"):
                scored = self._score(experience)
            with clock("update"):
                old, updated = self._update(step, scored)
            mismatch = mismatch_metrics(old.logprobs, experience.sampler_logprobs)
            parts.health.check_mismatch(step, mismatch, skipped=updated.get("optim/skipped", 0) > 0)
            with clock("sync"):
                synced = parts.hand_over.to_engine(step)
        return {
            "step": step,
            **rollout_metrics(experience),
            **entropy_metrics(old),
            **updated,
            **mismatch,
            **sync_metrics(synced),
            **{f"time/{phase}_s": seconds for phase, seconds in clock.seconds.items()},
            "throughput/response_tokens_per_s": int(experience.sequences.response_lengths.sum()) / clock.seconds["step"],
            "memory/rss_gib": resident_gib(),
            **parts.hand_over.ledger.end_step(),
        }

    def _collect(self, step: int, clock: Clock) -> Experience:
        """The responses of the step. Some are written down first: whatever stops the run in this
        step, they show what the policy answered."""
        parts = self.parts
        try:
            experience = parts.rollouts.collect(step, clock)
        except NothingToLearn as error:
            parts.folder.log_samples(step, error.responses)
            raise
        parts.folder.log_samples(step, experience.responses)
        return experience

    def _score(self, experience: Experience) -> Scored:
        """Reference and old logprobs; the old ones are left to the update where that is the only one."""
        wants_reference, wants_old = self.parts.method.needs.ref_logprobs, not self._only_update(experience)
        split = self._pack_all(experience) if wants_reference or wants_old else []
        reference = self._logprobs(experience, split, reference=True) if wants_reference else None
        return Scored(experience, self._logprobs(experience, split) if wants_old else None, reference)

    def _logprobs(self, experience: Experience, split: list[list[int]], *, reference: bool = False) -> TokenScores:
        entropy = self.parts.method.needs.entropy != "none" and not reference
        return on_cpu(self.parts.policy.logprobs(experience.sequences, split, reference=reference, entropy=entropy))

    def _only_update(self, experience: Experience) -> bool:
        """Whether this rollout phase has one optimizer step, and nothing before it needs the old logprobs."""
        num_groups = int(experience.group_ids[-1]) + 1
        one = self.schedule.updates_per_rollout == 1 and num_groups <= self.schedule.prompts_per_minibatch
        return one and self.parts.policy.one_format and not self.parts.method.needs.response_statistics

    def _update(self, step: int, scored: Scored) -> tuple[TokenScores, dict[str, float]]:
        """Credit once, then one optimizer step per minibatch; a minibatch without kept rows takes none. Also returns the old scores."""
        parts, experience, needed = self.parts, scored.experience, self.parts.method.needs.entropy
        credit = parts.method.credit(response_batch(scored, parts.method))
        if scored.old is None and not credit.keep.all():
            # An update over some rows has the scores of these only.
            scored = replace(scored, old=self._logprobs(experience, self._pack_all(experience)))
        entropy: Entropy = needed if needed != "metric" else "value" if scored.old is None else "none"
        updates, empty = [], 0
        for number, rows in enumerate(self._minibatches(step, experience, credit.keep), start=1):
            if not rows:
                empty += 1
                continue
            loss, split = MinibatchLoss(parts.method, scored, credit, rows), self._pack(experience, rows)
            minibatch = Minibatch(step, number, scored, credit, rows, split, entropy)
            parts.health.before(minibatch)
            updates.append(parts.policy.update(experience.sequences, split, loss, entropy=entropy, scores=scored.old is None))
            parts.health.after(minibatch, updates[-1])
        metrics = {key: float(value) for key, value in credit.metrics.items()}
        old = scored.old
        if old is None:
            assert updates[0].scores is not None, "protocols.Policy.update returns the scores it is asked for"
            old = on_cpu(updates[0].scores)
        return old, metrics | update_metrics(updates) | {"optim/empty_minibatches": empty}

    def _minibatches(self, step: int, experience: Experience, keep: torch.Tensor) -> Iterator[list[int]]:
        """Kept rows of whole groups, ``prompts_per_minibatch`` groups at a time; later passes in a fresh seeded order."""
        num_groups = int(experience.group_ids[-1]) + 1
        order = torch.arange(num_groups)
        for update in range(self.schedule.updates_per_rollout):
            if update:
                seed = hash((self.schedule.seed, step, update)) % 2**63
                order = torch.randperm(num_groups, generator=torch.Generator().manual_seed(seed))
            for groups in order.split(self.schedule.prompts_per_minibatch):
                yield (torch.isin(experience.group_ids, groups) & keep).nonzero().flatten().tolist()

    def _pack_all(self, experience: Experience) -> list[list[int]]:
        return self._pack(experience, range(len(experience.responses)))

    def _pack(self, experience: Experience, rows: Sequence[int]) -> list[list[int]]:
        policy, sequences = self.parts.policy, experience.sequences
        sizes = dict(
            data_parallel_size=policy.data_parallel_size,
            tokens_per_microbatch=self.schedule.tokens_per_microbatch,
            multiple=policy.microbatch_multiple,
        )
        if policy.shares_prompts and sequences.prompt_ids is not None:
            return plan_shared_prompts(sequences, rows, **sizes)[policy.data_parallel_rank]
        return plan_microbatches(sequences.lengths.tolist(), rows, **sizes)[policy.data_parallel_rank]

    def _evaluation_due(self, step: int) -> bool:
        plan = self.schedule
        if step == plan.num_steps:
            return plan.evaluate_at_end
        return bool(plan.evaluate_every) and step % plan.evaluate_every == 0

    def _evaluate(self) -> dict[str, float]:
        clock = Clock()
        with clock("evaluation"), self.parts.hand_over.generation():
            metrics = self.parts.evaluator.run(Clock())
        return metrics | {"time/evaluation_s": clock.seconds["evaluation"]}
