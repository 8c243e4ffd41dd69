"""What the text of a package says by itself: names that a statement binds, members of a class,
parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

FIELD_BASES = {"Struct", "BaseModel", "NamedTuple"}
FIELD_DECORATORS = {"dataclass", "config"}


@dataclass
class Signature:
    """Parameters of a call, ``self`` left out. ``star`` and ``double``: takes any more by position,
    by name."""

    positional: list[str] = field(default_factory=list)
    keyword_only: list[str] = field(default_factory=list)
    required: set[str] = field(default_factory=set)
    star: bool = False
    double: bool = False

    @property
    def names(self) -> set[str]:
        return {*self.positional, *self.keyword_only}


def last_name(node: ast.AST) -> str:
    """``c`` of ``a.b.c``, ``a.b.c[d]`` and ``a.b.c(d)``."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements that run in the same scope, those under if, try, with, for too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.For | ast.While | ast.With | ast.Try):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [
            part
            for target in node.targets
            for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def members(node: ast.ClassDef) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for statement in statements(node.body):
        for name in bound_names(statement):
            if name in found and is_overload(found[name]):
                found[name] = statement
            found.setdefault(name, statement)
    methods = [
        each
        for each in statements(node.body)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for method in methods:
        given = {
            argument.arg: argument.annotation
            for argument in [*method.args.args, *method.args.kwonlyargs]
        }
        for statement in statements(method.body):
            for target in targets(statement):
                if isinstance(target, ast.Attribute) and last_name(target.value) == "self":
                    found.setdefault(target.attr, with_annotation(statement, target, given))
    return found


def with_annotation(
    statement: ast.stmt, target: ast.expr, given: dict[str, ast.expr | None]
) -> ast.stmt:
    """``self.x = x`` tells the type of ``x`` where the method's parameters do, ``self.x = X(...)``
    that of X."""
    if (
        not isinstance(statement, ast.Assign)
        or len(statement.targets) > 1
        or statement.targets[0] is not target
    ):
        return statement
    kind: ast.expr | None = None
    if isinstance(statement.value, ast.Name):
        kind = given.get(statement.value.id)
    elif isinstance(statement.value, ast.Call):
        kind = statement.value.func
    if kind is None:
        return statement
    return ast.AnnAssign(target=target, annotation=kind, value=statement.value, simple=0)


def bound_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [bound_name(alias) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    return [target.id for target in targets(node) if isinstance(target, ast.Name)]


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool) -> Signature:
    arguments = node.args
    positional = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
    required = set(positional[: len(positional) - len(arguments.defaults)])
    keywords = [argument.arg for argument in arguments.kwonlyargs]
    required |= {
        name
        for name, default in zip(keywords, arguments.kw_defaults, strict=True)
        if default is None
    }
    if method and "staticmethod" not in decorators(node):
        required -= set(positional[:1])
        positional = positional[1:]
    return Signature(
        positional, keywords, required, arguments.vararg is not None, arguments.kwarg is not None
    )


def decorators(node: ast.AST) -> set[str]:
    return {last_name(each) for each in getattr(node, "decorator_list", [])}


def is_abstract(node: ast.AST) -> bool:
    return bool(decorators(node) & {"abstractmethod", "abstractproperty"})


def is_overload(node: ast.AST) -> bool:
    return "overload" in decorators(node)


def has_fields(node: ast.AST | None) -> bool:
    bases = {last_name(base) for base in getattr(node, "bases", [])}
    return node is not None and bool(decorators(node) & FIELD_DECORATORS or bases & FIELD_BASES)


def is_field(node: ast.AnnAssign) -> bool:
    if last_name(node.annotation) == "ClassVar":
        return False
    keywords = node.value.keywords if isinstance(node.value, ast.Call) else []
    return not any(
        each.arg == "init" and getattr(each.value, "value", None) is False for each in keywords
    )


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
