"""Checkpoints of the policy in megatron's distributed format, which suits every parallel layout.

Every rank writes and reads a share of its own: what a distributed optimizer gives it, and an even
part of what all data-parallel ranks hold. Nothing is gathered to be written. ``checkpoint_loading``
is the other direction.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor

from megatron_rl.checkpoints import directory, facts, safe_load
from megatron_rl.checkpoints.part_writer import BLOCK_BYTES, PartWriter, Settings, saved_bytes
from megatron_rl.checkpoints.saving import CheckpointSave
from megatron_rl.policy.optimizer import create_state, parts
from megatron_rl.policy.precision import plain
from megatron_rl.policy.reference import Reference
from megatron_rl.policy.state.stored_state import (
    MASTERS,
    REFERENCE,
    STATE,
    StoredParameter,
    stored_parameters,
)
from megatron_rl.runtime.device import device, platform
from megatron_rl.runtime.launch import from_first_rank, gather_objects

EXTRA = "extra.pt"
FORMAT = CheckpointingConfig("torch_dist", 1)
LAYOUT = ("tensor", "pipeline", "context", "data", "expert", "expert_tensor")
# Each thread writes a file of its own. On a CPU they would compete with the other ranks.
WRITER_THREADS = {"cuda": 4, "cpu": 1}
# Blocks of host memory of a save that is waited for: one is filled while others are written.
_WAITING_BLOCKS = 2
_COMPARED = 2**20  # elements at a time: what a core's cache keeps
TrainingState = Any  # a MegatronPolicy, whose module imports this one


def save(
    policy: TrainingState,
    path: Path,
    extra: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
) -> None:
    """Collective: ``start``, and waits until the checkpoint is whole.

    Raises:
        ValueError: the disk is full.
    """
    start(policy, path, extra, about, blocks=_WAITING_BLOCKS).check(gather_objects, wait=True)


def start(
    policy: TrainingState,
    path: Path,
    extra: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
    after: Callable[[], None] | None = None,
    *,
    blocks: int | None = None,
) -> CheckpointSave:
    """Collective: has threads write the directory ``path``, as a whole or not at all, replacing an
    older one. Returns when the state is copied and may change.

    Args:
        extra: tensors, numbers, text and containers of them, equal on all ranks.
        about: JSON that goes into the manifest.
        after: called in a thread of rank 0 when the checkpoint is whole.
        blocks: see ``part_writer.Settings``; None: for all that this rank copies.
    """
    policy.wait_for_param_gather()
    from_first_rank(lambda: directory.begin(path))
    partial = path.with_name(path.name + directory.PARTIAL)
    with platform(), torch.no_grad():
        create_state(policy.optimizer)
        writer = _begin(policy, partial, extra, blocks)
        writer.close()
    info = {**describe(policy), **(about or {})} if dist.get_rank() == 0 else None
    return CheckpointSave(path, writer, _bytes(policy), dist.get_world_size(), info, after)


def _begin(
    policy: TrainingState, partial: Path, extra: Mapping[str, Any], blocks: int | None
) -> PartWriter:
    """The writer of this rank's part, which has been given all of it."""
    sharded = sharded_model(policy)
    stored = stored_parameters(sharded, policy.optimizer)
    kind = device().type
    # About what this rank copies: see planning/memory.py.
    num_bytes = 12 * sum(item.writes[1] - item.writes[0] for item in stored if item.is_main)
    if blocks is None:
        blocks = max(_WAITING_BLOCKS, math.ceil(num_bytes / BLOCK_BYTES))
    settings = Settings(WRITER_THREADS[kind], kind == "cuda", blocks)
    writer = PartWriter(partial, dist.get_rank(), num_bytes, settings, policy.checkpoint_memory)
    _copy(writer, stored, policy.reference)
    for shard in chain.from_iterable(shards.values() for shards in sharded):
        if isinstance(shard, ShardedObject) and is_main_replica(shard.replica_id):
            writer.add_object(shard.unique_key, saved_bytes([shard.data]))
    if dist.get_rank() == 0:
        # What of the optimizer is the same on all ranks: step counts and parameter groups.
        state = {"optimizer": sharded_optimizer(policy, sharded)}
        _, same = save_preprocess(state, validate_access_integrity=False)
        common = {"optimizer_steps": policy.optimizer_steps, "optimizer": same["optimizer"]}
        writer.add_file(safe_load.COMMON, saved_bytes(common))
        writer.add_file(CONFIG_FNAME, json.dumps(asdict(FORMAT)).encode("ascii"))
        writer.add_file(EXTRA, saved_bytes(dict(extra)))
    return writer


def _copy(
    writer: PartWriter, stored: Sequence[StoredParameter], reference: Reference | None
) -> None:
    """Gives the writer what this rank writes."""
    starting = reference.tensors() if reference is not None else {}
    for item in stored:
        first, end = item.writes
        if not item.is_main or first == end:
            continue
        weights = plain(item.values).detach().reshape(-1)[first:end]
        places = [item.place(weights.dtype)]
        if item.states is not None:
            begin = item.states.span[0]
            for name, values in item.states.get().items():
                values = values[first - begin : end - begin]
                place = item.place(values.dtype, f"{STATE}{name}.")
                # Weights that are their masters, rounded, are not copied a second time.
                if name in MASTERS and places and same_bits(values, weights):
                    writer.copy(values, first, [place, places.pop()])
                else:
                    writer.copy(values, first, [place])
        if places:
            writer.copy(weights, first, places)
        if item.name in starting:
            kept = starting[item.name].reshape(-1)[first:end]
            writer.copy(kept, first, [item.place(kept.dtype, REFERENCE)])


def same_bits(masters: Tensor, weights: Tensor) -> bool:
    """Whether ``weights`` are ``masters`` in their number format, to the last bit. Both flat."""
    if masters.dtype == weights.dtype and masters.data_ptr() == weights.data_ptr():
        return True
    bits = {2: torch.int16, 4: torch.int32}[weights.element_size()]
    pairs = zip(masters.split(_COMPARED), weights.split(_COMPARED), strict=True)
    return all(
        torch.equal(master.to(weight.dtype).view(bits), weight.view(bits))
        for master, weight in pairs
    )


def _metadata() -> dict[str, Any]:
    return {
        # Other kinds cannot change the layout, or silently load Adam's step count as 0.
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }


def sharded_model(policy: TrainingState) -> list[dict[str, Any]]:
    """megatron's description of what is saved of the model chunks: shards and objects by name."""
    chunks = [module.sharded_state_dict(metadata=_metadata()) for module in policy.modules]
    if not policy.view.adapters:
        return chunks
    saved = {(item.chunk, item.name) for item in policy.view.saved}
    return [
        {name: shard for name, shard in shards.items() if (chunk, name) in saved}
        for chunk, shards in enumerate(chunks)
    ]


def sharded_optimizer(
    policy: TrainingState, sharded: Sequence[dict[str, Any]], *, is_loading: bool = False
) -> dict[str, Any]:
    """megatron's state of the optimizer; a distributed one is there without its tensors, which
    megatron would gather on every rank. ``sharded``: of ``sharded_model``."""
    model = dict(enumerate(sharded))
    with _nothing_gathered(policy.optimizer):
        state: dict[str, Any] = policy.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=_metadata()
        )
    kinds = torch.optim.Adam | torch.optim.AdamW
    if any(isinstance(part.optimizer, kinds) for part in parts(policy.optimizer)):
        add_zero_counts(state)
    return state


@contextlib.contextmanager
def _nothing_gathered(optimizer: Any) -> Iterator[None]:
    """Inside, distributed optimizers have no tensors in their sharded state."""
    name = "sharded_param_state_fully_reshardable"
    patched = [part for part in parts(optimizer) if hasattr(part, name)]
    for part in patched:
        setattr(part, name, lambda *args, **kwargs: {})
    # megatron has Python look through all its objects for what gathering left behind: half a second
    # that the step would wait for.
    collector = distrib_optimizer.gc
    distrib_optimizer.gc = SimpleNamespace(collect=lambda: 0)
    try:
        yield
    finally:
        distrib_optimizer.gc = collector
        for part in patched:
            delattr(part, name)


def describe(policy: TrainingState) -> dict[str, Any]:
    """``facts.describe`` with the layout, which need not be that of the run that reads it."""
    layout = {name: getattr(policy.ranks, name) for name in LAYOUT}
    given = (policy.arch, policy.model, policy.precision, policy.parallel)
    has_reference = policy.reference is not None
    described = facts.describe(*given, reference=has_reference, base_digest=policy.base_digest)
    return {**described, "layout": layout}


def _bytes(policy: TrainingState) -> int:
    """What the checkpoint will take; Adam's moments count as float32."""
    return facts.checkpoint_bytes(
        facts.num_saved(policy.arch, 1),
        policy.precision.params,
        "float32",
        distributed_optimizer=policy.parallel.distributed_optimizer,
        reference=policy.reference is not None,
    )


def add_zero_counts(state: dict[Any, Any]) -> None:
    """Puts back, in place, the step count of 0 that megatron leaves out.

    Without it torch's Adam cannot load (KeyError 'step').
    """
    if "state" in state and "param_groups" in state:
        state["state"].setdefault("common_step", torch.tensor(0.0, dtype=torch.float32))
    else:
        for value in state.values():
            if isinstance(value, dict):
                add_zero_counts(value)
