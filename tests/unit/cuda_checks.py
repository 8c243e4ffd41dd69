"""The checks of test_cuda_answers: each is written down beside the place that asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config, RolloutConfig

Patch = pytest.MonkeyPatch
CHECKS: dict[str, Callable[[Patch, Any], None]] = {}


def asked_at(site: str) -> Callable[[Callable[[Patch, Any], None]], Callable[[Patch, Any], None]]:
    def note(check: Callable[[Patch, Any], None]) -> Callable[[Patch, Any], None]:
        CHECKS[site] = check
        return check

    return note


def run(*overrides: str) -> Config:
    given = ["model.path=m", "data.train=t", "data.eval=e", *overrides]
    return validate(Config, compose("config", given), "test")


def rollout(**more: Any) -> RolloutConfig:
    return RolloutConfig(**{**compose("rollout/vllm"), "stop": (), **more})
