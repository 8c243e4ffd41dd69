"""Checkpoints of the policy in megatron's distributed format, which suits every parallel layout."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

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

from megatron_rl.checkpoints import directory, facts, safe_load
from megatron_rl.config.number_formats import format_name
from megatron_rl.config.schema import ModelConfig, ParallelConfig
from megatron_rl.errors import first_line
from megatron_rl.policy.families import Architecture
from megatron_rl.policy.main_rank import on_main
from megatron_rl.policy.optimizer import create_state, parts, unshare_steps
from megatron_rl.policy.parallel import Ranks
from megatron_rl.policy.reference import Reference
from megatron_rl.runtime import disk
from megatron_rl.runtime.device import device
from megatron_rl.runtime.digest import file_digest

EXTRA = "extra.pt"
LAYOUT = ("tensor", "pipeline", "context", "data", "expert", "expert_tensor")
# Each thread writes a file of its own. On a CPU they would compete with the other ranks.
WRITER_THREADS = {"cuda": 4, "cpu": 1}


class TrainingState(Protocol):
    """What a checkpoint takes of a MegatronPolicy, and gives back to it."""

    model: ModelConfig

    arch: Architecture
    parallel: ParallelConfig
    config: Any  # megatron's TransformerConfig
    ranks: Ranks
    modules: Sequence[Any]
    optimizer: Any  # a MegatronOptimizer
    optimizer_steps: int
    reference: Reference | None


class InProcess(TorchDistSaveShardedStrategy):
    """megatron's file format, written by this process.

    Megatron's own writer forks a process for every file and starts a server process that imports
    the main program again: slow, and unsafe beside an engine that has threads.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.thread_count = WRITER_THREADS[device().type]

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        writer = torch_checkpoint.FileSystemWriter(
            checkpoint_dir, single_file_per_rank=True, thread_count=self.thread_count
        )
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        try:
            torch_checkpoint.save(
                mcore_to_pyt_state_dict(tensors, False), storage_writer=writer, planner=planner
            )
        except CheckpointException as error:  # a BaseException, which `except Exception` would miss
            first_rank = min(error.failures)
            failure, _ = error.failures[first_rank]
            raise RuntimeError(
                f"rank {first_rank} could not write its part: {first_line(failure)}"
            ) from error


def save(
    policy: TrainingState,
    path: Path,
    extra: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
) -> None:
    """Collective: writes the directory ``path`` as a whole or not at all, replacing an older one.

    Args:
        extra: tensors, numbers, text and containers of them, equal on all ranks.
        about: JSON that goes into the manifest.

    Raises:
        ValueError: the disk is full.
    """
    on_main(lambda: directory.begin(path))
    partial = path.with_name(path.name + directory.PARTIAL)
    create_state(policy.optimizer)
    state = {
        **_model_state(policy),
        **_reference_state(policy),
        "optimizer_steps": policy.optimizer_steps,
    }
    state["optimizer"] = _optimizer_state(policy)
    if _has_torch_adam(policy.optimizer):
        _add_zero_counts(state["optimizer"])
    needed = _bytes(policy)
    with disk.room_for(partial, needed, f"the checkpoint {path.name}"):
        dist_checkpointing.save(state, str(partial), sharded_strategy=InProcess())
    digests = _own_digests(partial)

    def seal() -> None:
        with disk.room_for(partial, needed, f"the checkpoint {path.name}"):
            torch.save(dict(extra), partial / EXTRA)
            directory.finish(path, {**_describe(policy), **(about or {})}, digests)

    on_main(seal)


def load(policy: TrainingState, path: Path) -> Mapping[str, Any]:
    """Collective: the inverse of ``save``, in any parallel layout; returns ``extra``.

    Raises:
        ValueError: the checkpoint is damaged, could run a program, or was written for another
            model, number format or kind of optimizer.
    """
    facts.refuse_other(path, directory.check(path), _describe(policy))
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
    """megatron's plan of what to read, which checks objects before it unpickles them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        safe_load.load_plain(value, f"object {read_item.dest_index.fqn} of the checkpoint")
        value.seek(0)
        super().load_bytes(read_item, value)


@contextlib.contextmanager
def _safe_objects() -> Iterator[None]:
    """Puts ``_SafePlanner`` in the place of megatron's planner, which has no argument for it.

    torch collects the errors of all ranks into one that is no ``Exception``; an UnsafeError is
    raised out of it.
    """
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


def _modules(policy: TrainingState) -> list[tuple[str, torch.nn.Module]]:
    """Model chunks under the names by which megatron's optimizers look for them."""
    if len(policy.modules) == 1:
        return [("model", policy.modules[0])]
    return [(f"model{index}", module) for index, module in enumerate(policy.modules)]


def _metadata() -> dict[str, Any]:
    return {
        # Other kinds cannot change the layout, or silently load Adam's step count as 0.
        "distrib_optim_sharding_type": "fully_reshardable",
        # The first data-parallel rank alone writes, and alone gets the states, over gloo. Without
        # this, megatron gathers them, unsharded and in float32, in the device memory and then in
        # the host memory of every rank.
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }


def _model_state(policy: TrainingState) -> dict[str, Any]:
    return {
        name: module.sharded_state_dict(metadata=_metadata()) for name, module in _modules(policy)
    }


def _optimizer_state(policy: TrainingState, *, is_loading: bool = False) -> dict[str, Any]:
    state: dict[str, Any] = policy.optimizer.sharded_state_dict(
        _model_state(policy), is_loading=is_loading, metadata=_metadata()
    )
    return state


def _reference_state(policy: TrainingState) -> dict[str, Any]:
    """The reference weights, laid out like the trained ones; empty without a reference."""
    if policy.reference is None:
        return {}
    reference = policy.reference.tensors()
    state = {}
    for chunk, module in enumerate(policy.modules):
        shards = {
            name: shard
            for name, shard in module.sharded_state_dict(metadata=_metadata()).items()
            if isinstance(shard, ShardedTensor | ShardedTensorFactory)
            and (chunk, name) not in policy.reference.untrained
        }
        names = {name for index, name in reference if index == chunk}
        assert set(shards) == names, (
            f"reference weights differ from the model's: {sorted(names ^ set(shards))}"
        )
        for name, shard in shards.items():
            shard.data = reference[chunk, name]
        add_prefix_for_sharding(shards, "reference.")
        state[f"reference{chunk}"] = shards
    return state


def _load_reference(reference: Reference, loaded: Mapping[str, Any]) -> None:
    """The inverse of ``_reference_state``."""
    reference.assign(
        {(chunk, name): loaded[f"reference{chunk}"][name] for chunk, name in reference.names}
    )


def _describe(policy: TrainingState) -> dict[str, Any]:
    """``facts.describe`` with the layout, which need not be that of the run that reads it."""
    layout = {name: getattr(policy.ranks, name) for name in LAYOUT}
    described = facts.describe(
        policy.arch,
        _params(policy),
        distributed_optimizer=policy.parallel.distributed_optimizer,
        reference=policy.reference is not None,
        freeze_vision=policy.model.freeze_vision,
    )
    return {**described, "layout": layout}


def _params(policy: TrainingState) -> str:
    return format_name(policy.config.params_dtype)


def _bytes(policy: TrainingState) -> int:
    """What the checkpoint will take; Adam's moments count as float32."""
    parameters = facts.num_parameters(policy.arch, 1)
    reference = policy.reference is not None
    sharded = policy.parallel.distributed_optimizer
    return facts.checkpoint_bytes(
        parameters, _params(policy), "float32", distributed_optimizer=sharded, reference=reference
    )


def _own_digests(partial: Path) -> dict[str, str]:
    """Collective: digests of the files of tensors, by name.

    Each is taken by the rank that wrote the file, ``__<rank>_<number>.distcp``.
    """
    own = {file.name: file_digest(file) for file in sorted(partial.glob(f"__{dist.get_rank()}_*"))}
    gathered: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    return {name: digest for part in gathered for name, digest in part.items()}


def _has_torch_adam(optimizer: Any) -> bool:
    kinds = torch.optim.Adam | torch.optim.AdamW
    return any(isinstance(part.optimizer, kinds) for part in parts(optimizer))


def _add_zero_counts(state: dict[Any, Any]) -> None:
    """Puts back, in place, the step count of 0 that megatron leaves out.

    Without it torch's Adam cannot load (KeyError 'step').
    """
    if "state" in state and "param_groups" in state:
        state["state"].setdefault("common_step", torch.tensor(0.0, dtype=torch.float32))
    else:
        for value in state.values():
            if isinstance(value, dict):
                _add_zero_counts(value)


@contextlib.contextmanager
def _step_counts_supplied(policy: TrainingState) -> Iterator[None]:
    """Inside, parameters get the step count that megatron has just restored.

    Its distributed optimizer saves no step count for each parameter but, with torch's Adam, asks
    for one when loading (KeyError 'step').
    """

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
