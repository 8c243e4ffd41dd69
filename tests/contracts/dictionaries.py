"""Which keys a function gives a dictionary that is handed on as ``**fields``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.contracts.syntax import last_name, targets

Decide = Callable[[ast.expr], bool | None]


class Dictionaries:
    """``functions``: by name, whose results may be handed on. ``decide``: the outcome of a
    condition (None: both may come)."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef], decide: Decide) -> None:
        self.functions, self.decide = functions, decide

    def keys(self, node: ast.expr, around: Sequence[ast.FunctionDef]) -> list[str]:
        """Of ``**node`` inside the function ``around[-1]``; none where the text does not tell."""
        inner: list[ast.expr] = []
        named: list[str] = []
        if isinstance(node, ast.Dict):
            named = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            inner = [
                value for key, value in zip(node.keys, node.values, strict=True) if key is None
            ]
        elif isinstance(node, ast.IfExp):
            inner = [node.body, node.orelse]
        elif isinstance(node, ast.Call) and last_name(node.func) == "dict":
            named = [each.arg for each in node.keywords if each.arg]
            inner = [each.value for each in node.keywords if each.arg is None]
        elif isinstance(node, ast.Call) and last_name(node.func) in self.functions:
            return self.returned(self.functions[last_name(node.func)])
        elif isinstance(node, ast.Name) and around:
            return self.built(around[-1], node.id)
        for each in inner:
            named += self.keys(each, around)
        return named

    def returned(self, function: ast.FunctionDef) -> list[str]:
        found: list[str] = []
        for node in self.live(function.body):
            if isinstance(node, ast.Return) and node.value is not None:
                found += self.keys(node.value, [function])
        return found

    def built(self, function: ast.FunctionDef, variable: str) -> list[str]:
        """The keys that a function gives the dictionary that it calls ``variable``."""
        found: list[str] = []
        for node in self.live(function.body):
            for target in targets(node):
                if (
                    is_name(target, variable)
                    and node.value is not None
                    and not is_name(node.value, variable)
                ):
                    found += self.keys(node.value, [function])
                if (
                    isinstance(target, ast.Subscript)
                    and is_name(target.value, variable)
                    and isinstance(target.slice, ast.Constant)
                ):
                    found.append(target.slice.value)
        return found

    def live(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        """Statements of one scope, without the branches that are known not to be taken."""
        for node in body:
            yield node
            if not isinstance(node, ast.If | ast.For | ast.While | ast.With | ast.Try):
                continue
            outcome = self.decide(node.test) if isinstance(node, ast.If) else None
            for part, taken in (("body", True), ("orelse", False), ("finalbody", None)):
                if outcome is None or outcome is taken:
                    yield from self.live(getattr(node, part, []))


def is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
