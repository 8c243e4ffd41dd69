"""This process as any rank of a world that is not there: torch's fake process group, and a record
of all that it is asked to do.

A collective of the fake group returns at once; what it writes into its outputs is made up, from
this rank's own inputs. The values of a run are therefore nonsense, its messages (which group, how
often, how many bytes) are those of a real one as long as no size depends on what another rank says.
Where one does, ``Answers`` says it in the other rank's place.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

# c10d's operators by the names that their users know; [inputs in the arguments, the group in them].
INPUTS = {
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}
# megatron's descriptions of its groups, in the words of the configuration.
GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "CONTEXT_PARALLEL_GROUP": "context",
    "DATA_PARALLEL_GROUP": "data",
    "DATA_PARALLEL_GROUP_WITH_CP": "data and context",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "experts",
    "EXPERT_MODEL_PARALLEL_GROUP": "expert",
    "EXPERT_DATA_PARALLEL_GROUP": "expert data",
    "MODEL_PARALLEL_GROUP": "model",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "expert model",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "stage",
    "EMBEDDING_GROUP": "embedding",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "optimizer",
    "default_pg": "world",
}


@dataclass(frozen=True)
class Kind:
    """What is counted together: an operation, the group it runs in with its size, the format of its
    numbers."""

    name: str
    group: str
    ranks: int
    dtype: str


@dataclass
class Answers:
    """What other ranks say where sizes depend on it. ``received_shape``: of every tensor from a
    pipeline neighbour. ``tokens_for_each_expert``: of every rank (balanced). ``layers_of_stages``:
    numbers of the layers on each stage."""

    received_shape: tuple[int, ...] = ()
    tokens_for_each_expert: int = 0
    layers_of_stages: list[list[int]] = field(default_factory=list)


class Record(TorchDispatchMode):
    """Counts calls and the bytes of their inputs on this rank (of a received tensor: its own),
    backward passes included."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers
        self.calls: Counter[Kind] = Counter()
        self.bytes: Counter[Kind] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._count(func.overloadpacket.__name__, args)
        return done

    def _count(self, operator: str, args: Any) -> None:
        group = next(
            dist.ProcessGroup.unbox(each)
            for each in args
            if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each)
        )
        if operator not in INPUTS:
            assert operator == "barrier", f"the record does not know the operator c10d.{operator}"
            return
        name, place = INPUTS[operator]
        given = args[place]
        tensors = list(_flat(given))
        kind = _kind(name, group, tensors[0])
        self.calls[kind] += 1
        self.bytes[kind] += sum(tensor.nbytes for tensor in tensors)
        if name == "recv":
            self._receive(tensors[0])
        if kind.group == "experts" and name == "all_gather" and kind.dtype == "int64":
            next(_flat(args[0])).fill_(self.answers.tokens_for_each_expert)

    def _receive(self, tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.int64:
            tensor.copy_(torch.tensor(self.answers.received_shape))
        else:
            tensor.zero_()


def _kind(name: str, group: Any, sample: torch.Tensor) -> Kind:
    """Neighbours of a pipeline of two stages talk in their own group in one direction, in the
    world's in the other: one kind."""
    dtype = str(sample.dtype).removeprefix("torch.")
    if name in ("send", "recv"):
        return Kind(name, "pipeline", 2, dtype)
    return Kind(
        name,
        GROUPS[group.group_desc] if group.group_desc in GROUPS else group.group_desc,
        group.size(),
        dtype,
    )


def _flat(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
        return
    for each in given:
        yield from _flat(each)


@contextlib.contextmanager
def fake_world(rank: int, ranks: int, answers: Answers) -> Iterator[None]:
    """``torch.distributed`` as rank ``rank`` of ``ranks`` sees it, none of the others there. Groups
    that megatron wants with gloo are fake too. An object is gathered as this rank's own from
    everyone, but for the layers of pipeline stages; one that is broadcast stays as it is."""
    new_group, gather_object = dist.new_group, dist.all_gather_object
    broadcast_objects = dist.broadcast_object_list

    def fake_group(*args: Any, backend: str | None = None, **more: Any) -> Any:
        return new_group(*args, **more)

    def gather(objects: list[Any], own: Any, group: Any = None) -> None:
        gather_object(objects, own, group)
        if len(objects) == len(answers.layers_of_stages) > 1 and own in answers.layers_of_stages:
            objects[:] = answers.layers_of_stages

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    dist.new_group, dist.all_gather_object = fake_group, gather
    dist.broadcast_object_list = lambda objects, src, group=None: None
    try:
        yield
    finally:
        dist.new_group, dist.all_gather_object = new_group, gather_object
        dist.broadcast_object_list = broadcast_objects
        dist.destroy_process_group()
