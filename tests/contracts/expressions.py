"""Follows names of other packages through expressions: attributes and calls; says what the packages
do not have."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.contracts.dictionaries import Decide, Dictionaries
from tests.contracts.syntax import Signature, decorators, last_name
from tests.contracts.vendor import Found, Vendor

MODULE_NAME = re.compile(r"(vllm|megatron\.core|transformer_engine)(\.\w+)+")


@dataclass(frozen=True)
class Thing:
    """The value of an expression, as far as it is followed. ``instance``: of the class ``found``;
    ``many``: a list of such; ``unbound``: a method taken from its class."""

    found: Found
    instance: bool = False
    many: bool = False
    unbound: bool = False


@dataclass
class OwnClass:
    """A class of the file that is read, with the classes of other packages that it builds on."""

    bases: list[Found]
    methods: dict[str, ast.FunctionDef]
    attributes: dict[str, Thing | None] = field(default_factory=dict)
    more: bool = False  # has bases that are not followed


@dataclass
class Rules:
    """What a reader has to know beside the sources.

    ``tops``: the packages whose lacks are told. ``mixins``: class of ours -> class of theirs it is
    mixed into. ``forwarded``: function that takes any keyword -> class whose fields these are.
    ``decide``: the outcome of a condition that depends on a version (None: both ways may be taken).
    ``subclasses``: methods of subclasses are compared with those of their bases, and what is asked
    of ``self`` must be there.
    """

    tops: Sequence[str]
    mixins: dict[str, str] = field(default_factory=dict)
    forwarded: dict[str, str] = field(default_factory=dict)
    decide: Decide = lambda condition: None
    subclasses: bool = True


class Expressions:
    """Of one file. ``problems`` are sentences with file and line; ``checked`` are the names that
    were found."""

    def __init__(
        self,
        vendor: Vendor,
        rules: Rules,
        label: str,
        module: str,
        functions: dict[str, ast.FunctionDef],
    ) -> None:
        """``functions``: of ours by name, whose dictionaries may be handed on as ``**fields``."""
        self.vendor, self.rules, self.label, self.module = vendor, rules, label, module
        self.problems: list[str] = []
        self.checked: set[str] = set()
        self.classes: dict[str, OwnClass] = {}
        self.scopes: list[dict[str, Thing | OwnClass | None]] = [{}]
        self.around: list[ast.FunctionDef] = []
        self.current: OwnClass | None = None
        self.dictionaries = Dictionaries(functions, rules.decide)
        self.muted = 0

    def tell(self, node: ast.AST, sentence: str) -> None:
        self.problems += [] if self.muted else [f"{self.label}:{node.lineno}: {sentence}"]

    def is_theirs(self, path: str) -> bool:
        return any(f"{path}.".startswith(f"{top}.") for top in self.rules.tops)

    def concerns(self, found: Found) -> bool:
        return found.known and self.is_theirs(found.path)

    def value(self, node: ast.expr) -> Thing | OwnClass | None:
        """Follows an expression and all in it."""
        if isinstance(node, ast.Name):
            return next(
                (scope[node.id] for scope in reversed(self.scopes) if node.id in scope), None
            )
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            if isinstance(owner, OwnClass):
                return self.own_attribute(node, owner)
            return None if owner is None else self.attribute(node, owner)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Await):
            return self.value(node.value)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self.comprehension(node)
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and MODULE_NAME.fullmatch(node.value)
        ):
            self.lookup(node, node.value)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return None

    def comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> Thing | None:
        self.scopes.append({})
        for part in node.generators:
            self.bind(part.target, self.element(self.value(part.iter)))
            for test in part.ifs:
                self.value(test)
        made = [
            self.value(each)
            for each in ([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])
        ]
        self.scopes.pop()
        only = made[0]
        return (
            Thing(only.found, instance=True, many=True)
            if isinstance(only, Thing) and only.instance
            else None
        )

    @staticmethod
    def element(value: Thing | OwnClass | None) -> Thing | None:
        return (
            Thing(value.found, instance=True) if isinstance(value, Thing) and value.many else None
        )

    def annotated(self, node: ast.expr | None) -> Thing | None:
        """The instance that an annotation speaks of."""
        if isinstance(node, ast.BinOp):
            sides = [self.annotated(side) for side in (node.left, node.right)]
            return next(filter(None, sides), None)
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        thing = self.value(node)
        return (
            Thing(thing.found, instance=True)
            if isinstance(thing, Thing) and thing.found.is_class
            else None
        )

    def attribute(self, node: ast.Attribute, owner: Thing) -> Thing | None:
        if owner.many or (owner.found.node is None and owner.instance):
            return None
        found = self.vendor.attribute(owner.found, node.attr)
        if found is None:
            if self.concerns(owner.found) and not node.attr.startswith("__"):
                self.tell(node, f"{owner.found.path} has no {node.attr}")
            return None
        if self.concerns(found):
            self.checked.add(found.path)
        if owner.instance:
            return self.of_instance(found)
        method = owner.found.is_class and isinstance(
            found.node, ast.FunctionDef | ast.AsyncFunctionDef
        )
        return Thing(found, unbound=method) if found.known else None

    def of_instance(self, found: Found) -> Thing | None:
        if not found.known:
            return None
        if isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef) and not decorators(
            found.node
        ) & {"property", "cached_property"}:
            return Thing(found)
        kind = self.vendor.instance(found)
        return None if kind is None else Thing(kind, instance=True)

    def own_attribute(self, node: ast.Attribute, owner: OwnClass) -> Thing | None:
        if node.attr in owner.attributes or node.attr in owner.methods:
            return owner.attributes.get(node.attr)
        found = [self.vendor.member(base, node.attr) for base in owner.bases]
        known = [each for each in found if each is not None]
        if known:
            self.checked |= {each.path for each in known if self.concerns(each)}
            return self.of_instance(known[0])
        concerned = [base.path for base in owner.bases if self.concerns(base)]
        if concerned and not owner.more and not node.attr.startswith("__"):
            self.tell(node, f"{' and '.join(concerned)} give it no {node.attr}")
        return None

    def call(self, node: ast.Call) -> Thing | OwnClass | None:
        parent = last_name(node.func) == "super" and self.current is not None
        called = None if parent else self.value(node.func)
        first = [
            self.value(each) for each in [*node.args, *(keyword.value for keyword in node.keywords)]
        ]
        if parent and self.current is not None:
            return OwnClass(self.current.bases, {}, more=self.current.more)
        self.named(node, first)
        if not isinstance(called, Thing) or called.instance:
            return None
        self.arguments(node, called)
        if called.found.is_class:
            return Thing(called.found, instance=True)
        kind = self.vendor.instance(called.found)
        return None if kind is None else Thing(kind, instance=True)

    def named(self, node: ast.Call, first: list[Thing | OwnClass | None]) -> None:
        """``f(module, "name", ...)`` speaks of ``module.name``, unless it asks whether that is
        there."""
        if (
            len(node.args) < 2
            or last_name(node.func) == "hasattr"
            or (len(node.args) > 2 and last_name(node.func) == "getattr")
        ):
            return
        owner, name = first[0], node.args[1]
        if (
            isinstance(owner, Thing)
            and not owner.instance
            and isinstance(name, ast.Constant)
            and isinstance(name.value, str)
        ):
            self.attribute(ast.Attribute(node.args[0], name.value, lineno=node.lineno), owner)

    def arguments(self, node: ast.Call, called: Thing) -> None:
        signature = self.vendor.signature(called.found)
        if signature is None or not self.concerns(called.found) or called.unbound:
            return
        path = called.found.path
        self.checked.add(f"{path}()")
        more = any(isinstance(each, ast.Starred) for each in node.args)
        if len(node.args) > len(signature.positional) and not signature.star and not more:
            self.tell(
                node, f"{path} takes {len(signature.positional)} by position, not {len(node.args)}"
            )
        given = set(signature.positional[: len(node.args)])
        for keyword in node.keywords:
            names = (
                [keyword.arg] if keyword.arg else self.dictionaries.keys(keyword.value, self.around)
            )
            more = more or keyword.arg is None
            given |= set(names)
            for name in names:
                self.keyword(node, path, signature, name)
        missing = signature.required - given
        if missing and not more:
            self.tell(node, f"{path} also needs {', '.join(sorted(missing))}")

    def keyword(self, node: ast.Call, path: str, signature: Signature, name: str) -> None:
        forwarded = self.rules.forwarded.get(path)
        if name in signature.names or (signature.double and forwarded is None):
            return
        target = self.vendor.lookup(forwarded) if forwarded else None
        taken = self.vendor.signature(target) if target is not None else None
        if taken is None or name not in taken.names:
            self.tell(node, f"{path} takes no {name}")

    def bind(self, target: ast.expr, value: Thing | OwnClass | None) -> None:
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value)
            if isinstance(owner, OwnClass):
                known = owner.attributes.get(target.attr)
                owner.attributes[target.attr] = (
                    known if value is None or isinstance(value, OwnClass) else value
                )
            elif owner is not None and not owner.instance:
                self.attribute(target, owner)  # what is replaced must be there
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self.bind(part, None)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, None)
        else:
            self.value(target)
