"""The rollout hooks of a run (``hooks/base.py``) at work: called, checked, applied."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
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
            remaining = _remaining(list(left), edit)
            left = dict(zip(remaining, edited(list(left.values()), edit), strict=True))
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


def _remaining(numbers: Sequence[int], edit: RolloutEdit) -> list[int]:
    """Those of the groups ``numbers`` that ``edit`` keeps."""
    if edit.keep is None:
        return list(numbers)
    return [number for number, keep in zip(numbers, edit.keep, strict=True) if keep]


def edited_responses(responses: Responses, edit: RolloutEdit) -> Responses:
    """``responses`` with the rewards of ``edit``, without the groups it drops: ``edited``, on every
    rank."""
    if edit.rewards is not None:
        rewards = [float(reward) for group in edit.rewards for reward in group]
        pairs = zip(responses.scores, rewards, strict=True)
        scores = [replace(score, reward=reward) for score, reward in pairs]
        responses = replace(responses, scores=scores)
    if edit.keep is not None:
        keeps = np.array(edit.keep)[responses.group_ids]
        responses = responses.take(np.flatnonzero(keeps))
    return responses


def called(name: str, step: int, groups: Groups, knobs: Mapping[str, Any]) -> RolloutEdit:
    """What the hook returns, checked.

    Raises:
        ValueError: the hook raised, with file and line; or its answer does not fit ``groups``.
    """
    subject = f"rollout hook {name} at step {step}"
    try:
        edit = ROLLOUT_HOOKS[name].make(step, read_only(groups), **knobs)
    except Exception as error:
        raise ValueError(f"{subject}: {named(error)}{place(error)}; correct the hook") from error
    if not isinstance(edit, RolloutEdit):
        raise ValueError(
            f"{subject}: returned {type(edit).__name__}; return a RolloutEdit, RolloutEdit() to "
            "change nothing"
        )
    _check(subject, edit, [len(group) for group in groups])
    return edit


def read_only(groups: Groups) -> Groups:
    """The same responses with mappings that cannot be written to: a hook runs on rank 0 alone."""
    return [[_read_only(response) for response in group] for group in groups]


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
            group = [_rewarded(response, reward) for response, reward in pairs]
        result.append(group)
    return result


def _rewarded(response: Response, reward: float) -> Response:
    return replace(response, score=replace(response.score, reward=float(reward)))


def _check(subject: str, edit: RolloutEdit, sizes: Sequence[int]) -> None:
    if edit.keep is not None:
        flags = list(edit.keep)
        if len(flags) != len(sizes) or not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(
                f"{subject}: keep = {str(flags)[:80]}; give {len(sizes)} of True and False, "
                "one per group"
            )
    if edit.rewards is not None:
        _check_rewards(subject, edit.rewards, sizes)
    for key, value in edit.metrics.items():
        if not METRIC.fullmatch(str(key)) or not _is_finite(value):
            raise ValueError(
                f"{subject}: metric {key!r} = {value!r}; a key is a-z, 0-9 and _, "
                "a value a finite number"
            )


def _check_rewards(subject: str, rewards: Sequence[Sequence[float]], sizes: Sequence[int]) -> None:
    found = [len(group) for group in rewards]
    if found != list(sizes):
        raise ValueError(
            f"{subject}: rewards has {_sizes(found)}; give {_sizes(sizes)}, as in groups"
        )
    for number, group in enumerate(rewards):
        for reward in group:
            if not _is_finite(reward):
                raise ValueError(
                    f"{subject}: a reward of group {number} is {reward!r}; "
                    "rewards are finite numbers"
                )


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _sizes(sizes: Sequence[int]) -> str:
    shown = " ".join(str(size) for size in sizes[:8])
    more = " ..." if len(sizes) > 8 else ""
    return f"{len(sizes)} groups of {shown}{more}"
