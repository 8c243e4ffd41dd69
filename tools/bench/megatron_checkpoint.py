"""Checkpoints as megatron-core writes and reads them by itself: what ours are compared with.

The fully parallel strategies give each rank a share of what several ranks hold; an asynchronous
save forks a process that writes. In the kind that any parallel layout reads, the tensors of a
distributed optimizer are gathered in host memory first. The format is that of our own checkpoints,
so each way reads what the other has written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor

from megatron_rl.checkpoints import directory
from megatron_rl.policy.optimizer import create_state, parts, unshare_steps
from megatron_rl.policy.state.checkpoint import EXTRA, FORMAT, add_zero_counts, describe
from megatron_rl.runtime.device import platform
from megatron_rl.runtime.digest import file_digest
from megatron_rl.runtime.launch import from_first_rank, gather_objects


class InProcess(TorchDistSaveShardedStrategy):
    """megatron's file format, written by this process: megatron's own writer forks others."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        writer = torch_checkpoint.FileSystemWriter(checkpoint_dir, single_file_per_rank=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(tensors, False), storage_writer=writer, planner=planner
        )


# The kind of a distributed optimizer's state that any parallel layout reads.
ANY_LAYOUT = "fully_reshardable"


class FullyParallel:
    """megatron-core's fully parallel save and load of one policy.

    Args:
        kind: of a distributed optimizer's state; ``dp_reshardable`` is written without gathering
            and read by the same tensor and pipeline layout alone.
        num_writers: processes that write, of each rank.
    """

    def __init__(self, policy: Any, kind: str = ANY_LAYOUT, num_writers: int = 2) -> None:
        self._policy = policy
        self._kind = kind
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        base = TorchDistSaveShardedStrategy(
            FORMAT.sharded_backend, FORMAT.sharded_backend_version, thread_count=num_writers
        )
        # The distribution over ranks and the plan are worked out once and kept, as Megatron-LM does
        # with --ckpt-assume-constant-structure.
        base.use_cached_ckpt_structure = True
        self._writing = FullyParallelSaveStrategyWrapper(base, group, do_cache_distribution=True)
        self._reading = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group)
        self._queue = AsyncCallsQueue()

    def save(self, path: Path) -> None:
        """Collective; returns when all is written."""
        with platform():
            state = training_state(self._policy, self._kind)
            dist_checkpointing.save(state, str(path), sharded_strategy=self._writing)

    def start_save(self, path: Path) -> Callable[[], None]:
        """Collective: forks the writers; returns what waits until all is written."""
        with platform():
            state = training_state(self._policy, self._kind)
            request = dist_checkpointing.save(
                state, str(path), sharded_strategy=self._writing, async_sharded_save=True
            )
            self._queue.schedule_async_request(request)
        return self._wait

    def _wait(self) -> None:
        with platform():
            self._queue.maybe_finalize_async_calls(blocking=True)

    def load(self, path: Path) -> None:
        """Collective."""
        load_state(self._policy, path, self._kind, self._reading)


def training_state(
    policy: Any, kind: str = ANY_LAYOUT, *, is_loading: bool = False
) -> dict[str, Any]:
    """All that a checkpoint holds, as megatron describes it. Collective where it gathers."""
    policy.wait_for_param_gather()
    create_state(policy.optimizer)
    metadata = {**_metadata(), "distrib_optim_sharding_type": kind}
    state = {**_model_state(policy), **_reference_state(policy)}
    state["optimizer_steps"] = policy.optimizer_steps
    state["optimizer"] = policy.optimizer.sharded_state_dict(
        _model_state(policy), is_loading=is_loading, metadata=metadata
    )
    if not is_loading:
        add_zero_counts(state["optimizer"])
    return state


def load_state(policy: Any, path: Path, kind: str = ANY_LAYOUT, strategy: Any = None) -> None:
    """Collective: the inverse, into the policy."""
    with platform(), torch.no_grad():
        state = training_state(policy, kind, is_loading=True)
        loaded = dist_checkpointing.load(state, str(path), sharded_strategy=strategy)
        for name, module in _modules(policy):
            module.load_state_dict(loaded[name])
        with _step_counts_supplied(policy):
            policy.optimizer.load_state_dict(loaded["optimizer"])
        if policy.reference is not None:
            names = policy.reference.names
            policy.reference.assign(
                {(at, name): loaded[f"reference{at}"][name] for at, name in names}
            )
    unshare_steps(policy.optimizer)
    policy.optimizer_steps = loaded["optimizer_steps"]


def save(policy: Any, path: Path, extra: Mapping[str, Any]) -> None:
    """Collective: a folder that ``policy.load`` reads. Nothing is shared out: of what several ranks
    hold, the first writes all."""
    from_first_rank(lambda: directory.begin(path))
    partial = path.with_name(path.name + directory.PARTIAL)
    with platform():
        dist_checkpointing.save(training_state(policy), str(partial), sharded_strategy=InProcess())
    own = {file.name: file_digest(file) for file in partial.glob(f"__{dist.get_rank()}_*")}
    known = {name: digest for part in gather_objects(own) for name, digest in part.items()}

    def seal() -> None:
        torch.save(dict(extra), partial / EXTRA)
        directory.finish(path, describe(policy), known)

    from_first_rank(seal)


def load(policy: Any, path: Path) -> Mapping[str, Any]:
    """Collective: the inverse of ``save``, where every rank reads all; returns ``extra``."""
    load_state(policy, path)
    extra: Mapping[str, Any] = torch.load(path / EXTRA, weights_only=True)
    return extra


def _modules(policy: Any) -> list[tuple[str, torch.nn.Module]]:
    if len(policy.modules) == 1:
        return [("model", policy.modules[0])]
    return [(f"model{index}", module) for index, module in enumerate(policy.modules)]


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": ANY_LAYOUT,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }


def _model_state(policy: Any) -> dict[str, Any]:
    return {
        name: module.sharded_state_dict(metadata=_metadata()) for name, module in _modules(policy)
    }


def _reference_state(policy: Any) -> dict[str, Any]:
    if policy.reference is None:
        return {}
    reference = policy.reference.tensors()
    state = {}
    for chunk, module in enumerate(policy.modules):
        shards = {
            name: shard
            for name, shard in module.sharded_state_dict(metadata=_metadata()).items()
            if isinstance(shard, ShardedTensor | ShardedTensorFactory)
            and (chunk, name) in policy.reference.names
        }
        for name, shard in shards.items():
            shard.data = reference[chunk, name]
        add_prefix_for_sharding(shards, "reference.")
        state[f"reference{chunk}"] = shards
    return state


@contextlib.contextmanager
def _step_counts_supplied(policy: Any) -> Iterator[None]:
    """Inside, parameters get the step count that megatron has just restored: its distributed
    optimizer saves none for each but asks for one with torch's Adam."""

    def supplied(
        part: Any, original: Callable[[Any, dict[str, Tensor]], None]
    ) -> Callable[[Any, dict[str, Tensor]], None]:
        def set_states(model_param: Any, tensors: dict[str, Tensor]) -> None:
            group, order = part.model_param_group_index_map[model_param]
            state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
            own = {"step": state["step"]} if torch.is_tensor(state.get("step")) else {}
            original(model_param, {**own, **tensors})

        return set_states

    name = "_set_main_param_and_optimizer_states"
    patched = [part for part in parts(policy.optimizer) if hasattr(part, name)]
    for part in patched:
        setattr(part, name, supplied(part, getattr(part, name)))
    try:
        yield
    finally:
        for part in patched:
            delattr(part, name)
