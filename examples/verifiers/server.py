"""Environments of the ``verifiers`` library, for ``env=agent``. The library's own Python runs it:

    python server.py tasks TASKSET [words of vf-eval] > tasks.jsonl
    python server.py serve ADDRESS TASKSET [words of vf-eval]

``tasks`` writes what ``tools/record_agent.py`` reads. ``serve`` plays tasks for ``agent.py``, over
the library's protocol, until it is ended: to import the library takes seconds, too many for each
response. An agent of the environment for which nothing names a harness, or ``null``, gets
``ChatLoop`` (the library has a shell in a sandbox), and one without a runtime this machine.
"""

import asyncio
import functools
import json
import signal
import sys
from argparse import Namespace
from contextlib import AsyncExitStack
from types import ModuleType

import httpx
import zmq
from openai import AsyncOpenAI
from pydantic_config import cli
from verifiers.v1 import (
    EvalClientConfig,
    ProgramResult,
    SubprocessConfig,
    default_harness_id,
    harness_config_type,
    load_taskset,
)
from verifiers.v1.cli.resolve import narrow_config, plugin_errors, with_positional_taskset
from verifiers.v1.clients import eval as eval_client
from verifiers.v1.clients.base import build_async_httpx
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.serve import EnvServer

__all__ = ["ChatLoop"]  # as the library finds a harness by the name of its module


@functools.cache
def connections() -> httpx.AsyncClient:
    """Those of all responses: one more for each would cost 50 ms, and would stay."""
    return build_async_httpx(EvalClientConfig())


@functools.cache
def chat_program() -> ModuleType:
    """What the library's harness ``null`` starts as a program."""
    module = ModuleType("chat_program")
    exec(CHAT_PROGRAM_SOURCE, vars(module))
    return module


class ChatLoop(NullHarness):
    """The harness ``null`` within this process: a chat, with the tools of the environment."""

    async def setup(self, runtime) -> None:
        """There is no program to prepare."""

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        program, http = chat_program(), connections()
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http)
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        words = Namespace(
            bash=False,
            edit=False,
            search=False,
            api_key=secret,
            tool_interception_url=tool_interception_url,
        )
        try:
            async with AsyncExitStack() as stack:
                tools, *dispatch = await program.connect_mcp({"mcpServers": servers}, stack)
                compactor = program.Compactor(client, ctx.model, tools, False, None)
                await program.run_chat_loop(words, compactor, messages, *dispatch, http)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as the program would end
            return ProgramResult(1, "", f"{type(error).__name__}: {error}")
        return ProgramResult(0, "", "")


def config_of(words: list[str]) -> EvalConfig:
    sys.argv[1:] = with_positional_taskset(words)
    with plugin_errors():
        config = cli(narrow_config(EvalConfig, sys.argv[1:]))
    env = config.env
    chat = harness_config_type("server").model_validate({"id": "server"})
    has_own = default_harness_id(env.taskset.id) != "bash"
    for name, agent in agent_config_fields(env).items():
        update = {}
        if agent.harness.id == "null" if agent.harness else not has_own:
            update["harness"] = chat
        if "runtime" not in agent.model_fields_set:
            update["runtime"] = SubprocessConfig()
        setattr(env, name, agent.model_copy(update=update))
    return config


def tasks(config: EvalConfig) -> None:
    chosen = load_taskset(config.env.taskset).select(config.select)
    if not chosen.bounded:
        sys.exit(f"{config.env.taskset.id} has no end; add -n N, for the first N tasks")
    for task in chosen:
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        print(json.dumps({"data": data, "answer": str(data.get("answer", ""))}))


async def serve(address: str, config: EvalConfig) -> None:
    eval_client.build_async_httpx = lambda _: connections()
    try:
        server = EnvServer(config.env, address)
    except zmq.ZMQError as error:
        sys.exit(f"{address}: {error}")
    start = server.env.start

    async def last_to_start() -> None:
        await start()
        print(f"{address}: {config.env.taskset.id}", flush=True)

    server.env.start = last_to_start
    end = asyncio.current_task().cancel
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    await server.run()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["tasks", *words] if words:
            tasks(config_of(words))
        case ["serve", address, *words] if words:
            asyncio.run(serve(address, config_of(words)))
        case _:
            sys.exit(__doc__)
