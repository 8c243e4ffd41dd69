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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.load import compose, validate
from megatron_rl.config.rules.checks import check
from megatron_rl.config.rules.engine_checks import state_bytes, token_bytes
from megatron_rl.config.rules.layout_rules import replica_ranks
from megatron_rl.config.schema import Config
from megatron_rl.loss import Method
from megatron_rl.models import Architecture, read_architecture
from megatron_rl.planning.at_start import plan
from megatron_rl.planning.engine_memory import (
    GIB,
    EngineMemory,
    engine_memory,
    max_sequences,
)
from megatron_rl.planning.memory import StageMemory
from megatron_rl.planning.phases import (
    MemoryBudget,
    host_copies,
    no_cache,
    overhead_gib,
    problems,
)
from megatron_rl.policy.batches.work_model import WorkModel
from megatron_rl.signals import signals_of
from tools.plan_sync import PRESETS, add_links, positive, whole
from tools.planning.balance import idle_share
from tools.planning.engine_tables import NotDeclaredError
from tools.planning.rollout_time import (
    Engines,
    least_decode_step,
    one_step,
    partial_step,
    response_lengths,
    step_beside_training,
)
from tools.planning.simulated_rollouts import Push, Steady
from tools.planning.sync_forecast import Ranks, SyncForecast, forecast
from tools.planning.sync_time import Links
from tools.run_page import HOST_LINK_GB_S, Cluster, Page, is_beside_training, lines, update_parts


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--nodes", type=whole, required=True)
    add("--server-nodes", type=whole, help="more nodes, for the servers of source=servers")
    add_links(parser)
    add("--gpu-gib", type=positive, default=80.0, help="memory of a GPU (80)")
    add("--host-gib", type=positive, help="memory of a node; not checked without it")
    add("--model", help=f"a model by name, one of {', '.join(PRESETS)}")
    add("--median", type=float, help="median response in tokens; a quarter of the limit without it")
    add("--p99", type=float, help="length that 1 %% of the responses exceed; the limit without it")
    add("--memory-gb-s", type=positive, default=3350.0, help="of a GPU's memory (3350: H100 SXM)")
    add("--tflops", type=positive, default=989.0, help="of a GPU, dense bfloat16 (989: H100 SXM)")
    add(
        "--storage-gb-s", type=positive, default=20.0, help="of the file system, all nodes together"
    )
    add("overrides", nargs="*", help="Hydra overrides of a run")
    return parser.parse_intermixed_args()


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
        options.server_nodes or 0,
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = configuration(options, Path(folder), cluster)
            arch, _ = read_architecture(Path(config.model.path))
            lengths = expected_lengths(config, options.median, options.p99)
            page = planned(config, arch, cluster, lengths)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(page, config, cluster, lengths)))
    return 1 if page.too_large else 0


def configuration(options: argparse.Namespace, folder: Path, cluster: Cluster) -> Config:
    """Raises ConfigError for what a run would refuse, ValueError for servers without nodes, and for
    nodes without servers."""
    overrides = list(options.overrides)
    if options.model is not None:
        if options.model not in PRESETS:
            raise ValueError(f"--model {options.model}: give one of {', '.join(PRESETS)}")
        (folder / "config.json").write_text(json.dumps(PRESETS[options.model]))
        overrides.append(f"model.path={folder}")
    # Any set that exists: what is trained on does not change the page.
    data = ["data.train=reasoning_gym:any", "data.eval=reasoning_gym:any"]
    config = validate(Config, compose("config", [*overrides, *data]), "the configuration")
    check(config, cluster.size)
    if config.source.is_servers and not cluster.server_nodes:
        raise ValueError("source=servers: say on how many nodes with --server-nodes")
    if cluster.server_nodes and not config.source.is_servers:
        raise ValueError(
            f"--server-nodes {cluster.server_nodes}: the engines are on the trainer's GPUs; leave"
            " it out, or add source=servers"
        )
    if cluster.server_gpus % config.rollout.ranks:
        raise ValueError(
            f"--server-nodes {cluster.server_nodes}: {cluster.server_gpus} GPUs are no multiple of"
            f" rollout.tensor x rollout.pipeline = {config.rollout.ranks}"
        )
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
    room = MemoryBudget("cuda", cluster.gpu_gib, host)
    stages = plan(config, cluster.size, room, fused=True)
    too_large = problems(stages, config, room)
    engine = engine_memory(arch, config.rollout, cluster.gpu_gib)
    if config.source.is_servers and not engine.kv_cache:
        too_large.append(no_cache(engine.engine_weights, engine.engine_sampler, config, room))
    data_ranks = cluster.size // replica_ranks(config.parallel)
    rows = config.batch.prompts_per_minibatch * config.batch.responses_per_prompt
    page = Page(
        stages=stages,
        server_gib=server_gib(engine) if config.source.is_servers else None,
        staged_bytes=engine.engine_unquantized if is_beside_training(config) else 0,
        too_large=too_large,
        rollout=Steady(0.0, 0.0),
        train_seconds=train_seconds(config, arch, cluster, lengths),
        train_idle=idle_share(rows, data_ranks) if data_ranks > 1 else 0.0,
        tensor_messages=tensor_message_seconds(config, arch, cluster, lengths),
        offload_seconds=offload_seconds(config, stages),
        sync=sync_of(config, arch, cluster),
        checkpoint_seconds=checkpoint_seconds(config, stages, cluster),
        checkpoint_waits=0.0 if config.checkpoint.background else 1.0,
    )
    engines = engines_of(config, arch, cluster, lengths, engine)
    return replace(page, rollout=rollout_of(config, lengths, engines, page))


def server_gib(engine: EngineMemory) -> float:
    """Of a GPU of a server: its engine and what comes beside it."""
    held = engine.engine_weights + engine.engine_sampler + engine.kv_cache
    return held / GIB + overhead_gib("generation", "cuda")


def engines_of(
    config: Config, arch: Architecture, cluster: Cluster, lengths: np.ndarray, engine: EngineMemory
) -> Engines:
    """Ranks of a replica read their share of weights and cache at the same time, stages one after
    the other. As many sequences run as the cache holds of the mean length. A state of linear
    attention counts as the tokens whose keys and values take its bytes."""
    rollout = config.rollout
    of_token = token_bytes(rollout, arch)
    of_prompt = rollout.max_prompt_tokens + state_bytes(rollout, arch) // of_token
    step = least_decode_step(
        rollout.pipeline * engine.engine_weights,
        rollout.pipeline * of_token,
        cluster.memory_gb_s,
        of_prompt,
    )
    mean_tokens = of_prompt + float(lengths.mean())
    slots = max(1, int(engine.kv_cache / (of_token * mean_tokens)))
    slots = min(slots, max_sequences(rollout, cluster.gpu_gib))
    gpus = cluster.size
    if config.source.is_servers:
        gpus = cluster.server_gpus
        slots = min(slots, config.source.requests_per_server)
    return Engines(gpus // rollout.ranks, slots, step)


def rollout_of(config: Config, lengths: np.ndarray, engines: Engines, page: Page) -> Steady:
    """By the schedule that the run takes."""
    source = config.source
    if is_beside_training(config):
        update = sum(update_parts(page, config).values())
        push = Push(page.sync_seconds, page.switch_seconds)
        return step_beside_training(lengths, engines, source, update, push)
    if source.is_partial:
        return partial_step(lengths, engines, source.partial)
    return one_step(lengths, engines)


def train_seconds(
    config: Config, arch: Architecture, cluster: Cluster, lengths: np.ndarray
) -> float:
    """Of one step: forward and backward of every epoch, a forward more where layers are computed
    again, both twice where a response is seen once more, passes for old and reference logprobs and
    those behind masked images where there are such."""
    model = WorkModel.of(arch)
    tokens = lengths.reshape(-1) + config.rollout.max_prompt_tokens
    of_token = 2 * model.crossover_tokens * arch.attention_layers * arch.num_heads * arch.head_dim
    forward = float(model.work(tokens).sum()) * of_token
    # A backward pass multiplies twice as much as a forward pass.
    passes = passes_of_step(config, backward=2)
    return passes * forward / (cluster.size * cluster.tflops * 1e12)


def passes_of_step(config: Config, backward: int) -> int:
    """Passes of a step's responses through the policy, each backward pass counted ``backward``
    times."""
    batch = config.batch
    epochs = config.trainer.epochs_per_rollout
    method = Method(config.method, response_limit=config.rollout.max_response_tokens)
    perception = config.method.perception
    passes = epochs * (1 + backward + (config.parallel.recompute == "full"))
    passes *= config.method.sequences_per_response
    passes += signals_of(method, config.seed).needs("ref")
    passes += perception is not None and perception.masked == "old"
    passes += epochs > 1 or batch.prompts_per_minibatch < batch.prompts_per_step
    return passes


def tensor_message_seconds(
    config: Config, arch: Architecture, cluster: Cluster, lengths: np.ndarray
) -> float:
    """Of one step: what tensor parallelism sends between two products, while neither can run.

    A block (attention, or a dense feed-forward layer) gathers its input over the tensor ranks and
    sums its output over them, in the forward and in the backward pass; with or without sequence
    parallelism each rank then sends ``2 (tensor - 1) / tensor`` times the hidden states, of 2 bytes
    a number. Experts are exchanged in another way, and not counted, nor are embedding and head.
    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
    (arXiv 2205.05198), section 4.2.2.
    """
    tensor = config.parallel.tensor
    blocks = sum(1 if arch.has_experts(layer) else 2 for layer in range(arch.num_layers))
    tokens = float(lengths.sum()) + lengths.size * config.rollout.max_prompt_tokens
    sent = 2 * (tensor - 1) / tensor * blocks * tokens * arch.hidden_size * 2
    in_node = tensor <= cluster.gpus
    rate = cluster.nvlink_gb_s if in_node else cluster.network_gb_s
    # Each rank has a 1 / (size / tensor) of the tokens and layers.
    of_rank = sent * tensor / cluster.size
    return passes_of_step(config, backward=1) * of_rank / (rate * 1e9)


def offload_seconds(config: Config, stages: Sequence[StageMemory]) -> float:
    """Of a step: what leaves for the host while the engine generates comes back to train."""
    states = host_copies(config)
    held = max(sum(getattr(stage, state) for state in states) for stage in stages)
    return 2 * held / (HOST_LINK_GB_S * 1e9)


def sync_of(config: Config, arch: Architecture, cluster: Cluster) -> SyncForecast | str:
    """Of the run's weight sync; why there is none where nothing declares what its engines want."""
    ranks = Ranks(cluster.size, cluster.gpus, cluster.server_gpus)
    try:
        return forecast(config, arch, ranks, Links(cluster.nvlink_gb_s, cluster.network_gb_s))
    except NotDeclaredError as error:
        return str(error)


def checkpoint_seconds(config: Config, stages: Sequence[StageMemory], cluster: Cluster) -> float:
    """Until every rank's share is on the file system."""
    ranks = cluster.size // config.parallel.pipeline
    total = sum(stage.checkpoint_copy * ranks for stage in stages)
    return total / (cluster.storage_gb_s * 1e9)


if __name__ == "__main__":
    sys.exit(main())
