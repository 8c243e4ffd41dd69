"""``env=agent``: a program that talks to an OpenAI-compatible server, and knows of no training.

The program is started anew for each response, and its requests for chat completions are answered
by the turns of that response. Its first request must be the prompt of the row, and each other one
the conversation so far with new messages behind it: what was sampled is then never encoded again
(``rendering``). ``tools/record_agent.py`` makes such rows.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import queue
import secrets
import shlex
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_rl.errors import concerning, shortened
from megatron_rl.rewards.base import Task
from megatron_rl.rollouts.environments.base import (
    Done,
    Environment,
    EnvironmentSettings,
    Message,
    register_environment,
)
from megatron_rl.rollouts.environments.child import words_of_child
from megatron_rl.rollouts.environments.tools import read_calls, without_calls

Conversation = Sequence[Mapping[str, Any]]  # messages of a request

MODEL = "policy"  # name of the model for requests
_UNANSWERED_S = 600.0  # after which a request whose response has been ended elsewhere is dropped
_LOOK_S = 0.005  # between two checks whether a program has ended
# Fields that a request may not set, as they would be ignored. The run decides how to sample.
_UNSUPPORTED = ("stop", "logprobs", "functions", "response_format")
_SHOWN = 200
_READ_BYTES = 1 << 16  # of its output, at the end
_AGENTS: weakref.WeakValueDictionary[str, AgentProcess] = weakref.WeakValueDictionary()  # by key


class AgentProcess:
    """A running agent. ``stop`` ends it."""

    def __init__(self, command: str, task: Mapping[str, Any], seed: int) -> None:
        """``{NAME}`` in a word of ``command`` is that field of ``task``, which the program also
        finds on its standard input, as JSON."""
        self.requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.answers: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()  # None: no more
        self.is_asking = asyncio.Lock()
        key = secrets.token_hex(8)  # a request that outlives its program reaches no other one
        _AGENTS[key] = self
        self._loop, port = _server()
        address = f"http://127.0.0.1:{port}/{key}/v1"
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(task, default=str).encode())
            stdin.seek(0)
            # Closed with this object: read behind the end of the program.
            self._output = tempfile.TemporaryFile()  # noqa: SIM115
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                words_of_child(*(_filled(word, task) for word in shlex.split(command))),
                stdin=stdin,
                stdout=self._output,
                stderr=self._errors,
                env={
                    **os.environ,
                    "OPENAI_BASE_URL": address,
                    "OPENAI_API_BASE": address,  # its older name
                    "OPENAI_API_KEY": key,
                    "AGENT_SEED": str(seed),
                },
            )

    def asked(self, timeout_s: float = math.inf) -> dict[str, Any] | None:
        """The next request of the program; None: it has ended. Raises TimeoutError."""
        ends_at = time.monotonic() + timeout_s
        while time.monotonic() < ends_at:
            has_ended = self._process.poll() is not None  # first, not to miss a last request
            try:
                return self.requests.get(timeout=_LOOK_S)
            except queue.Empty:
                if has_ended:
                    return None
        raise TimeoutError

    def answer(self, message: Mapping[str, Any] | None) -> None:
        self._loop.call_soon_threadsafe(self.answers.put_nowait, message)

    def stop(self) -> None:
        self._process.kill()
        self.answer(None)

    def ending(self) -> tuple[int, str, str]:
        """Exit status of a program that has ended, and the last lines of its output and errors."""
        texts = []
        for file in (self._output, self._errors):
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
            texts.append(lines[-1] if lines else "")
        return self._process.wait(), texts[0], texts[1]


def _filled(word: str, task: Mapping[str, Any]) -> str:
    for name, value in task.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


@functools.cache
def _server() -> tuple[asyncio.AbstractEventLoop, int]:
    """Event loop and port of this process's server, opened after a worker is forked. One thread
    for all agents: many would take the address space that a worker may have."""
    from aiohttp import web  # by vLLM; imported here as it takes half a second

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def complete(request: web.Request) -> web.Response:
        agent, message = _AGENTS.get(request.match_info["key"]), None
        asked = await request.json()
        if agent is not None:
            async with agent.is_asking:
                agent.requests.put(asked)
                with suppress(TimeoutError):
                    message = await asyncio.wait_for(agent.answers.get(), _UNANSWERED_S)
        if message is None:
            return web.json_response({"error": {"message": "the response was ended"}}, status=409)
        text = json.dumps(_completion(message, streams=bool(asked.get("stream"))))
        if not asked.get("stream"):
            return web.Response(text=text, content_type="application/json")
        # In one event: an answer is complete before it is sent.
        events = f"data: {text}\n\ndata: [DONE]\n\n"
        return web.Response(text=events, content_type="text/event-stream")

    async def opened() -> int:
        app = web.Application(client_max_size=1 << 30)
        at = "/{key}/v1"
        app.add_routes(
            [web.get(f"{at}/models", models), web.post(f"{at}/chat/completions", complete)]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop, asyncio.run_coroutine_threadsafe(opened(), loop).result()


def _completion(message: Mapping[str, Any], *, streams: bool) -> dict[str, Any]:
    reason = "tool_calls" if "tool_calls" in message else "stop"
    kind, key = "chat.completion", "message"
    if streams:
        kind, key = "chat.completion.chunk", "delta"
        calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls", ()))]
        message = {**message, "tool_calls": calls}
    choices = [{"index": 0, key: message, "finish_reason": reason}]
    return {"id": "turn", "object": kind, "created": 0, "model": MODEL, "choices": choices}


def answer_of(text: str, turn: int) -> dict[str, Any]:
    """The message of an assistant, with the calls of a turn as fields; one that cannot be read
    stays in its text.

    Example: ``answer_of("So: <tool_call>...", 2)`` has the content ``So:`` and a call ``call_2_0``.
    """
    calls = read_calls(text)
    if not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": text}
    told = [
        {
            "id": f"call_{turn}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": without_calls(text) or None, "tool_calls": told}


def _meaning(messages: Conversation) -> list[Any]:
    """What must be equal in two conversations; programs leave out and add fields that are empty."""
    found = []
    for one in messages:
        calls = [call["function"] for call in one.get("tool_calls") or ()]
        named = [(call["name"], json.loads(call["arguments"] or "{}")) for call in calls]
        found.append((one.get("role"), words_of_content(one.get("content")), named))
    return found


def words_of_content(content: Any) -> str:
    """A content is a text, parts that are texts, or absent."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part["text"] for part in content)


def _added(known: Conversation, asked: Conversation) -> list[Message]:
    """The messages behind the conversation so far. Raises ValueError where it is another one."""
    if _meaning(asked[: len(known)]) != _meaning(known):
        raise ValueError(
            "the agent changes earlier messages, or begins another conversation: one response is"
            " one conversation, which only grows"
        )
    calls = {one["id"]: one["function"]["name"] for one in known[-1].get("tool_calls") or ()}
    messages = []
    for one in asked[len(known) :]:
        name = calls.get(one.get("tool_call_id"), one.get("name", one["role"]))
        content = words_of_content(one.get("content"))
        messages.append({"role": one["role"], "name": name, "content": content})
    return messages


@functools.cache
def _schemas(file: str) -> list[Mapping[str, Any]]:
    with concerning(f"env.tools = {file}", "record the rows again by tools/record_agent.py"):
        return list(json.loads(Path(file).read_text("utf-8")))


@register_environment("agent")
class Agent(Environment):
    starts_processes = True

    def __init__(self, settings: EnvironmentSettings) -> None:
        super().__init__(settings)
        self._tools = self.functions(settings)
        self._turn = 0

    @classmethod
    def functions(cls, settings: EnvironmentSettings) -> Sequence[Mapping[str, Any]]:
        if settings.agent is None:
            raise ValueError("env.agent = null: give the command of the program, or set env=single")
        return [schema for file in settings.tools for schema in _schemas(file)]

    @classmethod
    def num_calls(cls, text: str) -> int:
        return len(read_calls(text))

    def start(self, task: Task, seed: int) -> None:
        """Raises ValueError where the program does not ask what was recorded for the row."""
        missing = {"messages", "task"} - task.extra.keys()
        if missing:
            raise ValueError(
                f"{task.uid}: its extra has no {min(missing)}; make rows by tools/record_agent.py"
            )
        assert self.settings.agent is not None, "see functions"
        recorded = task.extra["messages"]
        self._agent = AgentProcess(self.settings.agent, task.extra["task"], seed)
        weakref.finalize(self, self._agent.stop)
        asked = self._next()
        if asked is None:
            raise ValueError(f"the agent ended without a request: {self._ended()}")
        if _meaning(asked) != _meaning(recorded):
            raise ValueError(
                f"the agent asks {shortened(str(asked), _SHOWN)}, where the prompt of its row is"
                f" {shortened(str(recorded), _SHOWN)}; record the rows again"
            )
        self._known = asked

    def step(self, text: str, seed: int) -> Sequence[Message] | Done:
        answer = answer_of(text, self._turn)
        self._turn += 1
        self._agent.answer(answer)
        asked = self._next()
        if asked is None:
            return self._finished()
        if self._turn == self.settings.max_turns:
            self._agent.stop()  # the response ends here, whatever was asked
        known, self._known = [*self._known, answer], asked
        return _added(known, asked)

    def _next(self) -> Conversation | None:
        """The messages of the next request; None: the program has ended. Raises ValueError for a
        request that sets what is not supported."""
        request = self._agent.asked()
        if request is None:
            return None
        unsupported = [key for key in _UNSUPPORTED if request.get(key)]
        if request.get("n") not in (None, 1):
            unsupported.append("n")
        if request.get("tool_choice") not in (None, "auto"):
            unsupported.append("tool_choice")
        if unsupported:
            raise ValueError(f"the agent sets {', '.join(unsupported)}, which is not supported")
        if (request.get("tools") or []) != self._tools:
            raise ValueError("the agent has other tools than env.tools; record its rows again")
        return list(request["messages"])

    def _finished(self) -> Done:
        """Reward and parts, where the last line of output is a JSON object with ``reward``."""
        status, said, _ = self._agent.ending()
        if status:
            raise ValueError(f"the agent failed: {self._ended()}")
        try:
            parts = dict(json.loads(said))
            return Done(float(parts.pop("reward")), parts)
        except (ValueError, TypeError, KeyError):
            return Done()

    def _ended(self) -> str:
        status, _, errors = self._agent.ending()
        return f"exit status {status}, {shortened(errors, _SHOWN)}"
