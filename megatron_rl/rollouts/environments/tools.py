"""``env.name=tools``: Python functions, and tools of MCP servers, that a response may call,
several in a turn.

A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as the chat templates of
Qwen and Hermes models ask for it. A turn without a call ends the response. What a call returns, or
why it failed, is a message of the role ``tool``.
"""

import ast
import inspect
import json
import operator
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.plugins import import_function
from megatron_rl.rewards.sandbox import Sandbox, refusal
from megatron_rl.rewards.workers.messages import reason
from megatron_rl.rewards.workers.values import await_value
from megatron_rl.rollouts.environments.base import (
    Done,
    Environment,
    EnvironmentSettings,
    Message,
    ToolFailure,
    register_environment,
)
from megatron_rl.rollouts.environments.search import check_corpus, indexed, search_tool

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MOST_CALLS = 8  # of a turn
_SHARE_OF_TIME = 0.8  # of env.timeout_s, for the programs of a turn together
_LARGEST_POWER = 1000
_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


@dataclass(frozen=True)
class Call:
    """One call of a turn. ``problem``: why it cannot be made.

    Example: ``Call("calculator", {"expression": "6*7"})``.
    """

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


def read_calls(text: str) -> list[Call]:
    """The calls of a turn, in order; one that cannot be read has a problem."""
    return [_read(match[1]) for match in _CALL.finditer(text)]


def without_calls(text: str) -> str:
    return _CALL.sub("", text).strip()


def _read(text: str) -> Call:
    try:
        found = json.loads(text)
        name, arguments = found["name"], found.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Call(problem=f'write {{"name": ..., "arguments": {{...}}}} ({reason(error)})')
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Call(problem="name is a text, arguments are an object")
    return Call(name, arguments)


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (2 + 3) * 4.

    Returns:
        The value.
    """
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant):
        value = node.value
        # A bool is an int as well, but not meant here.
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            if abs(right) > _LARGEST_POWER or abs(left) > 10**_LARGEST_POWER:
                raise ValueError("the power is too large")
            return left**right
        if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](left, right)
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")


def python_tool(settings: EnvironmentSettings, scripts: list[str]) -> Callable[[str], str]:
    """The tool ``python``: runs a script in the sandbox of ``reward.sandbox`` and adds it to
    ``scripts``, which run before it, with the same random numbers and their output discarded."""

    def python(code: str) -> str:
        """Runs a Python script and gives what it prints.

        Args:
            code: The script. It has the names of earlier ones, the standard library, no network
                and no files.

        Returns:
            The output.
        """
        # Exceptions are shown on stdout, which is all that comes out of the sandbox.
        program = (
            "import contextlib, io, random, traceback\nrandom.seed(0)\n"
            "names = {'__name__': '__main__'}\n"
            f"for script in {scripts!r}:\n"
            "    with contextlib.redirect_stdout(io.StringIO()):\n"
            "        with contextlib.suppress(Exception, SystemExit):\n"
            "            exec(compile(script, 'script', 'exec'), names)\n"
            f"try:\n    exec(compile({code!r}, 'script', 'exec'), names)\nexcept Exception:\n"
            "    print(traceback.format_exc(limit=-1))\n"
        )
        scripts.append(code)
        ends_at = time.monotonic() + _SHARE_OF_TIME * settings.timeout_s / _MOST_CALLS
        with Sandbox(
            settings.sandbox, program, stdin="", memory_bytes=settings.memory_bytes, ends_at=ends_at
        ) as sandbox:
            output = sandbox.output()
        return "error: it ran out of time or memory, or ended early" if output is None else output

    return python


def functions_of(
    settings: EnvironmentSettings, scripts: list[str]
) -> dict[str, Callable[..., Any]]:
    """The tools of ``env.tools`` by the names that calls have; ``scripts``: see ``python_tool``.
    Raises ValueError for one that cannot be imported."""

    def search(query: str) -> str:
        """Searches a collection of documents.

        Args:
            query: Words to look for.

        Returns:
            The documents that fit best.
        """
        return search_tool(settings, query)

    built_in = {"calculator": calculator, "search": search}
    built_in["python"] = python_tool(settings, scripts)
    found: dict[str, Callable[..., Any]] = {}
    for spec in settings.tools:
        function = built_in.get(spec) or import_function(spec, "env.tools")
        name = spec.rpartition(":")[2]
        if name in found:
            raise ValueError(f"env.tools: two tools are called {name}; rename one")
        found[name] = function
    return found


@register_environment("tools")
class Tools(Environment):
    remembers = False
    starts_processes = True  # the sandbox of ``python``

    @classmethod
    def functions(
        cls, settings: EnvironmentSettings
    ) -> Sequence[Callable[..., Any] | Mapping[str, Any]]:
        found: dict[str, Any] = functions_of(settings, [])
        if ("search" in settings.tools) != bool(settings.corpus):
            raise ValueError(
                f"env.corpus = {settings.corpus or None}: the tool search reads it, and no other;"
                " give both env.tools=[search] and env.corpus=FILE.jsonl, or neither"
            )
        if settings.corpus:
            check_corpus(settings)
        for spec in settings.servers:
            schemas = _mcp().schemas_of(spec, settings.timeout_s)
            if taken := sorted(found.keys() & schemas):
                raise ValueError(f"env.servers: {spec} has {taken[0]}, as another; leave one out")
            found |= schemas
        if not found:
            raise ValueError("env.tools, env.servers: both are empty; name a tool or a server")
        return list(found.values())

    @classmethod
    def prepare(cls, settings: EnvironmentSettings) -> None:
        if settings.servers:
            _mcp()
        if "search" in settings.tools:
            indexed(settings.corpus)

    @classmethod
    def num_calls(cls, text: str) -> int:
        return len(read_calls(text))

    @classmethod
    def refusal(cls, settings: EnvironmentSettings) -> str | None:
        return refusal(settings.sandbox) if "python" in settings.tools else None

    def step(self, text: str, seed: int) -> Sequence[Message] | Done:
        calls = read_calls(text)
        if not calls:
            return Done()
        before = [call for turn in self.earlier for call in read_calls(turn)[:_MOST_CALLS]]
        codes = [call.arguments.get("code") for call in before if call.name == "python"]
        functions = functions_of(self.settings, [code for code in codes if isinstance(code, str)])
        for spec in self.settings.servers:
            functions |= _mcp().remote_tools(spec, self.settings.timeout_s)
        results = [_result(functions, call) for call in calls[:_MOST_CALLS]]
        if len(calls) > _MOST_CALLS:
            problem = f"error: a turn has at most {_MOST_CALLS} calls; the others are not made"
            results.append(_message(calls[_MOST_CALLS], problem))
        return results


def _result(functions: Mapping[str, Callable[..., Any]], call: Call) -> Message:
    function = functions.get(call.name)
    if call.problem is None and function is None:
        return _message(call, f"error: no tool {call.name!r}; there are {[*functions]}")
    if call.problem is not None or function is None:
        return _message(call, f"error: {call.problem}")
    try:
        inspect.signature(function).bind(**call.arguments)
        return _message(call, str(await_value(function(**call.arguments))))
    except (MemoryError, ToolFailure):
        raise
    except Exception as error:  # noqa: BLE001 - the call's fault, which the model is told
        return _message(call, f"error: {reason(error)}")


def _mcp() -> Any:
    """Imported where there are servers: the library takes a second."""
    from megatron_rl.rollouts.environments import mcp_servers

    return mcp_servers


def _message(call: Call, content: str) -> Message:
    return {"role": "tool", "name": call.name, "content": content}
