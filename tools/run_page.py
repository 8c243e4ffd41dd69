"""The page that plan_run.py prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.rules.layout_rules import replica_ranks
from megatron_rl.config.schema import Config
from megatron_rl.planning.engine_memory import GIB
from megatron_rl.planning.memory import StageMemory
from megatron_rl.planning.phases import MemoryBudget, demands
from tools.planning.simulated_rollouts import Steady
from tools.planning.sync_forecast import SyncForecast

SHARE_THAT_LIMITS = 0.15  # of a step, or of the engines' time
HOST_LINK_GB_S = 25.0  # of a GPU to the memory of its host: assumed, PCIe 4.0 with 16 lanes


@dataclass(frozen=True)
class Cluster:
    """``nodes`` of ``gpus`` each, and ``server_nodes`` more for vLLM servers; speeds in GB/s of one
    GPU, but ``storage_gb_s`` of all together; ``tflops``: of one GPU."""

    nodes: int
    gpus: int
    gpu_gib: float
    host_gib: float | None
    memory_gb_s: float
    nvlink_gb_s: float
    network_gb_s: float
    storage_gb_s: float
    tflops: float
    server_nodes: int = 0

    @property
    def size(self) -> int:
        """GPUs of the trainer."""
        return self.nodes * self.gpus

    @property
    def server_gpus(self) -> int:
        return self.server_nodes * self.gpus


@dataclass(frozen=True)
class Page:
    """What is known of a run before it.

    ``server_gib``: of a GPU of a server, None without servers; ``staged_bytes``: of the host of a
    server, for each GPU, where new weights wait beside those in use; ``rollout``: of a step of
    rollouts, or of a whole step where engines sample while the policy trains;
    ``checkpoint_seconds``: until one is written; ``checkpoint_waits``: share of them that the run
    waits for.
    """

    stages: Sequence[StageMemory]
    server_gib: float | None
    staged_bytes: int
    too_large: Sequence[str]
    rollout: Steady
    train_seconds: float
    train_idle: float
    tensor_messages: float
    offload_seconds: float
    sync: SyncForecast | str
    checkpoint_seconds: float
    checkpoint_waits: float

    @property
    def sync_seconds(self) -> float:
        return 0.0 if isinstance(self.sync, str) else self.sync.seconds

    @property
    def switch_seconds(self) -> float:
        """Of a server that goes over to staged weights, by the rate of its memory alone."""
        return self.staged_bytes / (HOST_LINK_GB_S * 1e9)


def is_beside_training(config: Config) -> bool:
    """Whether engines sample while the policy trains."""
    return config.source.is_servers and config.source.staleness > 0


def lines(page: Page, config: Config, cluster: Cluster, lengths: np.ndarray) -> Iterator[str]:
    parallel, rollout = config.parallel, config.rollout
    data_ranks = cluster.size // replica_ranks(parallel)
    gpus = f"{cluster.gpus} of {cluster.gpu_gib:g} GiB"
    yield f"{cluster.size} GPUs: {cluster.nodes} x {gpus}"
    engine_gpus = cluster.size
    if cluster.server_nodes:
        engine_gpus = cluster.server_gpus
        yield f"servers   {cluster.server_gpus} GPUs more: {cluster.server_nodes} x {gpus}"
    yield (
        f"policy    tensor {parallel.tensor} x context {parallel.context} x pipeline"
        f" {parallel.pipeline} x data {data_ranks}, experts over {parallel.expert}"
    )
    yield (
        f"engines   {engine_gpus // rollout.ranks} of tensor {rollout.tensor} x pipeline"
        f" {rollout.pipeline}"
    )
    yield from memory_lines(page, config, cluster)
    yield (
        f"rollout   {lengths.size} responses of {lengths.mean():.0f} tokens in the mean, longest"
        f" {lengths.max()}: {rollout_words(page.rollout, config)}"
    )
    yield f"training  {page.train_seconds:.1f} s, ranks idle {page.train_idle:.0%}"
    yield f"sync      {sync_words(page.sync)}"
    largest = max(stage.checkpoint_copy for stage in page.stages)
    every = config.checkpoint.every_steps
    yield (
        f"checkpoint {largest / 1e9:.2f} GB a rank, {page.checkpoint_seconds:.1f} s, every"
        f" {every} steps"
    )
    yield from limits(page, config)


def rollout_words(rollout: Steady, config: Config) -> str:
    source = config.source
    if is_beside_training(config):
        return (
            f"while the policy trains, {source.schedule}, staleness {source.staleness},"
            f" engines idle {rollout.idle:.0%}"
        )
    goes_on = ", others continue in the next step" if source.is_partial else ""
    return f"{rollout.seconds:.1f} s{goes_on}, engines idle {rollout.idle:.0%}"


def sync_words(sync: SyncForecast | str) -> str:
    if isinstance(sync, str):
        return f"not planned and not counted below: {sync}"
    return (
        f"{sync.way}: {sync.across_gb:.1f} GB across nodes (the least possible),"
        f" {sync.peers} peers of a rank at most: {sync.seconds:.2f} s"
        f" (least {sync.least_seconds:.2f})"
    )


def memory_lines(page: Page, config: Config, cluster: Cluster) -> Iterator[str]:
    host = None if cluster.host_gib is None else cluster.host_gib / cluster.gpus
    for demand in demands(page.stages, config, MemoryBudget("cuda", cluster.gpu_gib, host)):
        has = "not checked" if demand.has_gib is None else f"of {demand.has_gib:g}"
        yield f"memory    {demand.phase}: {demand.need_gib:.1f} GiB {has}"
    if page.server_gib is not None:
        yield f"memory    servers: {page.server_gib:.1f} GiB of {cluster.gpu_gib:g}"
    if page.staged_bytes:
        staged = page.staged_bytes / GIB
        yield f"memory    servers, staged weights: {staged:.1f} GiB of the host for each GPU"
    for message in page.too_large:
        yield f"DOES NOT FIT: {message}"


def update_parts(page: Page, config: Config) -> dict[str, float]:
    """Seconds of a step in which the policy is at work."""
    every = config.checkpoint.every_steps
    checkpoint = page.checkpoint_waits * page.checkpoint_seconds / every if every else 0.0
    passes = page.train_seconds + page.tensor_messages
    return {
        "training": page.train_seconds,
        "messages of tensor parallelism": page.tensor_messages,
        "ranks that wait for the one with the most work": passes / (1 - page.train_idle) - passes,
        "copies to the host and back": page.offload_seconds,
        "checkpoints that the run waits for": checkpoint,
    }


def step_parts(page: Page, config: Config) -> dict[str, float]:
    """Seconds of a step, which add up to it."""
    rollout = page.rollout
    parts = {**update_parts(page, config), "weight sync": page.sync_seconds}
    if is_beside_training(config):
        waits = rollout.seconds - sum(parts.values())
        return {**parts, "a policy that waits for responses": max(0.0, waits)}
    return {
        **parts,
        "engines that wait for the longest response": rollout.seconds * rollout.idle,
        "generation": rollout.seconds * (1 - rollout.idle),
    }


def limits(page: Page, config: Config) -> Iterator[str]:
    """What takes more than ``SHARE_THAT_LIMITS``, the largest first."""
    parts = step_parts(page, config)
    total = sum(parts.values())
    yield f"step      {total:.1f} s at the least; of it"
    for name, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        mark = "  <- limits" if seconds >= SHARE_THAT_LIMITS * total else ""
        yield f"  {seconds / total:5.1%}  {name}{mark}"
