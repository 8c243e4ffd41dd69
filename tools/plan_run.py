"""One page about a run on machines one does not have: does it fit, what a step takes at the least,
and what limits.

    python tools/plan_run.py --nodes 1 --model qwen2.5-7b experiment=qwen2_5_7b_8gpu

Overrides are those of the run; data files need not exist, and ``--model`` stands for a directory.
Memory, layout, weight sync and shares of checkpoints come from the code that the run calls. Seconds
are least ones, at the given speeds in full: kernels, files and networks reach less.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cache import token_bytes
from megatron_rl.config.checks import check
from megatron_rl.config.layout_rules import replica_ranks
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.loss import Method
from megatron_rl.planning.advice import problems
from megatron_rl.planning.at_start import plan
from megatron_rl.planning.balance import idle_share
from megatron_rl.planning.engine_memory import engine_weight_bytes, max_sequences
from megatron_rl.planning.memory import StageMemory
from megatron_rl.planning.phases import Room, demands
from megatron_rl.planning.rollout_time import (
    DecodeStep,
    Rollout,
    response_lengths,
    rollout_time,
)
from megatron_rl.planning.sync_forecast import Ranks, SyncForecast, forecast
from megatron_rl.planning.sync_time import Links
from megatron_rl.policy.families import Architecture, read_architecture
from megatron_rl.policy.work_model import WorkModel
from megatron_rl.weight_sync.engine_tables import NotDeclaredError
from tools.plan_sync import PRESETS, positive, whole

SHARE_THAT_LIMITS = 0.15  # of a step, or of the engines' time


@dataclass(frozen=True)
class Cluster:
    """``nodes`` of ``gpus`` each; speeds in GB/s of one GPU, but ``storage_gb_s`` of all together;
    ``tflops``: of one GPU."""

    nodes: int
    gpus: int
    gpu_gib: float
    host_gib: float | None
    memory_gb_s: float
    nvlink_gb_s: float
    network_gb_s: float
    storage_gb_s: float
    tflops: float

    @property
    def size(self) -> int:
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Page:
    """What is known of a run before it. Seconds of one step, of one sync, of one checkpoint."""

    stages: Sequence[StageMemory]
    too_large: Sequence[str]
    rollout: Rollout
    train_seconds: float
    train_idle: float
    sync: SyncForecast | str
    checkpoint_seconds: float


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--nodes", type=whole, required=True)
    add("--gpus-per-node", type=whole, default=8)
    add("--gpu-gib", type=positive, default=80.0, help="memory of a GPU (80)")
    add("--host-gib", type=positive, help="memory of a node; not checked without it")
    add("--model", help=f"a model by name, one of {', '.join(PRESETS)}")
    add("--median", type=float, help="median response in tokens; a quarter of the limit without it")
    add("--p99", type=float, help="length that 1 %% of the responses exceed; the limit without it")
    add("--memory-gb-s", type=positive, default=3350.0, help="of a GPU's memory (3350: H100 SXM)")
    add("--tflops", type=positive, default=989.0, help="of a GPU, dense bfloat16 (989: H100 SXM)")
    add("--nvlink-gb-s", type=positive, default=400.0, help="of a GPU to its node, one direction")
    add(
        "--network-gb-s", type=positive, default=45.0, help="of a GPU to other nodes, one direction"
    )
    add(
        "--storage-gb-s", type=positive, default=20.0, help="of the file system, all nodes together"
    )
    add("overrides", nargs="*", help="Hydra overrides of a run")
    return parser.parse_args()


def main() -> int:
    """Exit status: 0; 1 where the run does not fit; 2 where it cannot be planned."""
    options = arguments()
    cluster = Cluster(
        options.nodes,
        options.gpus_per_node,
        options.gpu_gib,
        options.host_gib,
        options.memory_gb_s,
        options.nvlink_gb_s,
        options.network_gb_s,
        options.storage_gb_s,
        options.tflops,
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = configuration(options, Path(folder), cluster.size)
            arch, _ = read_architecture(Path(config.model.path))
            lengths = expected_lengths(config, options.median, options.p99)
            page = planned(config, arch, cluster, lengths)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(page, config, arch, cluster, lengths)))
    return 1 if page.too_large else 0


def configuration(options: argparse.Namespace, folder: Path, world_size: int) -> Config:
    """Raises ConfigError for what a run would refuse."""
    overrides = list(options.overrides)
    if options.model is not None:
        if options.model not in PRESETS:
            raise ValueError(f"--model {options.model}: give one of {', '.join(PRESETS)}")
        (folder / "config.json").write_text(json.dumps(PRESETS[options.model]))
        overrides.append(f"model.path={folder}")
    # Any set that exists: what is trained on does not change the page.
    data = ["data.train=reasoning_gym:any", "data.eval=reasoning_gym:any"]
    config = validate(Config, compose("config", [*overrides, *data]), "the configuration")
    check(config, world_size)
    return config


def expected_lengths(config: Config, median: float | None, p99: float | None) -> np.ndarray:
    """Tokens of each response of a step, ``[prompts, responses]``.

    Raises:
        ValueError: a length that is not above 0, or a tail below the median.
    """
    limit = config.rollout.max_response_tokens
    median = limit / 4 if median is None else median
    p99 = max(limit, median) if p99 is None else p99
    if not 0 < median <= p99:
        raise ValueError(f"--median {median:g} --p99 {p99:g}: give 0 < median <= p99")
    shape = (config.batch.prompts_per_step, config.batch.responses_per_prompt)
    return response_lengths(shape[0] * shape[1], median, p99, limit).reshape(shape)


def planned(config: Config, arch: Architecture, cluster: Cluster, lengths: np.ndarray) -> Page:
    host = None if cluster.host_gib is None else cluster.host_gib / cluster.gpus
    room = Room("cuda", cluster.gpu_gib, host)
    stages = plan(config, cluster.size, room, fused=True)
    train = train_seconds(config, arch, cluster, lengths)
    data_ranks = cluster.size // replica_ranks(config.parallel)
    rows = config.batch.prompts_per_minibatch * config.batch.responses_per_prompt
    return Page(
        stages=stages,
        too_large=problems(stages, config, room),
        rollout=rollout_of(config, arch, cluster, lengths, stages[0].kv_cache),
        train_seconds=train,
        train_idle=idle_share(rows, data_ranks) if data_ranks > 1 else 0.0,
        sync=sync_of(config, arch, cluster),
        checkpoint_seconds=checkpoint_seconds(config, stages, cluster),
    )


def rollout_of(
    config: Config, arch: Architecture, cluster: Cluster, lengths: np.ndarray, cache_bytes: int
) -> Rollout:
    """Ranks of a replica read their share of weights and cache at the same time, stages one after
    the other. As many sequences run as the cache holds of the mean length."""
    rollout = config.rollout
    of_token = token_bytes(rollout, arch)
    step = DecodeStep(
        rollout.pipeline * engine_weight_bytes(arch, rollout),
        rollout.pipeline * of_token,
        cluster.memory_gb_s,
    )
    mean_tokens = rollout.max_prompt_tokens + float(lengths.mean())
    fit = max(1, int(cache_bytes / (of_token * mean_tokens)))
    return rollout_time(
        lengths.tolist(),
        cluster.size // rollout.ranks,
        min(fit, max_sequences(rollout, cluster.gpu_gib)),
        step,
        rollout.max_prompt_tokens,
    )


def train_seconds(
    config: Config, arch: Architecture, cluster: Cluster, lengths: np.ndarray
) -> float:
    """Of one step: forward and backward of every epoch, a forward more where layers are computed
    again, both twice where a response is seen once more, passes for old and reference logprobs and
    those behind masked images where there are such."""
    model = WorkModel.of(arch)
    tokens = lengths.reshape(-1) + config.rollout.max_prompt_tokens
    of_token = 2 * model.crossover_tokens * arch.num_layers * arch.num_heads * arch.head_dim
    forward = float(model.work(tokens).sum()) * of_token
    batch = config.batch
    epochs = config.trainer.epochs_per_rollout
    needs = Method(config.method, response_limit=config.rollout.max_response_tokens).needs
    passes = epochs * (4 if config.parallel.recompute == "full" else 3)
    passes *= config.method.sequences_per_response
    passes += needs.ref_logprobs
    passes += needs.mask_ratio is not None and not needs.masked_in_update
    passes += epochs > 1 or batch.prompts_per_minibatch < batch.prompts_per_step
    return passes * forward / (cluster.size * cluster.tflops * 1e12)


def sync_of(config: Config, arch: Architecture, cluster: Cluster) -> SyncForecast | str:
    """Of the run's weight sync; why there is none where nothing declares what its engines want."""
    ranks = Ranks(cluster.size, cluster.gpus)
    try:
        return forecast(config, arch, ranks, Links(cluster.nvlink_gb_s, cluster.network_gb_s))
    except NotDeclaredError as error:
        return str(error)


def checkpoint_seconds(config: Config, stages: Sequence[StageMemory], cluster: Cluster) -> float:
    """Until every rank's share is on the file system."""
    ranks = cluster.size // config.parallel.pipeline
    total = sum(stage.checkpoint_copy * ranks for stage in stages)
    return total / (cluster.storage_gb_s * 1e9)


def lines(
    page: Page, config: Config, arch: Architecture, cluster: Cluster, lengths: np.ndarray
) -> Iterator[str]:
    parallel, rollout = config.parallel, config.rollout
    data_ranks = cluster.size // replica_ranks(parallel)
    yield f"{cluster.size} GPUs: {cluster.nodes} x {cluster.gpus} of {cluster.gpu_gib:g} GiB"
    yield (
        f"policy    tensor {parallel.tensor} x context {parallel.context} x pipeline"
        f" {parallel.pipeline} x data {data_ranks}, experts over {parallel.expert}"
    )
    yield (
        f"engines   {cluster.size // rollout.ranks} of tensor {rollout.tensor} x pipeline"
        f" {rollout.pipeline}"
    )
    yield from memory_lines(page, config, cluster)
    yield (
        f"rollout   {lengths.size} responses of {lengths.mean():.0f} tokens in the mean, longest"
        f" {lengths.max()}: {page.rollout.seconds:.1f} s, engines idle {page.rollout.idle:.0%}"
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


def sync_words(sync: SyncForecast | str) -> str:
    if isinstance(sync, str):
        return f"not planned and not counted below: {sync}"
    return (
        f"{sync.way}: {sync.across_gb:.1f} GB across nodes ({sync.node_ratio:.2f} of the least),"
        f" {sync.peers} peers of a rank at most: {sync.seconds:.2f} s"
        f" (least {sync.least_seconds:.2f})"
    )


def memory_lines(page: Page, config: Config, cluster: Cluster) -> Iterator[str]:
    host = None if cluster.host_gib is None else cluster.host_gib / cluster.gpus
    for demand in demands(page.stages, config, Room("cuda", cluster.gpu_gib, host)):
        has = "not checked" if demand.has_gib is None else f"of {demand.has_gib:g}"
        yield f"memory    {demand.phase}: {demand.need_gib:.1f} GiB {has}"
    for message in page.too_large:
        yield f"DOES NOT FIT: {message}"


def limits(page: Page, config: Config) -> Iterator[str]:
    """What takes more than ``SHARE_THAT_LIMITS``, the largest first."""
    sync = 0.0 if isinstance(page.sync, str) else page.sync.seconds
    every = config.checkpoint.every_steps
    blocking = 0.0
    if every and not config.checkpoint.background:
        blocking = page.checkpoint_seconds / every
    training = page.train_seconds / (1 - page.train_idle)
    parts = {
        "engines that wait for the longest response": page.rollout.seconds * page.rollout.idle,
        "generation": page.rollout.seconds * (1 - page.rollout.idle),
        "training": page.train_seconds,
        "ranks that wait for the one with the most work": training - page.train_seconds,
        "weight sync": sync,
        "checkpoints that the run waits for": blocking,
    }
    total = sum(parts.values())
    yield f"step      {total:.1f} s at the least; of it"
    for name, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        mark = "  <- limits" if seconds >= SHARE_THAT_LIMITS * total else ""
        yield f"  {seconds / total:5.1%}  {name}{mark}"


if __name__ == "__main__":
    sys.exit(main())
