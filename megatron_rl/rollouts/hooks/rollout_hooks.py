"""The rollout hooks of a run (``hooks/base.py``) at work: called, checked, applied."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_rl.hooks.base import ROLLOUT_HOOKS, RolloutEdit
from megatron_rl.knobs import Named
from megatron_rl.plugins import named, place
from megatron_rl.rollouts.rows.experience import Groups, Response, Responses
from megatron_rl.runtime.launch import World

METRIC = re.compile(r"[a-z0-9_]+")


class RolloutHooks:
    """The hooks of a run, called by ``Rollouts.collect``."""

    def __init__(self, chosen: Mapping[str, Named], world: World) -> None:
        self._chosen = {name: piece.model_dump(exclude={"name"}) for name, piece in chosen.items()}
        self._world = world

    def __call__(self, step: int, groups: Groups | None) -> RolloutEdit:
        """Collective: all that the hooks change, one after the other, as one edit with every field;
        metrics have their final keys. ``groups``: those of the step, on rank 0.

        Raises:
            ValueError: a hook failed, its answer does not fit, or it dropped every group.
        """
        return self._world.from_main(partial(self._on_main, step, groups))

    def _on_main(self, step: int, groups: Groups | None) -> RolloutEdit:
        assert groups is not None, "rank 0 has the groups"
        left = dict(enumerate(groups))
        metrics: dict[str, float] = {}
        for name, knobs in self._chosen.items():
            edit = called(name, step, list(left.values()), knobs)
            keep = [True] * len(left) if edit.keep is None else edit.keep
            # Numbers of the groups before any hook: each hook sees what the one before has left.
            numbers = [number for number, keeps in zip(left, keep, strict=True) if keeps]
            left = dict(zip(numbers, edited(list(left.values()), edit), strict=True))
            metrics |= {f"hook/{name}/{key}": float(value) for key, value in edit.metrics.items()}
            if not left:
                raise ValueError(
                    f"rollout hook {name}: dropped every group of step {step}; keep at least one"
                )
        rewards = [
            [response.score.reward for response in left.get(number, group)]
            for number, group in enumerate(groups)
        ]
        return RolloutEdit(rewards, [number in left for number in range(len(groups))], metrics)


def edited_responses(responses: Responses, edit: RolloutEdit) -> Responses:
    """``responses`` with the rewards of ``edit``, without the groups it drops, on every rank."""
    if edit.rewards is not None:
        rewards = [float(reward) for group in edit.rewards for reward in group]
        pairs = zip(responses.scores, rewards, strict=True)
        scores = [replace(score, reward=reward) for score, reward in pairs]
        responses = replace(responses, scores=scores)
    if edit.keep is None:
        return responses
    return responses.take(np.flatnonzero(np.array(edit.keep)[responses.group_ids]))


def called(name: str, step: int, groups: Groups, knobs: Mapping[str, Any]) -> RolloutEdit:
    """What the hook returns, checked.

    Raises:
        ValueError: the hook raised, with file and line; or its answer does not fit ``groups``.
    """
    subject = f"rollout hook {name} at step {step}"
    # Mappings that cannot be written to: a hook runs on rank 0 alone.
    shown = [[_read_only(response) for response in group] for group in groups]
    try:
        edit = ROLLOUT_HOOKS[name].make(step, shown, **knobs)
    except Exception as error:
        raise ValueError(f"{subject}: {named(error)}{place(error)}; correct the hook") from error
    if not isinstance(edit, RolloutEdit):
        raise ValueError(
            f"{subject}: returned {type(edit).__name__}; return a RolloutEdit, RolloutEdit() to "
            "change nothing"
        )
    for problem in _problems(edit, [len(group) for group in groups]):
        raise ValueError(f"{subject}: {problem}")
    return edit


def _read_only(response: Response) -> Response:
    prompt = replace(response.prompt, extra=MappingProxyType(dict(response.prompt.extra)))
    score = replace(response.score, parts=MappingProxyType(dict(response.score.parts)))
    return replace(response, prompt=prompt, score=score)


def edited(groups: Groups, edit: RolloutEdit) -> Groups:
    """``groups`` with the rewards of ``edit``, without the groups it drops."""
    result = []
    for index, group in enumerate(groups):
        if edit.keep is not None and not edit.keep[index]:
            continue
        if edit.rewards is not None:
            pairs = zip(group, edit.rewards[index], strict=True)
            group = [replace(one, score=replace(one.score, reward=float(r))) for one, r in pairs]
        result.append(group)
    return result


def _problems(edit: RolloutEdit, sizes: Sequence[int]) -> Iterator[str]:
    flags = [] if edit.keep is None else list(edit.keep)
    if edit.keep is not None and [type(flag) for flag in flags] != [bool] * len(sizes):
        yield f"keep = {str(flags)[:80]}; give {len(sizes)} of True and False, one per group"
    if edit.rewards is not None:
        found = [len(group) for group in edit.rewards]
        if found != list(sizes):
            yield f"rewards has {_sizes(found)}; give {_sizes(sizes)}, as in groups"
        for number, group in enumerate(edit.rewards):
            for reward in itertools.filterfalse(_is_finite, group):
                yield f"a reward of group {number} is {reward!r}; rewards are finite numbers"
    for key, value in edit.metrics.items():
        if not METRIC.fullmatch(str(key)) or not _is_finite(value):
            yield f"metric {key!r} = {value!r}; a key is a-z, 0-9 and _, a value a finite number"


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _sizes(sizes: Sequence[int]) -> str:
    shown = " ".join(map(str, sizes[:8]))
    return f"{len(sizes)} groups of {shown}{' ...' if len(sizes) > 8 else ''}"
