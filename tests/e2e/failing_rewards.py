"""Reward functions: the tasks of the quickstart, judged by reasoning-gym, and the same where three
of ten verdicts on training prompts fail. Which fail follows from prompt, response and how often the
two came together, not from what is right.

    torchrun ... reward.function=tests/e2e/failing_rewards.py:failing reward.max_excluded_share=0.6
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import reasoning_gym

from megatron_rl.rewards.base import Options, Task
from megatron_rl.rewards.reasoning_gym import GeneratedVerifier

FAILING_SHARE = 0.3
TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "max_digits": 1},
    "spell_backward": {"max_word_len": 5},
    "palindrome_generation": {"min_length": 3, "max_length": 5},
}
# As conf/experiment/quickstart_cpu.yaml makes them.
HELD_OUT = {
    entry["question"]
    for name, settings in TASKS.items()
    for entry in reasoning_gym.create_dataset(name, size=128, seed=2, **settings)
}
_VERIFIER = GeneratedVerifier(Options(False, 5.0, 4 << 30, "rlimits_only"))
_SEEN: Counter[tuple[str, str]] = Counter()


def sound(tasks: Sequence[Task], responses: Sequence[str]) -> list[float]:
    pairs = zip(tasks, responses, strict=True)
    return [_VERIFIER.verify(task, response).accuracy for task, response in pairs]


def failing(tasks: Sequence[Task], responses: Sequence[str]) -> list[float | None]:
    """None is no reward, so it has no verdict."""
    found: list[float | None] = []
    rewards = sound(tasks, responses)
    for task, response, reward in zip(tasks, responses, rewards, strict=True):
        fails = draw(task.uid, response) < FAILING_SHARE
        is_training = task.extra["question"] not in HELD_OUT
        found.append(None if fails and is_training else reward)
    return found


def draw(uid: str, response: str) -> float:
    """Uniform in [0, 1)."""
    _SEEN[uid, response] += 1
    text = f"{uid} {_SEEN[uid, response]} {response}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
