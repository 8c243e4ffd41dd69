"""The calculator as an MCP server: python server.py [PORT]; without a port over its own streams."""

import sys

from mcp.server.mcpserver import MCPServer

from megatron_rl.errors import first_line
from megatron_rl.rollouts.environments import tools

server = MCPServer("calculator", log_level="WARNING")


@server.tool(structured_output=False)
def calculator(expression: str) -> str:
    """Computes an arithmetic expression, such as (2 + 3) * 4."""
    try:
        return tools.calculator(expression)
    except (ValueError, ArithmeticError, SyntaxError) as error:
        return f"error: {type(error).__name__}: {first_line(error)}"


if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
