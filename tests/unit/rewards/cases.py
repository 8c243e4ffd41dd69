"""What the tests of this folder share: configurations, prompts, hostile texts."""

from __future__ import annotations

import random

from megatron_rl.config.load import compose
from megatron_rl.config.schema import RewardConfig
from megatron_rl.types import Prompt

AUTO = compose("reward/auto")


def config(**changes) -> RewardConfig:
    """``reward`` of conf/reward/auto.yaml with short limits and one worker."""
    own = {"verifier": "exact", "sandbox": "rlimits_only", "num_workers": 1}
    limits = {"timeout_s": 1.0, "function_timeout_s": 30.0}
    return RewardConfig(**AUTO | own | limits | changes)


def prompt(answer="4", source="toy", extra=None) -> Prompt:
    return Prompt("toy:1", (1,), answer, source, extra or {})


def accuracies(reward, prompts, responses) -> list[float]:
    return [
        score.parts["accuracy"]
        for score in reward.score(prompts, responses, [False] * len(responses))
    ]


def restarts(reward) -> int:
    """Workers that were killed or died and were replaced, since the start."""
    return sum(pool.restarts for pool in reward._pools())


PIECES = (
    *r"\boxed{ { } $ \frac{1}{ \sqrt[ ] ( ) ^ 9 ** ! _ & \left( \begin{matrix}".split(),
    *"<think> </think> <answer> </answer> a".split(),
    *(" ", "\n", "\t", "\x00", "\ud800", "\udfff", "\u202e", "\u00e9", "\U0001f600", "\u0660"),
    *r"0.1 1e999 - , 1,234, nan inf x= \int_0^ \infty \pi %".split(),
    *("```python\n", "```", "import os\nos._exit(0)\n", "while True: pass\n"),
    *r"""print( ' " [ ; \ | \text{ \sum_{n=1}^""".split(),
)
WHOLE = (
    "",
    "\x00" * 50,
    "9" * 20_000,
    "-" * 5_000,
    "1,234" * 3_000,
    r"\boxed{" * 3_000,
    r"\boxed{9^{9^{9^{9}}}}",
    "9**9**9**9",
    "2^" * 400 + "2",
    r"\boxed{" + "(" * 2_000 + ")" * 2_000 + "}",
    r"\frac{" * 300,
    "<think>a</think><answer>b</answer> x" * 500,
    "a" * 40 + "!",
    "<answer>" + "\n" * 2_000,
    "\ud800" * 100,
    r"\boxed{" + "1+" * 3_000 + "1}",
    r"\boxed{\sqrt" * 200,
    "[" * 3_000,
    "{" * 3_000,
    r"\boxed{1000000000!}",
    r"\boxed{\int_0^1 \frac{\sin(x^{99})}{\cos(x)} dx}",
    "1e" + "9" * 300,
    "0" * 9_999 + "1",
    "```python\n" * 500,
)


def hostile_texts(number: int, seed: int = 0) -> list[str]:
    """What a collapsed policy, or one that hunts for rewards, might write: nested and unclosed
    brackets, repeats, huge powers, long digits, NUL, halves of surrogate pairs, killers of regular
    expressions."""
    draw = random.Random(seed)
    texts = list(WHOLE)
    while len(texts) < number:
        pieces = draw.choices(PIECES, k=draw.randrange(1, 30))
        repeats = draw.choice((1, 1, 1, 2, 10, 100))
        texts.append("".join(pieces) * repeats)
    draw.shuffle(texts)
    return texts[:number]
