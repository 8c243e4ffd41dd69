"""The steps of a recorded run once more: from a checkpoint (or the model that the run began with),
each on the experience of its record (``rollouts/step_record.py``). What is not computed again are
the responses: they are those of the record.

In the layout of the run every metric of a step must be the run's, and the weights those of the
checkpoints on the way, bit for bit, as far as the device computes alike twice. In another layout
they are rounded otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl.checkpoints import adapter_checkpoint, directory
from megatron_rl.config.keys import flat, within
from megatron_rl.config.load import validate
from megatron_rl.config.schema import Config
from megatron_rl.data.multimodal.vision import vision_of
from megatron_rl.data.reading import training_stream
from megatron_rl.data.shared import shared_data
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.models import read_architecture
from megatron_rl.reporting.metrics_file import Row, read_metrics
from megatron_rl.rollouts.rows.metrics import rollout_metrics
from megatron_rl.rollouts.step_record import FOLDER, recorded_steps
from megatron_rl.run.files import METRICS
from megatron_rl.run.run_record import (
    DATA,
    MODEL,
    NON_TRAINING,
    data_fingerprint,
    model_fingerprint,
)
from megatron_rl.run.start import CHECKPOINTS, is_run, read_config
from megatron_rl.runtime import random_state
from megatron_rl.runtime.launch import World
from megatron_rl.signals import SignalSetup
from megatron_rl.trainer.build import build_learner, build_method, build_policy
from megatron_rl.types import Prompt, first_uid
from tools.replay.read_record import Recorded, read_step

# Settings that may differ between the steps of one replay: nothing of them is computed in it.
_OF_OTHERS = (
    *NON_TRAINING,
    "reward",
    "source.requests_per_server",
    "source.request_timeout_factor",
)


@dataclass(frozen=True)
class ReplayPlan:
    """From the weights after step ``after`` (``checkpoint``; None: the model of the start) to the
    end of ``step``, by ``values``, the configuration of these steps."""

    run: Path
    after: int
    step: int
    checkpoint: Path | None
    values: Mapping[str, Any]
    world_size: int

    @property
    def record(self) -> Path:
        return self.run / FOLDER


def find_route(run: Path, step: int, after: int | None = None) -> ReplayPlan:
    """The shortest way to ``step``, or that from the weights after step ``after`` (0: the model of
    the start).

    Raises:
        ValueError: ``run`` has no record, the step is not in it, or no weights from which all steps
            are recorded are there.
    """
    if not is_run(run):
        raise ValueError(f"{run}: no folder of a run (no config.json of one in it)")
    there = recorded_steps(run / FOLDER)
    if not there:
        raise ValueError(
            f"{run}: its steps are not recorded ({FOLDER}/ is kept by source=servers"
            " source.schedule=free with source.record_gib > 0); in other runs"
            " nonfinite.bundle_step=N keeps a minibatch"
        )
    starts: dict[int, Path | None] = {0: None}  # where the weights after a step are kept whole
    for path in directory.steps(run / CHECKPOINTS):
        if directory.problem(path) is None:
            starts[directory.step_of(path) or 0] = path
    if after is not None and after not in starts:
        raise ValueError(
            f"--after {after}: {run} has no whole checkpoint of that step; it has"
            f" {_listed(starts)}, 0 being the model that the run began with"
        )
    for start in sorted(starts, reverse=True) if after is None else [after]:
        if start < step and set(range(start + 1, step + 1)) <= set(there):
            recorded = read_step(run / FOLDER, step)
            values = {**recorded.values, "run_dir": str(run)}
            return ReplayPlan(run, start, step, starts[start], values, recorded.world_size)
    asked = "" if after is None else f", and --after {after} was asked for"
    raise ValueError(
        f"--step {step}: the record of {run} has steps {_listed(there)}, and all from a"
        f" checkpoint on are needed; there are weights of steps {_listed(starts)}{asked}"
    )


def _listed(steps: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(steps)))


@dataclass(frozen=True)
class Again:
    """A step that was computed again. ``different``: metrics that are not the run's, by name: what
    was found and what the run has; None where the run has no metrics of it. ``weights``: tensors
    that are not those of the run's checkpoint of this step, None where there is none."""

    recorded: Recorded
    metrics: Mapping[str, float | None]
    different: Mapping[str, tuple[float | None, float | None]] | None
    weights: list[str] | None

    @property
    def is_equal(self) -> bool:
        return not self.different and not self.weights


class ReplayedRun:
    """Collective, as are its methods: the policy of the start of a route."""

    def __init__(self, route: ReplayPlan, config: Config, world: World) -> None:
        """``config``: of the route, maybe in another layout.

        Raises:
            ValueError: the model or the data are not those of the run any more.
        """
        self._route = route
        self._world = world
        self._config = config
        # The model gives the architecture and the tokenizer, and the weights of step 0.
        path = Path(route.values["model"]["path"])
        model = world.from_main(lambda: model_fingerprint(path))
        _check_start(route, MODEL, model, f"model.path = {path}")
        tokenizer = load_tokenizer(config.model.path)
        vision = vision_of(config.model.path, config.data)
        data = shared_data(config, world, tokenizer, vision)
        prompts = data_fingerprint(training_stream(data, config).state())
        _check_start(route, DATA, prompts, "data.train")
        method, signals = build_method(config, data)
        data = signals.prepare(data, SignalSetup(Path(config.model.path), route.run, vision, world))
        self._prompts = {prompt.uid: prompt for prompt in data.train_prompts}
        self.policy = build_policy(config, signals, vision)
        if route.checkpoint is not None:
            extra = self.policy.load(route.checkpoint)
            signals.restore(extra["signals"])
            states = extra["random_states"]
            random_state.restore(states[world.rank % len(states)])
        self._learner = build_learner(config, world, self.policy, method, signals)
        rows = world.from_main(lambda: read_metrics(route.run / METRICS))
        self._rows: dict[int, Row] = {int(row["step"] or 0): row for row in rows}

    def step(self, step: int) -> Again:
        """The next step.

        Raises:
            ValueError: it was trained with other settings than the last of the route.
        """
        recorded = read_step(self._route.record, step)
        self._check_settings(recorded)
        experience = recorded.experience(self._prompt, is_main=self._world.is_main)
        schedule = self._config.rollout.anneal.schedule
        if schedule is not None:
            experience = replace(experience, annealing=schedule.at(step))
        scored = self._learner.score(experience.at_step(step, self._config.trainer.steps))
        found = rollout_metrics(scored) | self._learner.update(step, scored)
        metrics = {name: _as_written(value) for name, value in found.items()}
        row = self._rows.get(step)
        different = None
        if row is not None:
            pairs = {name: (value, row.get(name)) for name, value in metrics.items()}
            different = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        return Again(recorded, metrics, different, self._different_weights(step))

    def _check_settings(self, recorded: Recorded) -> None:
        own = dict(flat(self._route.values))
        others = dict(flat(recorded.values))
        changed = [
            key
            for key in sorted(own.keys() | others.keys())
            if own.get(key) != others.get(key) and not within(key, _OF_OTHERS)
        ]
        if recorded.world_size != self._route.world_size:
            changed.append("the number of processes")
        if changed:
            raise ValueError(
                f"step {recorded.step} was trained with other settings than step"
                f" {self._route.step} ({', '.join(changed[:4])}); one start of the run at a time"
                " can be computed again: give --after with a checkpoint between the two"
            )

    def _prompt(self, uid: str) -> Prompt:
        """One that comes again in a step has another uid there, see ``data.loader.numbered``."""
        prompt = self._prompts.get(uid) or self._prompts.get(first_uid(uid))
        if prompt is None:
            raise ValueError(f"data.train has no prompt {uid} any more; bring its files back")
        return replace(prompt, uid=uid)

    def _different_weights(self, step: int) -> list[str] | None:
        run = self._route.run
        path = directory.step_path(run / CHECKPOINTS, step)
        if not self._world.from_main(lambda: directory.problem(path) is None):
            return None
        base = Path(self._config.model.path)
        arch, _ = read_architecture(base)
        stored = iter(adapter_checkpoint.read_hf(path, base, arch, lambda _: None))
        seen: dict[str, Tensor] = {}  # of the checkpoint, until it is compared
        different = []
        for name, tensor in self.policy.gathered_weights():
            if not self._world.is_main:
                continue  # it takes part in gathering
            while name not in seen and (pair := next(stored, None)) is not None:
                seen[pair[0]] = pair[1]
            there = seen.pop(name, None)
            if there is None or not tensor.cpu().equal(there.to(tensor.dtype)):
                different.append(name)
        return self._world.from_main(lambda: different)


def _check_start(route: ReplayPlan, fact: str, now: str | None, where: str) -> None:
    """Raises ValueError unless ``fact`` of the run's record is ``now``."""
    was = read_config(route.run).get(fact)
    if was is not None and now != was:
        raise ValueError(f"{where}: is not what {route.run} was trained with")


def _as_written(value: float) -> float | None:
    """As metrics.jsonl has it."""
    return json.loads(json.dumps(value)) if math.isfinite(value) else None


def config_of(route: ReplayPlan, *, with_bundle: bool) -> Config:
    """Of the steps of a route. Nothing but the end of the route stops it. ``with_bundle``: the
    first minibatch of the last step is written as ``nonfinite.bundle_step`` has it."""
    bundle_step = route.step if with_bundle else None
    of_tool = {"stop_after": None, "bundle_step": bundle_step}
    values = {**route.values, "nonfinite": of_tool}
    return validate(Config, values, f"the record of {route.run}")
