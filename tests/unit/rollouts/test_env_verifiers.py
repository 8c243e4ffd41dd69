"""Environments of the ``verifiers`` library, answered by given turns. It needs a Python of its own,
hence an option:

pytest -m full tests/unit/rollouts/test_env_verifiers.py --verifiers-python=PYTHON
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.rewards.base import Task
from tests.launch import REPO, end, run
from tests.numerics.server import free_port
from tests.unit.rollouts.test_env_agent import pool  # noqa: F401 (a fixture)
from tests.unit.rollouts.test_env_tools import call

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
FOLDER = REPO / "examples" / "verifiers"
# A conversation that its environment continues; what it does behind that is by the kind of task.
GAME = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    kind: str
    secret: int = 5

class Guess(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.secret))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

class Games(vf.Taskset[Guess]):
    def load(self):
        for kind in ("fine", "stop", "again", "two"):
            yield Guess(Data(kind=kind, system_prompt="Guess."), self.config.task)

class Roles(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    stopped: vf.AgentConfig = vf.AgentConfig(sampling={"stop": ["x"]})
    silent: vf.AgentConfig = vf.AgentConfig(max_turns=0)

class Game(vf.Env[Roles]):
    async def run(self, task, agents):
        kind = task.data.kind
        async with (agents.stopped if kind == "stop" else agents.player).interaction(task) as talk:
            said, turn = "Begin.", None
            while turn is None or turn.last_reply != str(task.data.secret):
                turn = await talk.turn(said)
                if turn.terminated:
                    return
                said = "higher" if int(turn.last_reply) < task.data.secret else "lower"
        if kind in ("again", "two"):
            other = agents.player if kind == "again" else agents.silent
            async with other.interaction(task) as talk:
                await talk.turn("Begin.")

__all__ = ["Games", "Game"]
"""


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    given = request.config.getoption("--verifiers-python")
    if given is None:
        pytest.skip("needs verifiers 0.4.0 in its own environment: --verifiers-python=PYTHON")
    assert Path(given).is_file(), f"--verifiers-python: there is no {given}"
    return given


@pytest.fixture
def recorded(python: str, tmp_path: Path) -> Iterator[Any]:
    """Serves an environment, and records its tasks: the command of ``env.agent``, the rows by their
    tasks, and the file of its tools."""
    servers = []
    (tmp_path / "game.py").write_text(GAME)
    env = {"PYTHONPATH": f"{FOLDER}:{tmp_path}"}

    def record(name: str, *words: str) -> tuple[str, list[dict[str, Any]], str]:
        serve = [python, str(FOLDER / "server.py")]
        tasks = tmp_path / "tasks.jsonl"
        tasks.write_text(run([*serve, "tasks", name, *words], 120, env=env).stdout)
        address = f"tcp://127.0.0.1:{free_port()}"
        whole = {**os.environ, **env}
        servers.append(
            subprocess.Popen([*serve, "serve", address, name], env=whole, stdout=subprocess.PIPE)
        )
        assert servers[-1].stdout.readline() == f"{address}: {name}\n".encode()
        agent = f"{python} {FOLDER / 'agent.py'} {address}"
        made = tmp_path / "made"
        record = [sys.executable, str(REPO / "tools" / "record_agent.py"), "--agent", agent]
        run([*record, "--out", str(made), str(tasks)], 120)
        rows = [json.loads(line) for line in (made / "rows.jsonl").read_text().splitlines()]
        return agent, rows, str(made / "tools.json")

    yield record
    for server in servers:
        end(server)


def test_tools_and_single_turns(recorded: Any, pool: Any) -> None:  # noqa: F811
    agent, rows, tools = recorded("products", "-n", "2")
    assert len(rows) == 2
    task = Task("p:1", rows[0]["answer"], "toy", rows[0]["extra"])
    assert rows[0]["answer"] == "3717" and "59 * 63" in rows[0]["prompt"][0]["content"]
    workers = pool(agent, tools)
    (reply,) = workers.judge([(task, 7, ["3717"])])
    assert reply == {"done": {"reward": 1.0, "accuracy": 1.0, "parts": {"right": 1, "results": 0}}}
    turns = [
        "I ask "
        + call('{"name": "calculator", "arguments": {"expression": "59 * 63"}}')
        + call('{"name": "calculator", "arguments": {"expression": "59"}}'),
        "more",
    ]
    (reply,) = workers.judge([(task, 8, turns[:1])])
    found = [(one["role"], one["name"], one["content"]) for one in reply["messages"]]
    fault = "error: not enough values to unpack (expected 2, got 1)"
    assert found == [("tool", "calculator", "3717"), ("tool", "calculator", fault)]
    (reply,) = workers.judge([(task, 8, turns)])
    assert reply == {"done": {"reward": 0.0, "accuracy": 0.0, "parts": {"right": 0, "results": 2}}}


def test_several_turns_and_what_cannot_be_trained(recorded: Any, pool: Any) -> None:  # noqa: F811
    agent, rows, tools = recorded("game")
    fine, stop, again, two = (Task("p:1", "", "toy", row["extra"]) for row in rows)
    assert [one["content"] for one in rows[0]["prompt"]] == ["Guess.", "Begin."]
    workers = pool(agent, tools)
    turns = ["3", " 9", "5"]
    for number, words in enumerate(["higher", "lower"], start=1):
        (reply,) = workers.judge([(fine, 7, turns[:number])])
        assert reply == {"messages": [{"role": "user", "name": "user", "content": words}]}
    (reply,) = workers.judge([(fine, 7, turns)])
    assert reply == {"done": {"reward": 0.5, "accuracy": 0.0, "parts": {"found": 1, "guesses": 3}}}
    # Made anew from its turns, as after a crash.
    assert pool(agent, tools).judge([(fine, 7, turns)]) == [reply]
    for task, turn, words in (
        (fine, "a", r"exit status 1, ValueError: invalid literal for int\(\) .* 'a'"),
        (stop, "5", "the agent sets stop, which is not supported"),
        (again, "5", "the agent changes earlier messages, or begins another conversation"),
        (two, "5", "exit status 1, 2 agents of the environment are trainable; one can be trained"),
    ):
        (reply,) = workers.judge([(task, 7, [turn])])
        assert re.search(words, reply["problem"]), reply
        assert workers.judge([(fine, 9, ["5"])])[0]["done"]["reward"] == 0.5


def test_without_a_server_the_agent_says_so(python: str) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    command = [python, str(FOLDER / "agent.py"), address]
    done = subprocess.run(command, input="{}", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"no answer at {address}: start server.py serve {address} TASKSET\n"
