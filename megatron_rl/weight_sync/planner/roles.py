"""What is alike is planned once: ranks that have, or want, the same slices play one role, tensors
that the same roles have and want in the same way form one class."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_rl.config.keys import natural
from megatron_rl.weight_sync.planner.shards import ITEMSIZE, ShardGroup
from megatron_rl.weight_sync.planner.slices import Slice

Side = Mapping[int, Sequence[ShardGroup]]  # rank -> its shards
# A cast between these is what an engine's own loader does.
_CASTABLE = ("float32", "bfloat16", "float16", "float64")


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
        # No other object can have this id: ``side`` keeps the sequence alive.
        identity = id(side[rank])
        if identity not in by_identity:
            content = tuple(
                (group.names, group.shard.full, group.shard.dtype, group.region)
                for group in side[rank]
            )
            # A content that is new gets the next number, and its sequence the place of that number.
            role = by_content.setdefault(content, len(by_content))
            if role == len(groups):
                groups.append(side[rank])
                ranks.append([])
            by_identity[identity] = role
        ranks[by_identity[identity]].append(rank)
    return Roles(tuple(groups), tuple(map(tuple, ranks)))


class ShardPattern(NamedTuple):
    """How one role has, or needs, a tensor; what distinguishes one class from another."""

    is_target: bool
    role: int
    full: tuple[int, ...]
    dtype: str
    region: Slice


@dataclass(frozen=True)
class TensorClass:
    """Tensors of one shape with the same sources and the same targets."""

    names: tuple[str, ...]
    order: tuple[int, ...]  # their places in the order of all names
    full: tuple[int, ...]
    dtype: str  # in which they travel, that of the engine
    sources: Mapping[int, tuple[Slice, ...]]  # role -> its slices
    targets: Mapping[int, tuple[Slice, ...]]  # likewise

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]


def tensor_classes(sources: Roles, targets: Roles, cast: bool) -> list[TensorClass]:
    """All classes, in the order of their first tensors. ``cast``: the two sides may have different
    floating types. Raises ValueError for a shape or dtype in which ranks disagree."""
    numbers: dict[ShardPattern, int] = {}  # in order of appearance: patterns of sources come first
    numbers_of: dict[str, list[int]] = defaultdict(list)
    for is_target, side in ((False, sources), (True, targets)):
        for role, groups in enumerate(side.groups):
            for group in groups:
                shard = group.shard
                pattern = ShardPattern(is_target, role, shard.full, shard.dtype, group.region)
                number = numbers.setdefault(pattern, len(numbers))
                for name in group.names:
                    numbers_of[name].append(number)
    names = sorted(numbers_of, key=natural)
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, name in enumerate(names):
        # A shard that is named twice counts once.
        alike[tuple(sorted(set(numbers_of[name])))].append(place)
    patterns = list(numbers)
    classes = []
    for own_numbers, places in alike.items():
        own = [patterns[number] for number in own_numbers]
        same = tuple(names[place] for place in places)
        dtype = _travels_as(same[0], own, (sources, targets), cast)
        held = _by_role(pattern for pattern in own if not pattern.is_target)
        wanted = _by_role(pattern for pattern in own if pattern.is_target)
        classes.append(TensorClass(same, tuple(places), own[0].full, dtype, held, wanted))
    return classes


def _by_role(patterns: Iterable[ShardPattern]) -> dict[int, tuple[Slice, ...]]:
    """Role -> its slices."""
    regions: dict[int, list[Slice]] = defaultdict(list)
    for pattern in patterns:
        regions[pattern.role].append(pattern.region)
    return {role: tuple(own) for role, own in regions.items()}


def _travels_as(
    name: str, patterns: Sequence[ShardPattern], sides: tuple[Roles, Roles], cast: bool
) -> str:
    """The engine's dtype. Raises ValueError where shapes, or dtypes that may not, differ."""
    first = patterns[0]
    last = patterns[-1]  # a target: those come last
    wanted = last.dtype
    may_differ = cast and {first.dtype, wanted} <= set(_CASTABLE)
    for pattern in patterns:
        # Sources agree with the first of them, and so do targets; where a cast is allowed, targets
        # agree with each other instead.
        like = first
        if may_differ and pattern.is_target and pattern.full == first.full:
            like = last
        if (pattern.full, pattern.dtype) != (like.full, like.dtype):
            side = "rollout" if pattern.is_target else "training"
            like_rank = sides[like.is_target].ranks[like.role][0]
            rank = sides[pattern.is_target].ranks[pattern.role][0]
            raise ValueError(
                f"{name}: rank {like_rank} has shape {like.full} and dtype {like.dtype}, rank"
                f" {rank} ({side}) has shape {pattern.full} and dtype {pattern.dtype}; make"
                " both sides agree (precision.params and rollout.dtype, vocabulary, model path)"
            )
    if wanted not in ITEMSIZE:
        raise ValueError(f"{name}: dtype {wanted!r} is not one of {sorted(ITEMSIZE)}")
    return wanted
