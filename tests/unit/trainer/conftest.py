"""The bandit's runs, the folder of a run that has been, and dispatchers of servers, as fixtures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import save_file

from megatron_rl.config.load import compose
from megatron_rl.rollouts.backends.loop_thread import LoopThread
from megatron_rl.rollouts.backends.server_parts import ServerParts
from megatron_rl.rollouts.backends.servers import ServerBackend
from megatron_rl.rollouts.backends.timeouts import RequestTimeouts
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.run import run_folder
from megatron_rl.runtime.guard import lock
from megatron_rl.scheduling.whole_groups import Rules
from megatron_rl.trainer.trainer import Trainer
from tests.unit.trainer.fakes import prompts
from tests.unit.trainer.runs import build_bandit
from tests.unit.trainer.server_fakes import (
    RULES,
    Failed,
    FirstTokenIsOdd,
    Fleet,
    Gone,
    Unreachable,
    job_of,
    text_of,
)


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """``build_bandit`` in a folder of the test; the locks of its runs are given back."""
    yield partial(build_bandit, tmp_path)
    for folder in tmp_path.iterdir():
        lock.release(folder)


@pytest.fixture
def figure() -> None:
    """For a test that wants the real figure at the end of its run."""


@pytest.fixture(autouse=True)
def plain_figure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes half a second, half of a run. That it is done, ``figure`` shows, and what is
    drawn, the tests of reporting do."""
    if "figure" not in request.fixturenames:
        monkeypatch.setattr(run_folder, "draw_curves", lambda metrics, out: out.touch())


@pytest.fixture
def run(tmp_path):
    """The folder of a run with an export and no checkpoint yet."""
    model = tmp_path / "model"
    folder = tmp_path / "run"
    for directory in (model, folder / "export"):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(
            json.dumps({"architectures": ["X"], "max_position_embeddings": 512})
        )
        save_file({}, directory / "model.safetensors")
    overrides = [
        f"model.path='{model}'",
        "data.train=t.jsonl",
        "data.eval=e.jsonl",
        f"run_dir='{folder}'",
    ]
    values = compose(
        "config", [*overrides, "rollout.max_prompt_tokens=7", "data.prompt_suffix=' think'"]
    )
    (folder / "config.json").write_text(
        json.dumps(values | {"versions": {}, "git_commit": None, "world_size": 8})
    )
    return folder


@pytest.fixture
def made_dispatchers() -> Iterator[list[ServerBackend]]:
    dispatchers: list[ServerBackend] = []
    yield dispatchers
    for dispatcher in dispatchers:
        dispatcher.close()


@pytest.fixture
def bounded_waits(monkeypatch) -> None:
    """Nobody waits for a dispatcher without end."""

    call = LoopThread.call

    def in_time(self: LoopThread, work: Coroutine, *rest):
        return call(self, asyncio.wait_for(work, 30.0), *rest)

    monkeypatch.setattr(LoopThread, "call", in_time)


@pytest.fixture
def start(made_dispatchers, bounded_waits):
    def start(
        fleet: Fleet, rules: Rules = RULES, saved=None, *, reward=None, wants=None, **changes
    ) -> ServerBackend:
        job = job_of(rules, prompts(7), wants)
        if saved is not None:
            job.stream.restore(saved["prompts"])
            job.store.restore(saved["store"])
        parts = ServerParts(
            connect=fleet.connect,
            lost=Gone,
            unreachable=Unreachable,
            failed=Failed,
            switch=fleet.switch,
            rewards=lambda wake: RewardThread(reward or FirstTokenIsOdd(), text_of, wake=wake),
            capacity=4,
            timeouts=RequestTimeouts(None),
            longest_response=4,
        )
        made_dispatchers.append(ServerBackend(job, replace(parts, **changes), fleet, saved))
        return made_dispatchers[-1]

    return start
