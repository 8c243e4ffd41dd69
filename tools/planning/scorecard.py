"""What others have measured on GPUs, beside what the planner predicts for it.

    python tools/planning/scorecard.py

published.yaml has the published steps, trainings and weight syncs as runs of this project. The
planner's seconds are least ones: here every phase reaches a share of the hardware's speed, the same
one in all rows of a hardware, fitted to those rows.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_rl.config.schema import Config
from megatron_rl.models import Architecture, read_architecture
from megatron_rl.planning.engine_memory import engine_memory
from tools.plan_run import configuration, engines_of, planned, rollout_of, sync_of, train_seconds
from tools.planning.rollout_time import response_lengths
from tools.planning.simulated_rollouts import Steady
from tools.planning.sync_forecast import SyncForecast
from tools.run_page import Cluster, Page, step_parts, update_parts

PUBLISHED = Path(__file__).with_name("published.yaml")
KINDS = ("steps", "trainings", "syncs")
SPREAD = 0.9  # standard deviation of the logarithm of a response's length, before the limit
FITTED = ("H100", "GB200")  # other hardware, with too few rows, gets the shares of the first
GRID = np.geomspace(0.05, 1.0, 300)  # shares that are tried


@dataclass(frozen=True)
class Shares:
    """What each phase reaches of the speed by which its least seconds are computed."""

    generation: float
    training: float
    sync: float


@dataclass(frozen=True)
class Run:
    """What a published row was, as a run of this project."""

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
    def name(self) -> str:
        servers = f"+{self.cluster.server_gpus}" if self.cluster.server_gpus else ""
        behind = "" if self.in_turns else f"{self.config.source.staleness} behind"
        return f"{self.hardware:6}{self.model:16}{f'{self.cluster.size}{servers}':8} {behind:8}"

    def rollout(self, lengths: np.ndarray, page: Page, share: float) -> Steady:
        """Beside the update and the sync of ``page``, by engines that reach ``share``."""
        cluster = replace(self.cluster, memory_gb_s=self.cluster.memory_gb_s * share)
        cache = engine_memory(self.arch, self.config.rollout, cluster.gpu_gib).kv_cache
        engines = engines_of(self.config, self.arch, cluster, lengths, cache)
        return rollout_of(self.config, lengths, engines, page)


@dataclass(frozen=True)
class Row:
    """A run and what is known of it.

    Attributes:
        published: Seconds.
        least: Seconds of generation, training and weight sync, each alone and at full speed.
        lengths: Tokens of the responses, ``[prompts, responses]``; None where not a whole step.
        page: The plan of a whole step.
    """

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
            sync=replace(self.page.sync, seconds=self.page.sync.seconds / shares.sync),
        )
        page = replace(page, rollout=self.run.rollout(self.lengths, page, shares.generation))
        return sum(step_parts(page, self.run.config).values())


def read_run(kind: str, row: dict[str, Any], inputs: dict[str, Any], models: Path) -> Run:
    """``models``: has a folder with config.json for each model.

    Raises:
        ConfigError: overrides that a run would refuse.
    """
    about = row["run"]
    speeds = inputs["hardware"][about["hardware"]]
    cluster = Cluster(
        about["nodes"],
        host_gib=None,
        storage_gb_s=math.inf,
        server_nodes=about.get("servers", 0),
        **speeds,
    )
    common = inputs["overrides"]
    words = [common[kind], common["servers" if cluster.server_nodes else "in_turns"]]
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
        return Row(run, seconds, (0.0, 0.0, sync.seconds))
    shape = (config.batch.prompts_per_step, config.batch.responses_per_prompt)
    limit = config.rollout.max_response_tokens
    lengths = lengths_of_mean(published["mean"], math.prod(shape), limit).reshape(shape)
    if kind == "trainings":
        training = train_seconds(config, run.arch, run.cluster, lengths)
        return Row(run, seconds, (0.0, training, 0.0))
    page = planned(config, run.arch, run.cluster, lengths)
    alone = run.rollout(lengths, replace(page, train_seconds=0.0, train_idle=0.0), 1.0)
    least = (alone.seconds, sum(update_parts(page, config).values()), page.sync_seconds)
    return Row(run, seconds, least, lengths, page)


def lengths_of_mean(mean: float, count: int, limit: int) -> np.ndarray:
    """Log-normal lengths of ``SPREAD``, cut at ``limit``, whose mean is ``mean`` (by bisection)."""
    tail = math.exp(SPREAD * NormalDist().inv_cdf(0.99))
    low, high = 1.0, 1e6
    for _ in range(40):
        median = math.sqrt(low * high)
        lengths = response_lengths(count, median, tail * median, limit)
        low, high = (median, high) if lengths.mean() < mean else (low, median)
    return lengths


def fit(rows: Sequence[Row], syncs: Sequence[Row]) -> Shares:
    """The shares by which the logarithms of predicted / published have the least squares.

    Of ``syncs`` that is the geometric mean; steps and trainings are tried on a grid, those beside
    servers as the slower of the two sides.
    """
    sync = math.exp(np.mean([math.log(row.least[2] / row.published) for row in syncs]))
    error = np.zeros((len(GRID), len(GRID)))
    for row in rows:
        generation = row.least[0] / GRID[:, None]
        update = row.least[1] / GRID + row.least[2] / sync
        seconds = generation + update if row.run.in_turns else np.maximum(generation, update)
        error += np.log(seconds / row.published) ** 2
    best = np.unravel_index(np.argmin(error), error.shape)
    return Shares(float(GRID[best[0]]), float(GRID[best[1]]), sync)


def lines(rows: dict[str, list[Row]]) -> Iterator[str]:
    """The shares of each hardware; a line for each row; what the errors are together."""
    syncs = [row for row in rows["syncs"] if row.run.hardware == FITTED[0]]
    others = [*rows["steps"], *rows["trainings"]]
    shares, fitted = {}, {}
    for hardware in FITTED:
        fitted[hardware] = [row for row in others if row.run.hardware == hardware]
        shares[hardware] = fit(fitted[hardware], syncs)
        found = shares[hardware]
        yield (
            f"{hardware:6}{len(fitted[hardware])} rows: generation {found.generation:.2f} of the"
            f" memory's speed, training {found.training:.2f} of bfloat16"
        )
    yield f"{FITTED[0]:6}{len(syncs)} rows: weight sync {shares[FITTED[0]].sync:.2f} of the links"
    ratios = []
    for kind in KINDS:
        yield ""
        yield f"{kind:49}published     least  predicted  ratio  left out"
        for row in rows[kind]:
            known = syncs if kind == "syncs" else fitted.get(row.run.hardware, [])
            ours = shares.get(row.run.hardware, shares[FITTED[0]])
            ratio = row.seconds(ours) / row.published
            words = "not fitted"
            if row in known:
                rest = [each for each in known if each is not row]
                without = fit(others, rest) if kind == "syncs" else fit(rest, syncs)
                left_out = row.seconds(without) / row.published
                ratios.append((ratio, left_out))
                words = f"{left_out:8.2f}"
            least = sum(row.least) if row.run.in_turns else max(row.least)
            yield (
                f"{row.run.name}{row.published:12.2f}{least:10.2f}{ratio * row.published:11.2f}"
                f"{ratio:7.2f}  {words}"
            )
    yield ""
    yield from errors(np.array(ratios))


def errors(ratios: np.ndarray) -> Iterator[str]:
    """``ratios``: of predicted to published, ``[rows, with the row in the fit and without]``."""
    off = np.exp(np.abs(np.log(ratios)))
    for name, factors in zip(("fitted", "left out"), off.T, strict=True):
        yield (
            f"{name:9} {len(factors)} rows: off by a factor of {np.median(factors):.2f} in the"
            f" median, {factors.max():.2f} at most, {(factors > 1.5).sum()} by more than 1.5"
        )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    inputs = yaml.safe_load(PUBLISHED.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in inputs["models"].items():
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(sizes))
        rows = {
            kind: [
                read_row(kind, read_run(kind, row, inputs, Path(folder)), row["published"])
                for row in inputs[kind]
            ]
            for kind in KINDS
        }
    print("\n".join(lines(rows)))


if __name__ == "__main__":
    import time
    main()
