"""Scores hostile responses through ``build_reward`` as the trainer does, in a process of its
own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from megatron_rl.types import Prompt


def score(request: Mapping[str, Any]) -> int:
    """Builds the reward of ``request["overrides"]``, checks the prompts and scores each response (a
    text, or ``[unit, times]`` for ``unit * times``) ``repeat`` times. Prints one JSON line.
    Returns the exit code."""
    from megatron_rl.config.load import compose, validate
    from megatron_rl.config.schema import Config
    from megatron_rl.rewards.build import build_reward

    settings = ["model.path=none", "data.train=none", "data.eval=none", *request["overrides"]]
    try:
        config = validate(Config, compose("config", settings), "the configuration")
        reward = build_reward(config.reward)
        answer = text_of(request["answer"])
        source = request.get("data_source", "trial")
        responses = [text_of(item) for item in request["responses"]] * request.get("repeat", 1)
        extra = request.get("extra", {})
        prompts = [
            Prompt(f"trial:{row}", (1,), answer, source, extra) for row in range(len(responses))
        ]
        reward.check(prompts)
        started = time.perf_counter()
        scores = reward.score(prompts, responses, [False] * len(responses))
        seconds = time.perf_counter() - started
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    rows = [
        {"reward": one.reward, "correct": one.correct, "parts": dict(one.parts)} for one in scores
    ]
    print("scores " + json.dumps({"seconds": seconds, "scores": rows}), flush=True)
    return 0


def text_of(item: Any) -> str:
    """A text as it stands, or a list of ``[unit, times]`` and texts joined."""
    if isinstance(item, str):
        return item
    return "".join(part if isinstance(part, str) else part[0] * part[1] for part in item)
