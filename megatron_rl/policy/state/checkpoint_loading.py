"""Reads a checkpoint of any parallel layout into the policy, in parallel over its ranks.

A rank reads its own part of a distributed optimizer, and an even share of what all data-parallel
ranks hold, straight into the memory of model and optimizer; then they exchange their shares.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject
from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base
from torch import Tensor

from megatron_rl.checkpoints import directory, facts, safe_load
from megatron_rl.checkpoints.part_reader import PartReader, read_common
from megatron_rl.policy.optimizer import create_state, unshare_steps
from megatron_rl.policy.precision import plain
from megatron_rl.policy.state.checkpoint import (
    EXTRA,
    TrainingState,
    describe,
    sharded_model,
    sharded_optimizer,
)
from megatron_rl.policy.state.stored_state import (
    REFERENCE,
    STATE,
    Name,
    StoredParameter,
    stored_parameters,
)
from megatron_rl.runtime.device import platform
from megatron_rl.runtime.launch import from_first_rank, on_all_ranks


def load(policy: TrainingState, path: Path) -> Mapping[str, Any]:
    """Collective: the inverse of ``checkpoint.start``, in any parallel layout; returns ``extra``.

    Raises:
        ValueError: the checkpoint is damaged, could run a program, or was written for another
            model, number format or kind of optimizer.
    """
    # By one rank: it looks at every file, of which there are some for each rank.
    info = from_first_rank(lambda: directory.check(path))
    facts.refuse_other(path, info, describe(policy))
    index = safe_load.read_index(path)
    extra: Mapping[str, Any] = safe_load.load_plain(path / EXTRA, str(path / EXTRA))
    common = read_common(path, index)
    with platform(), torch.no_grad():
        create_state(policy.optimizer)
        sharded = sharded_model(policy)
        _load_common(policy, sharded, common["optimizer"])
        _load_tensors(policy, sharded, PartReader(path, index))
    unshare_steps(policy.optimizer)
    policy.optimizer_steps = common["optimizer_steps"]
    return extra


def _load_common(
    policy: TrainingState, sharded: Sequence[dict[str, Any]], common: dict[Any, Any]
) -> None:
    """Step counts and parameter groups; the tensors of the optimizer stay as they are."""
    local, state = extract_nonpersistent(sharded_optimizer(policy, sharded, is_loading=True))
    tensors, _ = extract_sharded_base(state)
    plain_values = _without_tensors(_for_optimizers(state, common))
    loaded = merge(plain_values, dict_list_map_outplace(LocalNonpersistentObject.unwrap, local))
    own = dict_list_map_outplace(lambda shard: shard.data, tensors)
    policy.optimizer.load_state_dict(merge(loaded, own))


def _for_optimizers(state: Mapping[Any, Any], stored: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """What is ``stored``, for as many optimizers as ``state`` is of.

    megatron has one for all parameters, or, where experts are spread over ranks, number 0 for the
    rest and number 1 for the experts. Rates and step counts are those of all parameters alike.
    """
    if (0 in stored) == (0 in state):
        return stored
    if 0 in stored:
        return {**stored[0]}
    return {0: stored, 1: _of_experts(stored, state[1])}


def _of_experts(stored: Any, state: Any) -> Any:
    """``stored`` of all parameters, with the groups that the experts have in ``state``."""
    if not isinstance(stored, Mapping):
        return stored
    if "param_groups" not in stored:
        return {key: _of_experts(value, state.get(key)) for key, value in stored.items()}
    by_rates = {_rates(group): group for group in stored["param_groups"]}
    wanted = [by_rates[_rates(group)] for group in state["param_groups"]]
    return {**stored, "param_groups": [{**group, "is_expert_parallel": True} for group in wanted]}


def _rates(group: Mapping[str, Any]) -> tuple[float, float]:
    """What distinguishes megatron's groups of parameters."""
    return group["wd_mult"], group["lr_mult"]


def _without_tensors(state: Any) -> Any:
    """Without the place where a distributed optimizer would look for its tensors."""
    if not isinstance(state, dict):
        return state
    return {key: _without_tensors(value) for key, value in state.items() if key != "param_state"}


def _load_tensors(
    policy: TrainingState, sharded: Sequence[dict[str, Any]], reader: PartReader
) -> None:
    loaded: dict[Name, Tensor] = {}
    shared: list[tuple[StoredParameter, Tensor]] = []
    starting = policy.reference.tensors() if policy.reference is not None else {}
    finish: list[Callable[[], None]] = []

    def want(item: StoredParameter, flat: Tensor, prefix: str) -> None:
        """This rank's share of ``flat``, which all data-parallel ranks hold whole."""
        first, end = item.reads.get(dist.get_rank(item.group(flat.device)), (0, 0))
        reader.want(item.place(flat.dtype, prefix), first, flat[first:end])
        shared.append((item, flat))

    for item in stored_parameters(sharded, policy.optimizer):
        # What is kept in FP8 is read as it was before, and quantized by ``load_state_dict``.
        loaded[item.name] = plain(item.values).detach()
        want(item, loaded[item.name].view(-1), "")
        if item.name in starting:
            want(item, starting[item.name].view(-1), REFERENCE)
        if item.states is None:
            continue
        tensors = item.states.get()
        if item.states.put is not None:
            # The optimizer keeps it in another number format.
            tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
            finish.append(partial(item.states.put, tensors))
        for name, tensor in tensors.items():
            prefix = f"{STATE}{name}."
            if item.states.is_distributed:
                reader.want(item.place(tensor.dtype, prefix), item.states.span[0], tensor)
            else:
                want(item, tensor, prefix)
    objects = _keys_of_objects(sharded)
    for key in objects.values():
        reader.want_object(key)
    on_all_ranks(reader.read, kind=Exception)
    _exchange(shared)
    for put in finish:
        put()
    values = {**loaded, **{name: reader.objects[key][0] for name, key in objects.items()}}
    for chunk, module in enumerate(policy.modules):
        of_chunk = {name: value for (at, name), value in values.items() if at == chunk}
        # A checkpoint of adapters has nothing else.
        module.load_state_dict(of_chunk, strict=not policy.view.adapters)
    if policy.reference is not None:
        policy.reference.assign(starting)


def _keys_of_objects(sharded: Sequence[Mapping[str, Any]]) -> dict[Name, str]:
    """Name of all that is no tensor -> its key in the checkpoint."""
    return {
        (chunk, name): shard.unique_key
        for chunk, shards in enumerate(sharded)
        for name, shard in shards.items()
        if isinstance(shard, ShardedObject)
    }


def _exchange(shared: Sequence[tuple[StoredParameter, Tensor]]) -> None:
    """Collective over data-parallel ranks: each gives the others the share that it has read."""
    for item, flat in shared:
        group = item.group(flat.device)
        if dist.get_world_size(group) == 1:
            continue
        for rank, (first, end) in item.reads.items():
            dist.broadcast(flat[first:end], dist.get_global_rank(group, rank), group=group)
