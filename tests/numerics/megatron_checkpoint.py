"""Checkpoints as megatron-core writes and reads them by itself, in the format of ours: each way
reads what the other has written.

In the kind that any parallel layout reads, the tensors of a distributed optimizer are gathered in
host memory first.
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
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor

from megatron_rl.checkpoints import directory
from megatron_rl.policy.optimizer import create_state, parts, unshare_steps
from megatron_rl.policy.state.checkpoint import EXTRA, add_zero_counts, describe
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


def training_state(policy: Any, *, is_loading: bool = False) -> dict[str, Any]:
    """All that a checkpoint holds, as megatron describes it. Collective where it gathers."""
    policy.wait_for_param_gather()
    create_state(policy.optimizer)
    state = {**_model_state(policy), **_reference_state(policy)}
    state["optimizer_steps"] = policy.optimizer_steps
    state["optimizer"] = policy.optimizer.sharded_state_dict(
        _model_state(policy), is_loading=is_loading, metadata=_metadata()
    )
    if not is_loading:
        add_zero_counts(state["optimizer"])
    return state


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
    with platform(), torch.no_grad():
        state = training_state(policy, is_loading=True)
        loaded = dist_checkpointing.load(state, str(path))
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
    extra: Mapping[str, Any] = torch.load(path / EXTRA, weights_only=True)
    return extra


def _modules(policy: Any) -> list[tuple[str, torch.nn.Module]]:
    if len(policy.modules) == 1:
        return [("model", policy.modules[0])]
    return [(f"model{index}", module) for index, module in enumerate(policy.modules)]


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
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
