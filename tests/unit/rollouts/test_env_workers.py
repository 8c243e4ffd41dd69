"""What environments in their worker processes do to themselves costs their own responses alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_rl import plugins
from megatron_rl.rewards.base import Task
from megatron_rl.rewards.workers.pool import WorkerPool
from megatron_rl.rollouts.environments import base
from megatron_rl.rollouts.environments.base import EnvironmentSettings
from megatron_rl.rollouts.environments.turns import Waiting, turns_of_run
from megatron_rl.rollouts.environments.worker import EpisodeSetup, shortened, turn_seed
from megatron_rl.types import Completion, Prompt
from tests.unit.config.made_configs import config
from tests.unit.data.toy import character_tokenizer
from tests.unit.rollouts.test_turns import TEMPLATE

TASK = Task("p:1", "4", "toy", {})
PLUGIN = """
import asyncio, os, random, signal, time
import numpy  # whose seeds are smaller
from megatron_rl.rollouts.environments.base import Done, Environment, register_environment

@register_environment("fragile")
class Fragile(Environment):
    def start(self, task, seed):
        self.seen = []

    def step(self, text, seed):
        self.seen.append(text)
        if text == "hang": time.sleep(60)
        if text == "later": return self.later()
        if text == "loop":
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            while True: pass
        if text == "die": os._exit(3)
        if text == "raise": raise RuntimeError("its own fault")
        if text == "garbage": return [{"role": "assistant", "content": "me"}]
        if text == "nothing": return None
        if text == "memory": return str(bytearray(8 << 30))
        if text == "gigabyte": return "x" * (1 << 30)
        if text == "messages": return [{"role": "user", "content": "x" * 1000}] * 1_000_000
        if text == "words": raise RuntimeError("x" * 10_000_000)
        if text == "name": return [{"role": "tool", "name": "x" * 10_000_000, "content": "a"}]
        if text == "parts": return Done(1.0, {f"part{n}": 1.0 for n in range(10_000)})
        if text == "part": return Done(1.0, {"x" * 10_000_000: 1.0})
        if text == "surrogate": return "a\\ud800"
        if text == "long": return "x" * 100_000_000
        if text == "done": return Done(0.5, {"seen": len(self.seen)})
        if text == "nan": return Done(float("nan"))
        if text == "draw": return f"{random.random()} {numpy.random.random()}"
        return "+".join(self.seen)

    async def later(self):
        await asyncio.sleep(0)
        return f"{id(asyncio.get_running_loop())}"
"""
SETTINGS = {"memory_bytes": 3 << 30, "max_message_characters": 40}


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WorkerPool]]:
    """Makes pools of that environment; closes them. ``timeout_s``: of one answer."""
    path = tmp_path / "fragile_environment.py"
    path.write_text(PLUGIN)
    monkeypatch.setattr(plugins, "_loaded", [])
    monkeypatch.setattr(base, "_classes", dict(base._classes))
    plugins.load_plugins([str(path)])
    made: list[WorkerPool] = []

    def make(*, timeout_s: float = 0.5, **limits: Any) -> WorkerPool:
        settings = EnvironmentSettings(
            "fragile", (), sandbox="bubblewrap", timeout_s=timeout_s, **SETTINGS
        )
        setup = EpisodeSetup(plugins.loaded(), settings)
        made.append(WorkerPool(setup, limit=("env.timeout_s", timeout_s), **limits))
        return made[-1]

    yield make
    for one in made:
        one.close()


def item(*turns: str, seed: int = 7) -> tuple[Task, int, Sequence[str]]:
    return TASK, seed, turns


def test_each_fault_costs_its_own_response(pool: Callable[..., WorkerPool]) -> None:
    faults = {
        "hang": "no answer within env.timeout_s = 0.5 s",
        "loop": "had to be killed",
        "die": "died",
        "raise": "RuntimeError: its own fault",
        "garbage": "role 'assistant'",
        "nothing": "TypeError",
        "memory": "MemoryError",
        "messages": "1000000 messages; at most 64",
        "words": f"RuntimeError: {'x' * 286}",
        "parts": "10000 parts; at most 64",
        "part": "names of at most 100 characters",
        "nan": "reward is nan",
    }
    items = [one for fault in faults for one in (item("fine", seed=1), item(fault, seed=2))]
    replies = pool(num_workers=2).judge(items)
    for reply in replies[::2]:
        assert [one["content"] for one in reply["messages"]] == ["fine"]
    for expected, reply in zip(faults.values(), replies[1::2], strict=True):
        assert expected in reply["problem"], reply
        assert len(json.dumps(reply)) < 1000


def test_what_it_answers(pool: Callable[..., WorkerPool]) -> None:
    workers = pool(timeout_s=20.0)
    (first,) = workers.judge([item("a")])
    (second,) = workers.judge([item("a", "b")])
    (other,) = workers.judge([item("a", "c")])  # another worker has seen its first turn
    (again,) = pool(timeout_s=20.0).judge([item("a", "b")])
    texts = [reply["messages"][0]["content"] for reply in (first, second, other, again)]
    assert texts == ["a", "a+b", "a+c", "a+b"]
    (done,) = workers.judge([item("a", "done")])
    assert done["done"] == {"reward": 0.5, "accuracy": 0.0, "parts": {"seen": 2.0}}
    first, second = workers.judge([item("later"), item("later")])
    assert first == second and "messages" in first, "one event loop"
    (named,) = workers.judge([item("name")])
    assert named["messages"] == [{"role": "tool", "name": "x" * 100, "content": "a"}]
    long, broken, one, same, differs = workers.judge(
        [item("long"), item("surrogate"), item("draw"), item("draw"), item("draw", seed=8)]
    )
    assert broken["messages"][0]["content"] == "a?", "no tokenizer takes half a character"
    assert long["messages"][0]["content"] == (
        f"{'x' * 20}\n[99999960 characters left out]\n{'x' * 20}"
    )
    assert one == same and one != differs


@pytest.mark.full
def test_a_gigabyte_is_cut_where_it_arises(pool: Callable[..., WorkerPool]) -> None:
    (reply,) = pool(timeout_s=60.0).judge([item("gigabyte")])
    (message,) = reply["messages"]
    assert message["content"] == f"{'x' * 20}\n[{2**30 - 40} characters left out]\n{'x' * 20}"


@pytest.mark.full
def test_hanging_environments_end_with_the_budget_of_the_step(
    pool: Callable[..., WorkerPool],
) -> None:
    """20 that hang, 0.5 s each: 10 s without a budget."""
    workers = pool(step_timeout_s=60.0)
    workers.judge([item("fine")])
    began = time.monotonic()
    replies = workers.judge([item("hang", seed=number) for number in range(20)], 1.5)
    assert time.monotonic() - began < 8
    assert "env.step_timeout_s = 60 s was used up" in replies[-1]["problem"]
    assert all(reply["problem"] for reply in replies)


def test_no_response_waits_longer_than_the_budget_of_a_generation(
    pool: Callable[..., WorkerPool],
) -> None:
    """Three rounds, in each of which two of two workers hang for 0.5 s; the next generation has the
    whole budget again."""
    tokenizer = character_tokenizer(TEMPLATE)
    pool()  # registers the environment
    chosen = ("precision=fp32", "rollout=vllm_cpu", "env.name=fragile", "env.timeout_s=0.5")
    found = turns_of_run(config(*chosen, "env.step_timeout_s=0.8"), tokenizer)
    assert found is not None

    def ends(text: str) -> list[str]:
        ids = tokenizer(f"{text}@", add_special_tokens=False)["input_ids"]
        whole = Completion(ids, [0.0] * len(ids), False, 0)
        for number in range(2):
            prompt = Prompt(f"p{number}", (2,), "4", "toy")
            found.give(Waiting(number, None, prompt, 0, whole, 99, time.monotonic()))
        told: list[Any] = []
        while len(told) < 2:
            told += found.take()
            time.sleep(0.01)
        return [one.score.problem if one.score else "" for _, one in told]

    assert ends("a") == ["", ""]  # workers have started
    found.begin_step()
    ends("hang"), ends("hang")
    assert all("env.step_timeout_s = 0.8 s was used up" in one for one in ends("hang"))
    found.forget()
    assert ends("a") == ["", ""]


def test_a_long_message_loses_its_middle() -> None:
    assert shortened("abcdefgh", 4) == "ab\n[4 characters left out]\ngh"
    assert shortened("abcdefgh", 8) == "abcdefgh"
    assert shortened("abcdefgh", 1) == "a\n[7 characters left out]\n"


def test_every_turn_has_a_seed_of_its_own() -> None:
    assert len({turn_seed(seed, turn) for seed in (1, 2) for turn in range(3)}) == 6
