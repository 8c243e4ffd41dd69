"""What names of other packages are, from their source text: classes with their members, functions
with their parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests.contracts.sources import Sources
from tests.contracts.syntax import (
    Signature,
    bound_name,
    bound_names,
    has_fields,
    is_abstract,
    is_field,
    is_none,
    last_name,
    members,
    signature_of,
    statements,
)

# Bases that bring no member that anybody calls, so that a class is known when its other bases are.
EMPTY_BASES = {
    "object",
    "ABC",
    "Generic",
    "Protocol",
    "Enum",
    "IntEnum",
    "StrEnum",
    "NamedTuple",
    "TypedDict",
    "Struct",
    "BaseModel",
    "str",
    "int",
}
# Where the class of these names stands, so that no other file of torch has to be read.
ELSEWHERE = dict.fromkeys(
    ("torch.nn.Module", "nn.Module", "Module"), "torch.nn.modules.module.Module"
)
FOLLOWED = ("vllm", "megatron", "transformer_engine", "torch.nn.modules.module.Module")


@dataclass(frozen=True)
class Found:
    """What a name stands for. ``node`` is None for a module; ``known`` is False for what lies
    outside of the sources."""

    module: str
    name: str = ""
    node: ast.AST | None = None
    known: bool = True

    @property
    def is_module(self) -> bool:
        return self.known and self.node is None

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


class Vendor:
    """Answers about the packages of ``sources``."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._bindings: dict[str, dict[str, list[ast.stmt]]] = {}
        self._members: dict[ast.ClassDef, dict[str, ast.AST]] = {}
        self._looked_up: dict[str, Found | None] = {}
        self._searching: set[tuple[str, str]] = set()

    def lookup(self, path: str) -> Found | None:
        """``package.module.Class.member`` of any depth; None where a part of it does not exist."""
        if path in self._looked_up:
            return self._looked_up[path]
        found = self._lookup(path)
        if (
            not self._searching
        ):  # in the midst of another search an import in a circle is not followed to its end
            self._looked_up[path] = found
        return found

    def _lookup(self, path: str) -> Found | None:
        first, *rest = path.split(".")
        followed = any(f"{path}.".startswith(f"{top}.") for top in FOLLOWED)
        found: Found | None = (
            Found(first) if followed and self.sources.exists(first) else Found(first, known=False)
        )
        if path in FOLLOWED and rest:
            *inner, last = rest
            found, rest = Found(".".join([first, *inner])), [last]
        for name in rest:
            if found is None or not found.known:
                return found
            found = self.attribute(found, name)
        return found

    def attribute(self, owner: Found, name: str) -> Found | None:
        """``owner.name`` of a module or a class; None where it does not exist."""
        if not owner.known:
            return owner
        if owner.node is None:
            return self._of_module(owner.module, name)
        if owner.is_class:
            return self.member(owner, name)
        return Found(owner.module, name, known=False)

    def _of_module(self, module: str, name: str) -> Found | None:
        if (module, name) in self._searching:
            return None
        self._searching.add((module, name))
        try:
            candidates = [
                self._bound(module, name, node) for node in self.bindings(module).get(name, [])
            ]
            candidates += [self._of_module(star, name) for star in self._stars(module)]
            found = [each for each in candidates if each is not None]
            # A definition before a stand-in (``X = None`` where an import failed), and both before
            # what is not known.
            found.sort(
                key=lambda each: (
                    not each.known,
                    not isinstance(each.node, ast.ClassDef | ast.FunctionDef),
                )
            )
            if found:
                return found[0]
        finally:
            self._searching.discard((module, name))
        return Found(f"{module}.{name}") if self.sources.exists(f"{module}.{name}") else None

    def bindings(self, module: str) -> dict[str, list[ast.stmt]]:
        """The statements of a module that bind each name."""
        if module not in self._bindings:
            tree = self.sources.tree(module)
            bound: dict[str, list[ast.stmt]] = {}
            for node in statements(tree.body if tree is not None else []):
                for name in bound_names(node):
                    bound.setdefault(name, []).append(node)
            self._bindings[module] = bound
        return self._bindings[module]

    def _stars(self, module: str) -> list[str]:
        found = [
            node for node in self.bindings(module).get("*", []) if isinstance(node, ast.ImportFrom)
        ]
        return [self.absolute(module, node) for node in found]

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that a ``from ... import`` in ``module`` names."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        above = parts[: len(parts) - node.level + self.sources.is_package(module)]
        return ".".join([*above, *([node.module] if node.module else [])])

    def _bound(self, module: str, name: str, node: ast.stmt) -> Found | None:
        if isinstance(node, ast.ImportFrom):
            original = next(
                alias.name for alias in node.names if name in (alias.asname, alias.name)
            )
            return self.lookup(f"{self.absolute(module, node)}.{original}")
        if isinstance(node, ast.Import):
            alias = next(alias for alias in node.names if bound_name(alias) == name)
            return self.lookup(alias.name if alias.asname else alias.name.partition(".")[0])
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name | ast.Attribute)
            and len(node.targets) == 1
        ):
            same = self.evaluate(module, node.value)
            return Found(module, name, node) if same is None or not same.known else same
        return Found(module, name, node)

    def evaluate(self, module: str, node: ast.expr | None) -> Found | None:
        """What a dotted name means at the top of ``module``."""
        if isinstance(node, ast.Name):
            return self._of_module(module, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.evaluate(module, node.value)
            return None if owner is None else self.attribute(owner, node.attr)
        return None

    def bases(self, cls: Found) -> Iterator[Found]:
        """Found classes; what is not known as ``known=False``, bases without members left out."""
        assert isinstance(cls.node, ast.ClassDef)
        for base in cls.node.bases:
            chosen = base.body if isinstance(base, ast.IfExp) else base
            plain = chosen.value if isinstance(chosen, ast.Subscript) else chosen
            if last_name(plain) in EMPTY_BASES:
                continue
            elsewhere = ELSEWHERE.get(ast.unparse(plain))
            found = self.lookup(elsewhere) if elsewhere else self.evaluate(cls.module, plain)
            yield (
                found
                if found is not None and found.is_class
                else Found(cls.module, ast.unparse(base), known=False)
            )

    def lineage(self, cls: Found) -> list[Found]:
        """The class and all its bases, near ones first."""
        found = [cls]
        for base in self.bases(cls) if cls.is_class else ():
            found += [each for each in self.lineage(base) if each not in found]
        return found

    def own(self, cls: Found) -> dict[str, ast.AST]:
        """Names that a class itself gives its instances: of its body, and set on ``self`` in its
        methods."""
        if not isinstance(cls.node, ast.ClassDef):
            return {}
        if cls.node not in self._members:
            self._members[cls.node] = members(cls.node)
        return self._members[cls.node]

    def member(self, cls: Found, name: str) -> Found | None:
        """Of the class or a base; not known where a base outside of the sources may have it."""
        lineage = self.lineage(cls)
        for each in lineage:
            own = self.own(each).get(name)
            if own is not None:
                return Found(each.module, f"{each.name}.{name}", own)
        open_ended = not all(each.known for each in lineage)
        return Found(cls.module, f"{cls.name}.{name}", known=False) if open_ended else None

    def abstract(self, cls: Found) -> set[str]:
        """Methods that a subclass of ``cls`` has to define."""
        marked: dict[str, bool] = {}
        for each in reversed(self.lineage(cls)):
            marked |= {name: is_abstract(node) for name, node in self.own(each).items()}
        return {name for name, abstract in marked.items() if abstract}

    def signature(self, found: Found) -> Signature | None:
        """Of a call of the function or class; None where it cannot be read."""
        if isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return signature_of(found.node, method="." in found.name)
        if not found.is_class:
            return None
        for each in self.lineage(found):
            if not each.known:
                return None
            if "__init__" in self.own(each):
                node = self.own(each)["__init__"]
                return (
                    signature_of(node, method=True) if isinstance(node, ast.FunctionDef) else None
                )
            if has_fields(each.node):
                return self._fields(found)
        return Signature() if found.known else None

    def _fields(self, cls: Found) -> Signature:
        """Of a class whose constructor is made from its annotated names."""
        made = Signature()
        for each in reversed(self.lineage(cls)):
            assert isinstance(each.node, ast.ClassDef)
            for node in statements(each.node.body):
                if (
                    isinstance(node, ast.AnnAssign)
                    and isinstance(node.target, ast.Name)
                    and is_field(node)
                ):
                    made.positional = [
                        *(name for name in made.positional if name != node.target.id),
                        node.target.id,
                    ]
                    made.required -= {node.target.id}
                    made.required |= {node.target.id} if node.value is None else set()
        return made

    def instance(self, found: Found | None) -> Found | None:
        """The class of the values of an attribute, of a property or of what a function returns;
        None where it is not said."""
        if found is None or not found.known or found.node is None:
            return None
        node = found.node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return self.annotated(found.module, node.returns)
        if isinstance(node, ast.AnnAssign):
            return self.annotated(found.module, node.annotation)
        return None

    def annotated(self, module: str, node: ast.expr | None) -> Found | None:
        """The one class that an annotation names, None and Optional left aside."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.annotated(module, ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.BinOp):
            sides = [
                self.annotated(module, side)
                for side in (node.left, node.right)
                if not is_none(side)
            ]
            return sides[0] if len(sides) == 1 else None
        if isinstance(node, ast.Subscript):
            return (
                self.annotated(module, node.slice) if last_name(node.value) == "Optional" else None
            )
        found = self.evaluate(module, node)
        return found if found is not None and found.is_class else None
