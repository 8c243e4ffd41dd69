"""Unchanged agent programs, one of them with the ``openai`` library, answered by given turns."""

from __future__ import annotations

import json
import re
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
from megatron_rl.rollouts.environments.agent import AgentProcess, answer_of
from megatron_rl.rollouts.environments.base import EnvironmentSettings
from megatron_rl.rollouts.environments.turns import turns_of_run
from megatron_rl.rollouts.environments.worker import EpisodeSetup
from tests.launch import REPO
from tests.unit.config.made_configs import config
from tests.unit.data.toy import character_tokenizer
from tests.unit.rollouts.test_env_tools import call
from tests.unit.rollouts.test_turns import TEMPLATE

SHORT = REPO / "examples" / "tools_cpu" / "agent.py"
WITH_LIBRARY = """
import json, sys
from openai import OpenAI

client, stream = OpenAI(max_retries=0), sys.argv[2] == "stream"
messages = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": sys.argv[1]}]},
]
assert client.models.list().data[0].id == "policy"
while True:
    asked = dict(model="policy", messages=messages, temperature=0.1, stream=stream)
    found = client.chat.completions.create(**asked)
    choice = [one.choices[0] for one in found][0] if stream else found.choices[0]
    said = choice.delta if stream else choice.message
    if said.content == "stop":
        break
    messages += [{"role": "assistant", "content": said.content}]
    messages += [{"role": "user", "content": f"{said.content}?"}]
print(json.dumps({"reward": 0.25, "asked": len(messages)}))
"""
# By the first argument; the second part of a response is what the policy says.
ODD = """
import json, os, sys, time, urllib.request

def ask(*words, **more):
    roles = ["user", "assistant"]
    messages = [{"role": roles[n % 2], "content": word} for n, word in enumerate(words)]
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = json.dumps({"messages": messages, **more}).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(address, body)))

kind = sys.argv[1]
if kind == "silent":
    sys.exit("I do not ask")
more = {"n": {"n": 2}, "stop": {"stop": ["."]}, "tools": {"tools": [{"type": "function"}]}}
ask("other words" if kind == "other" else "go", **more.get(kind, {}))
if kind == "hang":
    print(os.getpid(), file=open(sys.argv[2], "w"))
    time.sleep(60)
if kind == "fail":
    raise KeyError("lost")
if kind == "restart":
    ask("go", "changed", "go on")
if kind == "again":
    ask("go")
print("not a number: {}")
"""
Item = tuple[Task, int, list[str]]


@pytest.fixture
def pool() -> Iterator[Any]:
    """Makes a pool of one worker; closes it."""
    made: list[WorkerPool] = []

    def make(command: str, *tools: str, timeout_s: float = 30.0) -> WorkerPool:
        settings = EnvironmentSettings(
            "agent", tools, timeout_s, 4 << 30, 200, "none", agent=command
        )
        made.append(WorkerPool(EpisodeSetup((), settings), limit=("env.timeout_s", timeout_s)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def item(task: dict[str, Any], *turns: str, first: str = "go", system: str | None = None) -> Item:
    messages = [{"role": "user", "content": first}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    extra = {"task": task, "messages": messages}
    return Task("p:1", "4", "toy", extra), 7, list(turns)


@pytest.mark.parametrize("kind", ["whole", "stream"])
def test_the_library_is_answered_by_the_turns_of_a_response(
    kind: str, pool: Any, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(WITH_LIBRARY)
    command = f"{sys.executable} {tmp_path}/agent.py {{word}} {kind}"
    workers = pool(command)
    turns = ["one", "two {}", "stop"]
    of = dict(first="hello there", system="Be short.")
    task = {"word": "hello there"}
    for number, words in enumerate(["one?", "two {}?"], start=1):
        (reply,) = workers.judge([item(task, *turns[:number], **of)])
        assert reply == {"messages": [{"role": "user", "name": "user", "content": words}]}
    (reply,) = workers.judge([item(task, *turns, **of)])
    assert reply == {"done": {"reward": 0.25, "accuracy": 0.0, "parts": {"asked": 6.0}}}
    # Made anew from its turns, as after a crash.
    assert pool(command).judge([item(task, *turns, **of)]) == [reply]


def test_calls_are_fields_and_results_are_messages_of_the_tool(pool: Any, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"expression": "57 * 87", "answer": "4959"}\n')
    command = f"{sys.executable} {SHORT} {{expression}}"
    record = [sys.executable, str(REPO / "tools" / "record_agent.py"), "--agent", command]
    subprocess.run([*record, "--out", str(tmp_path / "made"), str(tasks)], check=True, cwd=REPO)
    row = json.loads((tmp_path / "made" / "rows.jsonl").read_text())
    assert row["answer"] == "4959" and row["prompt"] == row["extra"]["messages"]
    tools = str(tmp_path / "made" / "tools.json")
    workers = pool(command, tools)
    task = Task("p:1", "4959", "toy", row["extra"])
    turns = [
        "I ask "
        + call('{"name": "calculator", "arguments": {"expression": "57 * 87"}}')
        + call('{"name": "calculator", "arguments": {"expression": "5"}}'),
        "4959",
    ]
    (reply,) = workers.judge([(task, 7, turns[:1])])
    found = [(one["role"], one["name"], one["content"]) for one in reply["messages"]]
    fault = "error: invalid literal for int() with base 10: ''"
    assert found == [("tool", "calculator", "4959"), ("tool", "calculator", fault)]
    assert workers.judge([(task, 7, turns)]) == [{"done": {}}]
    shows = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}" + TEMPLATE
    tokenizer = character_tokenizer(shows)
    options = config("env=agent", f"env.agent='{command}'", f"env.tools=['{tools}']")
    assert turns_of_run(options, tokenizer) is not None
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)
    assert text == "[calculator]<user>1@"


def test_what_an_agent_may_not_do_costs_its_response_alone(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ODD)
    workers = pool(f"{sys.executable} {tmp_path}/agent.py {{kind}} {tmp_path}/pid", timeout_s=20.0)
    for kind, words in {
        "silent": "ended without a request: exit status 1, I do not ask",
        "other": r"asks \[.*other words.*\], where the prompt of its row is \[.*go.*\]",
        "n": "the agent sets n, which is not supported",
        "stop": "the agent sets stop, which is not supported",
        "tools": "the agent has other tools than env.tools",
        "fail": "the agent failed: exit status 1, KeyError: 'lost'",
        "restart": "the agent changes earlier messages, or begins another conversation",
        "again": "the agent changes earlier messages, or begins another conversation",
    }.items():
        (reply,) = workers.judge([item({"kind": kind}, "said")])
        assert re.search(words, reply["problem"]), (kind, reply)
        assert workers.judge([item({"kind": "fine"}, "said")]) == [{"done": {}}]
    (reply,) = workers.judge([(Task("p:1", "4", "toy", {}), 7, ["said"])])
    assert "its extra has no messages; make rows by tools/record_agent.py" in reply["problem"]


def test_an_agent_that_hangs_is_ended(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ODD)
    workers = pool(f"{sys.executable} {tmp_path}/agent.py {{kind}} {tmp_path}/pid", timeout_s=3.0)
    (reply,) = workers.judge([item({"kind": "hang"}, "said")])
    assert reply["problem"] == "no answer within env.timeout_s = 3 s"
    pid = int((tmp_path / "pid").read_text())
    ends_at = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < ends_at
        time.sleep(0.05)


def test_what_is_wrong_is_found_at_the_start() -> None:
    for more, words in {
        (): r"env\.agent = null: give the command",
        ("env.agent=program", "env.tools=[absent.json]"): r"env\.tools = absent\.json",
        ("env.agent=program", "data.prompt_suffix=now"): r"data\.prompt_suffix",
    }.items():
        with pytest.raises(ValueError, match=words):
            turns_of_run(config("env=agent", *more), character_tokenizer(TEMPLATE))


def test_a_call_that_cannot_be_read_stays_text() -> None:
    good = call('{"name": "a", "arguments": {"x": 1}}')
    assert answer_of("no call", 0) == {"role": "assistant", "content": "no call"}
    assert answer_of(good + call("{"), 0)["content"] == good + call("{")
    (made,) = answer_of(good, 2)["tool_calls"]
    assert (made["id"], json.loads(made["function"]["arguments"])) == ("call_2_0", {"x": 1})


def test_an_address_is_never_used_again() -> None:
    """A program may have others ask for it, which ask on when it is killed."""
    words = "import os; print(os.environ['OPENAI_BASE_URL'])"
    found = []
    for _ in range(8):
        agent = AgentProcess(f'{sys.executable} -c "{words}"', {}, seed=0)
        assert agent.asked(30.0) is None
        found.append(agent.ending()[1])
        del agent
    assert len({*found}) == 8, found
