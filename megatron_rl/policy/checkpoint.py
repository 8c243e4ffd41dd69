"""Checkpoints of the policy through megatron's distributed checkpointing: any layout may read what any layout wrote."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem

from megatron_rl.errors import first_line
from megatron_rl.policy import checkpoint_info, safe_load
from megatron_rl.policy.main_rank import on_main
from megatron_rl.policy.optimizer import create_state, parts, unshare_steps
from megatron_rl.policy.reference import Reference
from megatron_rl.runtime import checkpoint_dir, disk
from megatron_rl.runtime.cpu import device
from megatron_rl.runtime.digest import file_digest

EXTRA = "extra.pt"
# Each thread writes a file of its own. On a CPU they would take turns with the other ranks' work.
WRITER_THREADS = {"cuda": 4, "cpu": 1}


class InProcess(TorchDistSaveShardedStrategy):
    """megatron's file format, written by this process. Megatron's own writer forks a process for every file and starts a server
    process that imports the main program again: slow, and unsafe beside an engine that has threads."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.thread_count = WRITER_THREADS[device().type]

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        writer = torch_checkpoint.FileSystemWriter(checkpoint_dir, single_file_per_rank=True, thread_count=self.thread_count)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        try:
            torch_checkpoint.save(mcore_to_pyt_state_dict(tensors, False), storage_writer=writer, planner=planner)
        except CheckpointException as error:  # a BaseException, which `except Exception` would miss
            first_rank = min(error.failures)
            failure, _ = error.failures[first_rank]
            raise RuntimeError(f"rank {first_rank} could not write its part: {first_line(failure)}") from error


def save(policy: Any, path: Path, extra: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> None:
    """Collective: writes ``path`` (a directory) as a whole or not at all; a checkpoint of that name is replaced. ``policy`` is a
    MegatronPolicy; ``extra`` is equal on all ranks, and made of tensors, numbers, text and containers of them; ``about`` is JSON that
    goes into the manifest.

    Raises:
        ValueError: the disk is full.
    """
    on_main(lambda: checkpoint_dir.begin(path))
    partial = path.with_name(path.name + checkpoint_dir.PARTIAL)
    create_state(policy.optimizer)
    state = {**_model_state(policy), **_reference_state(policy), "optimizer_steps": policy.optimizer_steps}
    state["optimizer"] = _optimizer_state(policy)
    if any(isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW) for part in parts(policy.optimizer)):
        _add_zero_counts(state["optimizer"])
    needed = _bytes(policy)
    with disk.room_for(partial, needed, f"the checkpoint {path.name}"):
        dist_checkpointing.save(state, str(partial), sharded_strategy=InProcess())
    digests = _own_digests(partial)

    def seal() -> None:
        with disk.room_for(partial, needed, f"the checkpoint {path.name}"):
            torch.save(dict(extra), partial / EXTRA)
            checkpoint_dir.finish(path, {**_describe(policy), **(about or {})}, digests)

    on_main(seal)


def load(policy: Any, path: Path) -> Mapping[str, Any]:
    """Collective: the inverse of ``save``, for any parallel layout; returns ``extra``.

    Raises:
        ValueError: the checkpoint is damaged, was written for another model, number format or kind of optimizer, or holds what could
            run a program.
    """
    checkpoint_info.refuse_other(path, checkpoint_dir.check(path), _describe(policy))
    safe_load.check_files(path)
    extra: Mapping[str, Any] = safe_load.load_plain(path / EXTRA, str(path / EXTRA))
    create_state(policy.optimizer)
    state = {**_model_state(policy), **_reference_state(policy)}
    state["optimizer"] = _optimizer_state(policy, is_loading=True)
    with torch.no_grad(), _safe_objects():
        loaded = dist_checkpointing.load(state, str(path))
        for name, module in _modules(policy):
            module.load_state_dict(loaded[name])
        with _step_counts_supplied(policy):
            policy.optimizer.load_state_dict(loaded["optimizer"])
        if policy.reference is not None:
            _load_reference(policy.reference, loaded)
    unshare_steps(policy.optimizer)
    policy.optimizer_steps = loaded["optimizer_steps"]
    return extra


class _SafePlanner(MCoreLoadPlanner):
    """megatron's plan of what to read, which looks at objects before it unpickles them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        safe_load.load_plain(value, f"object {read_item.dest_index.fqn} of the checkpoint")
        value.seek(0)
        super().load_bytes(read_item, value)


@contextlib.contextmanager
def _safe_objects() -> Iterator[None]:
    """megatron makes its planner by name, and has no argument for another. torch collects the errors of all ranks into one that is no
    ``Exception``; what is unsafe comes out of it."""
    torch_strategies.MCoreLoadPlanner = _SafePlanner
    try:
        yield
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, safe_load.UnsafeError):
                raise failure from error
        raise
    finally:
        torch_strategies.MCoreLoadPlanner = MCoreLoadPlanner


def _modules(policy: Any) -> list[tuple[str, torch.nn.Module]]:
    """Model chunks under the names by which megatron's optimizers look for them."""
    if len(policy.modules) == 1:
        return [("model", policy.modules[0])]
    return [(f"model{index}", module) for index, module in enumerate(policy.modules)]


def _metadata() -> dict[str, Any]:
    return {
        # Other kinds cannot change the layout, or come back with Adam's step count at 0 without a word.
        "distrib_optim_sharding_type": "fully_reshardable",
        # The first data-parallel rank alone writes: it alone gets the states, over gloo. Megatron's other way gathers them, unsharded and
        # in float32, in the device memory and then in the host memory of every rank.
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }


def _model_state(policy: Any) -> dict[str, Any]:
    return {name: module.sharded_state_dict(metadata=_metadata()) for name, module in _modules(policy)}


def _optimizer_state(policy: Any, *, is_loading: bool = False) -> dict[str, Any]:
    state: dict[str, Any] = policy.optimizer.sharded_state_dict(_model_state(policy), is_loading=is_loading, metadata=_metadata())
    return state


def _reference_state(policy: Any) -> dict[str, Any]:
    """The reference weights laid out like the trained ones, under keys of their own; empty when none are kept."""
    if policy.reference is None:
        return {}
    reference = policy.reference.tensors()
    state = {}
    for chunk, module in enumerate(policy.modules):
        shards = {
            name: shard
            for name, shard in module.sharded_state_dict(metadata=_metadata()).items()
            if isinstance(shard, ShardedTensor | ShardedTensorFactory)
        }
        names = {name for index, name in reference if index == chunk}
        assert set(shards) == names, f"reference weights differ from the model's: {sorted(names ^ set(shards))}"
        for name, shard in shards.items():
            shard.data = reference[chunk, name]
        add_prefix_for_sharding(shards, "reference.")
        state[f"reference{chunk}"] = shards
    return state


def _load_reference(reference: Reference, loaded: Mapping[str, Any]) -> None:
    """Takes over what ``_reference_state`` was filled with."""
    reference.assign({(chunk, name): loaded[f"reference{chunk}"][name] for chunk, name in reference.names})


def _describe(policy: Any) -> dict[str, Any]:
    """``checkpoint_info.describe`` with how the policy was laid out, which need not agree."""
    ranks = policy.ranks
    layout = {name: getattr(ranks, name) for name in ("tensor", "pipeline", "context", "data", "expert", "expert_tensor")}
    described = checkpoint_info.describe(
        policy.arch,
        _params(policy),
        distributed_optimizer=policy.parallel.distributed_optimizer,
        reference=policy.reference is not None,
    )
    return {**described, "layout": layout}


def _params(policy: Any) -> str:
    return str(policy.config.params_dtype).removeprefix("torch.")


def _bytes(policy: Any) -> int:
    """What the checkpoint will take; Adam's moments count as float32."""
    parameters = checkpoint_info.num_parameters(policy.arch, 1)
    reference = policy.reference is not None
    sharded = policy.parallel.distributed_optimizer
    return checkpoint_info.checkpoint_bytes(
        parameters, _params(policy), "float32", distributed_optimizer=sharded, reference=reference
    )


def _own_digests(partial: Path) -> dict[str, str]:
    """Collective: digests of the files of tensors, each taken by the rank that wrote it (``__<rank>_<number>.distcp``)."""
    own = {file.name: file_digest(file) for file in sorted(partial.glob(f"__{dist.get_rank()}_*"))}
    gathered: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    return {name: digest for part in gathered for name, digest in part.items()}


def _add_zero_counts(state: dict[Any, Any]) -> None:
    """megatron leaves out a step count of 0, and torch's Adam then cannot load (KeyError 'step'): puts it back, in place."""
    if "state" in state and "param_groups" in state:
        state["state"].setdefault("common_step", torch.tensor(0.0, dtype=torch.float32))
    else:
        for value in state.values():
            if isinstance(value, dict):
                _add_zero_counts(value)


@contextlib.contextmanager
def _step_counts_supplied(policy: Any) -> Iterator[None]:
    """megatron's distributed optimizer saves no step count for each parameter but, with torch's Adam, asks for one when loading
    (KeyError 'step'). Inside, it is given the one that it has just restored."""

    def supplied(part: Any, original: Callable[[Any, dict[str, Tensor]], None]) -> Callable[[Any, dict[str, Tensor]], None]:
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
