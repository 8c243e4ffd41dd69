"""Tools of real MCP servers, made with the server class of the library, over both transports."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_rl.rewards.base import Task
from megatron_rl.rewards.workers.pool import WorkerPool
from megatron_rl.rollouts.environments.base import EnvironmentSettings
from megatron_rl.rollouts.environments.tools import Tools
from megatron_rl.rollouts.environments.turns import turns_of_run
from megatron_rl.rollouts.environments.worker import EpisodeSetup
from tests.unit.config.made_configs import config
from tests.unit.data.toy import character_tokenizer
from tests.unit.rollouts.test_env_tools import OWN, call
from tests.unit.rollouts.test_turns import TEMPLATE

TASK = Task("p:1", "4", "toy", {})
SERVER = '''
import os, resource, sys, time

from mcp.server.mcpserver import MCPServer
from mcp_types import ImageContent, TextContent

server = MCPServer("toy", log_level="CRITICAL")

@server.tool()
def twice(number: int) -> int:
    """Doubles."""
    return 2 * number

@server.tool()
def mixed() -> list:
    return [TextContent(text="two lines,"), ImageContent(data="AA==", mime_type="image/png")]

@server.tool()
def process() -> int:
    return os.getpid()

@server.tool()
def die() -> str:
    os._exit(1)

@server.tool()
def hang() -> str:
    time.sleep(60)
    return "late"

@server.tool()
def limits() -> str:
    return str(resource.getrlimit(resource.RLIMIT_CPU))

if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are killed at the end."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for one in found:
        one.kill()
        one.wait()


def over_http(program: Path, started: list[subprocess.Popen[bytes]], port: int) -> str:
    command = [sys.executable, str(program), str(port)]
    started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert started[-1].poll() is None
            time.sleep(0.05)
        else:
            return f"http://127.0.0.1:{port}/mcp"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def pool() -> Iterator[Any]:
    """Makes a pool of one worker; closes it. ``timeout_s``: of one answer."""
    made: list[WorkerPool] = []

    def make(*servers: str, timeout_s: float = 20.0, tools: tuple[str, ...] = ()) -> WorkerPool:
        settings = EnvironmentSettings("tools", tools, timeout_s, 4 << 30, 200, "none", servers)
        limit = ("env.timeout_s", timeout_s)
        made.append(WorkerPool(EpisodeSetup((), settings), limit=limit))
        return made[-1]

    yield make
    for one in made:
        one.close()


def calls(*names: str, **arguments: Any) -> tuple[Task, int, list[str]]:
    """An item of the pool: a turn that calls tools, each with the same arguments."""
    words = [json.dumps({"name": name, "arguments": arguments}) for name in names]
    return TASK, 7, ["".join(map(call, words))]


def contents(reply: dict[str, Any]) -> list[str]:
    assert "messages" in reply, reply
    return [one["content"] for one in reply["messages"]]


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_each_fault_of_a_server_costs_its_own_response(
    transport: str, program: Path, started: list[subprocess.Popen[bytes]], pool: Any
) -> None:
    port = free_port()
    spec = f"{sys.executable} {program}"
    if transport == "http":
        spec = over_http(program, started, port)
    workers = pool(spec, tools=("calculator",))
    fine, refused, mixed, done = workers.judge(
        [
            calls("twice", "twice", number=21),
            calls("twice", "thrice", amount=1),
            calls("mixed", "calculator", expression="6*7"),
            (TASK, 7, ["no call"]),
        ]
    )
    assert contents(fine) == ["42", "42"]
    assert {(one["role"], one["name"]) for one in fine["messages"]} == {("tool", "twice")}
    wrong, unknown = contents(refused)
    assert wrong.startswith("error: Error executing tool twice: 1 validation error")
    assert unknown.startswith("error: no tool 'thrice'; there are ['calculator', 'twice', 'mixed'")
    assert contents(mixed)[1] == "42" and done == {"done": {}}
    assert contents(workers.judge([calls("mixed")])[0]) == ["two lines,\n[image]"]

    died, after = workers.judge([calls("die"), calls("calculator", expression="1+1")])
    assert died["problem"].startswith("ToolFailure: the MCP server of die: Connection closed")
    if transport == "http":
        assert "does not answer: All connection attempts failed" in after["problem"]
        over_http(program, started, port)
        (after,) = workers.judge([calls("calculator", expression="1+1")])
    assert contents(after) == ["2"]


@pytest.mark.full
def test_a_server_ends_with_its_worker_and_has_its_own_time(program: Path, pool: Any) -> None:
    """A worker that waits for ``timeout_s`` is killed, and its server with it, busy as it is. The
    worker's limit of seconds of the processor for an answer is not that of the server."""
    workers = pool(f"{sys.executable} {program}", timeout_s=8.0)
    (first,) = workers.judge([calls("process")])
    server = psutil.Process(int(contents(first)[0]))
    again, limit = contents(workers.judge([calls("process", "limits")])[0])
    assert again == str(server.pid)
    assert limit == str((resource.getrlimit(resource.RLIMIT_CPU)[1],) * 2)
    began = time.monotonic()
    hung, (after,) = workers.judge([calls("hang")])[0], workers.judge([calls("twice", number=1)])
    assert hung["problem"] == "no answer within env.timeout_s = 8 s"
    assert contents(after) == ["2"] and time.monotonic() - began < 25
    server.wait(5)


def test_the_model_is_shown_the_tools_of_a_server(program: Path) -> None:
    shows = "{% for t in tools %}[{{ t.function.name }}{{ t.function.parameters.required }}]"
    tokenizer = character_tokenizer(shows + "{% endfor %}" + TEMPLATE)
    spec = f"{sys.executable} {program}"
    assert turns_of_run(config("env=mcp", f"env.servers=['{spec}']"), tokenizer) is not None
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)
    assert text == "[twice['number']][mixed][process][die][hang][limits]<user>1@"


@pytest.mark.full
def test_what_is_wrong_with_servers_is_found_at_the_start(program: Path, tmp_path: Path) -> None:
    (tmp_path / "own_tool.py").write_text(OWN)
    spec = f"{sys.executable} {program}"
    own = f"env.tools=[{tmp_path}/own_tool.py:twice]"
    for more, words in {
        ("env.servers=[]",): r"env\.tools, env\.servers: both are empty",
        ("env.servers=[no_such_program]",): r"env\.servers: no_such_program cannot be asked",
        (f"env.servers=['http://127.0.0.1:{free_port()}/mcp']",): "All connection attempts failed",
        (f"env.servers=['{spec}']", own): "has twice, as another; leave one out",
    }.items():
        with pytest.raises(ValueError, match=words):
            turns_of_run(config("env=mcp", *more), character_tokenizer(TEMPLATE))
    hung = EnvironmentSettings("tools", (), 1.0, 1 << 30, 100, "none", ("sleep 50",))
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"sleep 50 cannot be asked for its tools.*timed out"):
        Tools.functions(hung)
    assert time.monotonic() - began < 15
