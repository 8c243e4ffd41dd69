"""What is alike is planned once: ranks that have, or want, the same slices play one role, tensors
that the same roles have and want in the same way form one class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_rl.weight_sync.rects import Rect
from megatron_rl.weight_sync.shards import ITEMSIZE, ShardGroup, natural

Side = Mapping[int, Sequence[ShardGroup]]  # rank -> its shards
# A cast between these is what an engine's own loader does.
CASTABLE = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Roles:
    """The roles of one side. ``groups``, ``ranks``: of each role, the shards and who has them."""

    groups: tuple[Sequence[ShardGroup], ...]
    ranks: tuple[tuple[int, ...], ...]

    def of_ranks(self, num_ranks: int) -> np.ndarray:
        """Rank -> its role; -1 without one."""
        roles = np.full(num_ranks, -1, dtype=np.int64)
        for role, ranks in enumerate(self.ranks):
            roles[list(ranks)] = role
        return roles


def roles_of(side: Side) -> Roles:
    """The roles, in the order of their first ranks. Ranks that share one sequence of groups are
    recognized without looking into it."""
    by_identity: dict[int, int] = {}
    by_content: dict[tuple, int] = {}
    groups: list[Sequence[ShardGroup]] = []
    ranks: list[list[int]] = []
    for rank in sorted(side):
        identity = id(side[rank])
        if identity not in by_identity:
            content = tuple(
                (group.names, group.shard.full, group.shard.dtype, group.rect)
                for group in side[rank]
            )
            role = by_content.setdefault(content, len(by_content))
            if role == len(groups):
                groups.append(side[rank])
                ranks.append([])
            by_identity[identity] = role
        ranks[by_identity[identity]].append(rank)
    return Roles(tuple(groups), tuple(map(tuple, ranks)))


class Pattern(NamedTuple):
    """How one role has, or wants, a tensor; what distinguishes one class from another."""

    is_target: bool
    role: int
    full: tuple[int, ...]
    dtype: str
    rect: Rect


@dataclass(frozen=True)
class TensorClass:
    """Tensors of one shape with the same sources and the same targets. ``order``: their places in
    the order of all names. ``dtype``: in which they travel, that of the engine. ``sources`` and
    ``targets``: role -> its rectangles."""

    names: tuple[str, ...]
    order: tuple[int, ...]
    full: tuple[int, ...]
    dtype: str
    sources: Mapping[int, tuple[Rect, ...]]
    targets: Mapping[int, tuple[Rect, ...]]

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]


def tensor_classes(sources: Roles, targets: Roles, cast: bool) -> list[TensorClass]:
    """All classes, in the order of their first tensors. ``cast``: the two sides may have different
    floating types.

    A large mixture of experts has hundreds of thousands of pairs (tensor, pattern), over which
    Python must not loop. Each pair becomes one integer, ``tensor * number of patterns + pattern``.
    Sorted, the integers of one tensor stand together with its patterns in increasing order, and the
    bytes of that interval are the key by which tensors are grouped.

    Raises ValueError for a shape or dtype in which ranks disagree.
    """
    every_group = [
        (is_target, role, group)
        for is_target, side in ((False, sources), (True, targets))
        for role, groups in enumerate(side.groups)
        for group in groups
    ]
    columns = {group.names for _, _, group in every_group}  # most groups share their names
    names = sorted({name for column in columns for name in column}, key=natural)
    if not names:
        return []
    place = {name: i for i, name in enumerate(names)}
    places = {column: np.array([place[name] for name in column]) for column in columns}
    numbers: dict[Pattern, int] = {}
    tensor_ids = []
    pattern_ids = []
    for is_target, role, group in every_group:
        shard = group.shard
        pattern = Pattern(is_target, role, shard.full, shard.dtype, group.rect)
        column = places[group.names]
        tensor_ids.append(column)
        pattern_ids.append(np.full(len(column), numbers.setdefault(pattern, len(numbers))))
    pairs = np.sort(np.concatenate(tensor_ids) * len(numbers) + np.concatenate(pattern_ids))
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]  # a shard that is named twice counts once
    ends = np.searchsorted(pairs // len(numbers), np.arange(len(names)), side="right")
    members: dict[bytes, list[int]] = defaultdict(list)
    begin = 0
    patterns_of = pairs % len(numbers)
    for tensor, end in enumerate(ends):
        members[patterns_of[begin:end].tobytes()].append(tensor)
        begin = end
    patterns = list(numbers)
    classes = []
    for key, tensors in members.items():
        own = [patterns[i] for i in np.frombuffer(key, dtype=patterns_of.dtype)]
        same = tuple(names[i] for i in tensors)
        dtype = _travels_as(same[0], own, (sources, targets), cast)
        sides: tuple[dict[int, list[Rect]], ...] = (defaultdict(list), defaultdict(list))
        for pattern in own:
            sides[pattern.is_target][pattern.role].append(pattern.rect)
        by_role = [{role: tuple(rects) for role, rects in side.items()} for side in sides]
        classes.append(TensorClass(same, tuple(tensors), own[0].full, dtype, *by_role))
    return classes


def _travels_as(
    name: str, patterns: Sequence[Pattern], sides: tuple[Roles, Roles], cast: bool
) -> str:
    """The dtype that the engine wants. Raises ValueError where shapes differ, or dtypes that may
    not."""
    first = patterns[0]
    wanted = patterns[-1].dtype  # targets come last
    for pattern in patterns:
        same_dtype = pattern.dtype == first.dtype or (
            cast
            and pattern.dtype == (wanted if pattern.is_target else first.dtype)
            and {first.dtype, wanted} <= set(CASTABLE)
        )
        if pattern.full != first.full or not same_dtype:
            side = "rollout" if pattern.is_target else "training"
            first_rank, rank = (
                sides[each.is_target].ranks[each.role][0] for each in (first, pattern)
            )
            raise ValueError(
                f"{name}: rank {first_rank} has shape {first.full} and dtype {first.dtype}, rank"
                f" {rank} ({side}) has shape {pattern.full} and dtype {pattern.dtype}; make"
                " both sides agree (precision.params and rollout.dtype, vocabulary, model path)"
            )
    if wanted not in ITEMSIZE:
        raise ValueError(f"{name}: dtype {wanted!r} is not one of {sorted(ITEMSIZE)}")
    return wanted
