"""The prompts of ``env=agent``: what a program asks first for each of its tasks.

A line of the file of tasks is one: an object with the ``answer``, which the program is not shown.
``--out`` gets ``rows.jsonl`` for ``data.train`` or ``data.eval``, and ``tools.json`` for
``env.tools``, with the schemas of the tools that it offers. Each program is ended at its first
request; no model is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.rollouts.environments.agent import AgentProcess, words_of_content

ROLES = ("system", "user", "assistant")


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("tasks", type=Path, help="jsonl, an object a line")
    add("--agent", required=True, help="command; {NAME} in a word is that field of the task")
    add("--out", type=Path, required=True, help="directory, whose two files are replaced")
    add("--timeout-s", type=float, default=60.0, help="until the first request of a program")
    return parser.parse_args()


def first_request(command: str, task: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Raises ValueError where the program asks nothing."""
    agent = AgentProcess(command, task, seed=0)
    try:
        request = agent.asked(timeout_s)
    except TimeoutError:
        raise ValueError(f"{task}: no request within --timeout-s = {timeout_s:g} s") from None
    finally:
        agent.stop()
    if request is None:
        status, _, errors = agent.ending()
        raise ValueError(f"{task}: the program has ended with {status} and no request: {errors}")
    return request


def row(task: Mapping[str, Any], answer: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError where the request is not the beginning of a conversation."""
    messages = [
        {"role": one["role"], "content": words_of_content(one["content"])}
        for one in request["messages"]
    ]
    with_calls = [one for one in request["messages"] if one.get("tool_calls")]
    if messages[-1]["role"] != "user" or with_calls or {*_roles(messages)} - {*ROLES}:
        raise ValueError(
            f"{task}: the first request has the roles {_roles(messages)}; a prompt ends with the"
            " user, and has no tool calls"
        )
    return {"prompt": messages, "answer": answer, "extra": {"task": task, "messages": messages}}


def _roles(messages: list[dict[str, str]]) -> list[str]:
    return [one["role"] for one in messages]


def main(options: argparse.Namespace) -> None:
    """Raises ValueError, and writes nothing, where a task will not do."""
    rows: list[dict[str, Any]] = []
    tools: list[Any] | None = None
    for line in options.tasks.read_text("utf-8").splitlines():
        task = json.loads(line)
        if "answer" not in task:
            raise ValueError(f"{task}: has no answer; give what the reward compares with")
        answer = str(task.pop("answer"))
        request = first_request(options.agent, task, options.timeout_s)
        rows.append(row(task, answer, request))
        offered = request.get("tools") or []
        if tools is not None and offered != tools:
            raise ValueError(f"{task}: other tools than those of the tasks before; record it apart")
        tools = offered
    options.out.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(one) + "\n" for one in rows)
    (options.out / "rows.jsonl").write_text(text, "utf-8")
    (options.out / "tools.json").write_text(json.dumps(tools, indent=2) + "\n", "utf-8")
    print(f"{options.out}: {len(rows)} rows, {len(tools or [])} tools")


if __name__ == "__main__":
    try:
        main(arguments())
    except (ValueError, OSError) as error:
        sys.exit(f"record_agent: {error}")
