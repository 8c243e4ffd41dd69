"""The training loop. Readable top to bottom: run() is a run, step() is a step."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from megatron_rl.config.schema import TrainerConfig
from megatron_rl.evaluation.evaluator import Evaluator
from megatron_rl.protocols import RolloutSource
from megatron_rl.rollouts.rows.experience import Experience
from megatron_rl.rollouts.rows.metrics import Clock, rollout_metrics, sync_metrics
from megatron_rl.run.run_folder import RunFolder
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.guard import failure
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.memory import resident_gib
from megatron_rl.runtime.profiling import Profiler
from megatron_rl.trainer.learner import Learner
from megatron_rl.trainer.warm_start import WarmStartLearner
from megatron_rl.types import SyncReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainer:
    """The loop and the objects it drives; ``trainer/build.py`` makes them."""

    config: TrainerConfig
    source: RolloutSource[Experience]
    learner: Learner | WarmStartLearner
    evaluator: Evaluator
    folder: RunFolder
    world: World
    display: Display
    profiler: Profiler
    stop_requested: Callable[[], bool]

    def run(self) -> None:
        """Trains to ``num_steps``, until the held-out score has stopped rising, or to the next step
        boundary after a stop request (then leaves a checkpoint and a ``requeue`` marker)."""
        try:
            self._train()
        except Exception:
            self.folder.end_save()
            raise

    def _train(self) -> None:
        folder = self.folder
        num_steps = self.config.steps
        self.display.line(f"results go to {folder.path}")
        with self.display.phase("restoring the run", announced=False, name="restore"):
            finished = folder.resume(self.learner.policy, self.source)
        failure.saved(finished)
        with self.display.phase("first weight sync", name="sync"):
            self.source.publish(finished)
        self.world.begin_training()
        if finished == 0 and self.evaluator.due(0, num_steps):
            self._log({"step": 0} | self._evaluate())
        for step in range(finished + 1, num_steps + 1):
            if folder.scores.exhausted:
                best = folder.scores.as_text()
                logger.info("evaluation.stop_after: %s, and none better since: the run ends", best)
                break
            with self.profiler.step(step):
                metrics = self.step(step)
            if self.evaluator.due(step, num_steps):
                metrics |= self._evaluate()
            improved = self._log(metrics)
            folder.check_save()
            stop = self.world.any(self.stop_requested())
            ends = stop or step == num_steps or folder.scores.exhausted
            self._keep(step, save=ends or folder.save_due(step, improved), ends=ends)
            if stop:
                folder.request_requeue(step)
                return
        with self.source.training():
            folder.finish(self.learner.policy)

    def step(self, step: int) -> dict[str, float]:
        """A rollout, its optimizer steps, the publication of the weights; returns the metrics."""
        clock = Clock()
        with clock("step"):
            experience = self.source.next(step)
            with self.source.training():
                with clock("logprob"):
                    experience = experience.at_step(step, self.config.steps)
                    experience = self.learner.score(experience)
                with clock("update"):
                    metrics = self.learner.update(step, experience)
            with clock("sync"):
                synced = self.source.publish(step)
        clock.add(experience.seconds)
        return {"step": step, **_step_metrics(experience, metrics, synced, clock)}

    def _log(self, metrics: dict[str, float]) -> bool:
        """Logs ``metrics``; returns whether they hold the best held-out score so far. The first row
        of a start also holds the seconds of its phases."""
        seconds = self.display.seconds
        metrics |= {f"time/start_{name}_s": seconds.pop(name) for name in list(seconds)}
        self.folder.log(metrics)
        return self.folder.scores.note(metrics)

    def _keep(self, step: int, *, save: bool, ends: bool) -> None:
        """Makes the checkpoint and the export that are due after ``step``. The last checkpoint of a
        run is complete when this returns."""
        export = self.folder.export_due(step)
        if not (save or export):
            return
        with self.source.training():
            if save:
                self.folder.save(step, self.learner.policy, self.source, wait=ends)
            if export:
                self.folder.export(step, self.learner.policy)

    def _evaluate(self) -> dict[str, float]:
        clock = Clock()
        with clock("evaluation"), self.source.generation():
            metrics = self.evaluator.run()
        return metrics | {"time/evaluation_s": clock.seconds["evaluation"]}


def _step_metrics(
    experience: Experience, learned: dict[str, float], synced: SyncReport, clock: Clock
) -> dict[str, float]:
    num_tokens = int(experience.loss_tokens.sum())
    num_sampled = experience.responses.num_sampled_tokens
    num_left = experience.discarded_tokens + experience.dropped_tokens + experience.excluded_tokens
    return {
        **rollout_metrics(experience),
        **learned,
        **sync_metrics(synced),
        **{f"time/{phase}_s": seconds for phase, seconds in clock.seconds.items()},
        "throughput/response_tokens_per_s": num_tokens / clock.seconds["step"],
        "throughput/discarded_tokens_share": num_left / max(num_left + num_sampled, 1),
        "memory/rss_gib": resident_gib(),
        **synced.measured,
    }
