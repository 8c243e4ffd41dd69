"""Published steps, trainings and weight syncs as runs of this project, with their plans."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from megatron_rl.config.schema import Config
from megatron_rl.models import Architecture, read_architecture
from megatron_rl.planning.engine_memory import engine_memory
from tools.plan_run import (
    configuration,
    engines_of,
    planned,
    rollout_of,
    sync_of,
    tensor_message_seconds,
    train_seconds,
)
from tools.planning.rollout_time import response_lengths
from tools.planning.simulated_rollouts import Steady
from tools.planning.sync_forecast import SyncForecast
from tools.run_page import Cluster, Page, step_parts, update_parts

KINDS = ("steps", "trainings", "syncs")
SPREAD = 0.9  # standard deviation of the logarithm of a response's length, before the limit


@dataclass(frozen=True)
class Shares:
    """What each phase reaches of the speed by which its least seconds are computed."""

    generation: float
    training: float
    sync: float


@dataclass(frozen=True)
class Run:
    """What was published, as a run of this project."""

    hardware: str
    model: str
    config: Config
    arch: Architecture
    cluster: Cluster

    @property
    def in_turns(self) -> bool:
        """Whether engines and policy share GPUs, so that the seconds of the phases add up."""
        return not self.config.source.is_servers

    @property
    def gpus(self) -> str:
        servers = self.cluster.server_gpus
        return f"{self.cluster.size}+{servers}" if servers else f"{self.cluster.size}"

    def rollout(self, lengths: np.ndarray, page: Page, share: float) -> Steady:
        """Beside the update and the sync of ``page``, by engines that reach ``share``."""
        cluster = replace(self.cluster, memory_gb_s=self.cluster.memory_gb_s * share)
        engine = engine_memory(self.arch, self.config.rollout, cluster.gpu_gib)
        engines = engines_of(self.config, self.arch, cluster, lengths, engine)
        return rollout_of(self.config, lengths, engines, page)


@dataclass(frozen=True, eq=False)
class Row:
    """A run and what is known of it.

    Attributes:
        kind: One of ``KINDS``.
        published: Seconds.
        least: Seconds of generation, training and weight sync, each alone and at full speed.
        lengths: Tokens of the responses, ``[prompts, responses]``; None where not a whole step.
        page: The plan of a whole step.
    """

    kind: str
    run: Run
    published: float
    least: tuple[float, float, float]
    lengths: np.ndarray | None = None
    page: Page | None = None

    def seconds(self, shares: Shares) -> float:
        """As planned where every phase reaches its share."""
        if self.lengths is None or self.page is None:
            of_phase = (shares.generation, shares.training, shares.sync)
            return sum(least / share for least, share in zip(self.least, of_phase, strict=True))
        assert isinstance(self.page.sync, SyncForecast)
        page = replace(
            self.page,
            train_seconds=self.page.train_seconds / shares.training,
            tensor_messages=self.page.tensor_messages / shares.training,
            offload_seconds=self.page.offload_seconds / shares.training,
            sync=replace(self.page.sync, seconds=self.page.sync.seconds / shares.sync),
        )
        page = replace(page, rollout=self.run.rollout(self.lengths, page, shares.generation))
        return sum(step_parts(page, self.run.config).values())


def read_rows(inputs: dict[str, Any]) -> list[Row]:
    """The rows of published.yaml, planned.

    Raises:
        ConfigError: overrides that a run would refuse.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_models(inputs, Path(folder))
        for kind in KINDS:
            for row in inputs[kind]:
                run = read_run(kind, row, inputs, Path(folder))
                rows.append(read_row(kind, run, row["published"]))
    return rows


def write_models(inputs: dict[str, Any], folder: Path) -> None:
    """A folder with config.json for each model."""
    for name, sizes in inputs["models"].items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(sizes))


def read_run(kind: str, row: dict[str, Any], inputs: dict[str, Any], models: Path) -> Run:
    """``models``: what ``write_models`` has written."""
    about = row["run"]
    cluster = Cluster(
        about["nodes"],
        host_gib=None,
        storage_gb_s=math.inf,
        server_nodes=about.get("servers", 0),
        **inputs["hardware"][about["hardware"]],
    )
    common = inputs["overrides"]
    words = [common["servers" if cluster.server_nodes else "in_turns"], common[kind]]
    words += [row["overrides"], f"model.path={models / about['model']}"]
    options = argparse.Namespace(overrides=" ".join(words).split(), model=None)
    config = configuration(options, models, cluster)
    arch, _ = read_architecture(Path(config.model.path))
    return Run(about["hardware"], about["model"], config, arch, cluster)


def read_row(kind: str, run: Run, published: dict[str, float]) -> Row:
    """A row with its plan at full speed."""
    config, seconds = run.config, published["seconds"]
    if kind == "syncs":
        sync = sync_of(config, run.arch, run.cluster)
        assert isinstance(sync, SyncForecast)
        return Row(kind, run, seconds, (0.0, 0.0, sync.seconds))
    shape = (config.batch.prompts_per_step, config.batch.responses_per_prompt)
    limit = config.rollout.max_response_tokens
    lengths = lengths_of_mean(published["mean"], math.prod(shape), limit).reshape(shape)
    if kind == "trainings":
        training = train_seconds(config, run.arch, run.cluster, lengths)
        training += tensor_message_seconds(config, run.arch, run.cluster, lengths)
        return Row(kind, run, seconds, (0.0, training, 0.0))
    page = planned(config, run.arch, run.cluster, lengths)
    nothing = dict(train_seconds=0.0, train_idle=0.0, tensor_messages=0.0, offload_seconds=0.0)
    alone = run.rollout(lengths, replace(page, **nothing), 1.0)
    least = (alone.seconds, sum(update_parts(page, config).values()), page.sync_seconds)
    return Row(kind, run, seconds, least, lengths, page)


def lengths_of_mean(mean: float, count: int, limit: int) -> np.ndarray:
    """Log-normal lengths of ``SPREAD``, cut at ``limit``, whose mean is ``mean`` (by bisection)."""
    tail = math.exp(SPREAD * NormalDist().inv_cdf(0.99))
    low, high = 1.0, 1e6
    for _ in range(40):
        median = math.sqrt(low * high)
        lengths = response_lengths(count, median, tail * median, limit)
        low, high = (median, high) if lengths.mean() < mean else (low, median)
    return lengths
