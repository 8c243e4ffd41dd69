"""The places of the package that ask whether there is a CUDA device."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent.parent / "megatron_rl"
QUESTIONS = ("torch.cuda.is_available", "_without_cuda")


class _Askers(ast.NodeVisitor):
    """Qualified names of the functions that ask; "" stands for the top of the module."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._inside: list[str] = []

    def _named(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _named

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node)

    def _note(self, node: ast.expr) -> None:
        if ast.unparse(node) in QUESTIONS:
            self.found.add(".".join(self._inside))


def askers(source: str) -> set[str]:
    visitor = _Askers()
    visitor.visit(ast.parse(source))
    return visitor.found


def sites() -> list[str]:
    """``room.module:function`` of every place, in order."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found |= {f"{module}:{name}" for name in askers(path.read_text(encoding="utf-8"))}
    return sorted(found)
