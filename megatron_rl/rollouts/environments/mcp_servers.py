"""Tools of MCP servers (modelcontextprotocol.io), through the client of the ``mcp`` library.

A server is an address (``http://127.0.0.1:8000/mcp``, streamable HTTP) or a command, which talks
over its standard streams. Every worker has connections of its own, which all its responses share,
so a tool must give the same answer whatever was called before.
"""

import functools
import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from anyio.from_thread import start_blocking_portal
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS

from megatron_rl.errors import concerning, first_line
from megatron_rl.rollouts.environments.base import ToolFailure
from megatron_rl.rollouts.environments.child import words_of_child

Schema = Mapping[str, Any]


class McpServer:
    """An open connection; ``close`` ends it, and the server where that is a command.

    Attributes:
        schemas: Of its tools, for the chat template, by name.
    """

    def __init__(self, spec: str, timeout_s: float) -> None:
        """``timeout_s``: of one request. Raises what the library raises where it cannot connect."""
        words = words_of_child(*shlex.split(spec))
        target = StdioServerParameters(command=words[0], args=words[1:])
        is_address = spec.startswith(("http://", "https://"))
        client = Client(spec if is_address else target, read_timeout_seconds=timeout_s)
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            self._client = stack.enter_context(self._portal.wrap_async_context_manager(client))
            self.schemas = self._portal.call(self._listed)
            self.close = stack.pop_all().close

    def call(self, name: str, /, **arguments: Any) -> str:
        """The text of what a tool returns, or why it refuses the call. Raises ToolFailure where the
        server fails."""
        try:
            result = self._portal.call(self._client.call_tool, name, arguments)
        except Exception as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                return f"error: {error.message}"
            raise ToolFailure(f"the MCP server of {name}: {first_line(error)}") from error
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        return f"error: {text}" if result.is_error else text

    async def _listed(self) -> dict[str, Schema]:
        tools, page = [], await self._client.list_tools()
        while True:
            tools += page.tools
            if not page.next_cursor:
                break
            page = await self._client.list_tools(cursor=page.next_cursor)
        return {
            one.name: {
                "type": "function",
                "function": {
                    "name": one.name,
                    "description": one.description or "",
                    "parameters": one.input_schema,
                },
            }
            for one in tools
        }


def schemas_of(spec: str, timeout_s: float) -> dict[str, Schema]:
    """The schemas of a server's tools. Raises ValueError where it does not answer or has none."""
    remedy = "correct the command or the address, start the server, or raise env.timeout_s"
    with concerning(f"env.servers: {spec} cannot be asked for its tools", remedy):
        server = McpServer(spec, timeout_s)
    server.close()
    if not server.schemas:
        raise ValueError(f"env.servers: {spec} has no tools; leave it out")
    return server.schemas


@functools.cache
def remote_tools(spec: str, timeout_s: float) -> dict[str, Callable[..., str]]:
    """The tools of a server by name, through the connection of this process. Raises ToolFailure
    where there is none."""
    try:
        server = McpServer(spec, timeout_s)
    except Exception as error:
        raise ToolFailure(f"env.servers: {spec} does not answer: {first_line(error)}") from error
    return {name: functools.partial(server.call, name) for name in server.schemas}
