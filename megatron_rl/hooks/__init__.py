"""Hooks of rollouts. Importing this package registers its own: vcrl, dars, erpo, ghpo, ampo, ar3po,
exgrpo."""

from megatron_rl.hooks import replay, sampling
from megatron_rl.hooks.base import (
    ROLLOUT_HOOKS,
    Ask,
    ChosenHooks,
    Resample,
    RolloutEdit,
    SamplingHook,
    ScoredGroup,
    register_rollout_hook,
    register_sampling_hook,
)

FILES = (replay, sampling)

__all__ = [
    "ROLLOUT_HOOKS",
    "Ask",
    "ChosenHooks",
    "Resample",
    "RolloutEdit",
    "SamplingHook",
    "ScoredGroup",
    "register_rollout_hook",
    "register_sampling_hook",
]
