"""Follows names of other packages through a file: imports, classes, and the expressions in all of
its statements."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from tests.contracts.expressions import Expressions, OwnClass, Thing
from tests.contracts.syntax import last_name, signature_of, targets
from tests.contracts.vendor import Found

GUARDS = {"ImportError", "ModuleNotFoundError", "AttributeError", "NameError", "Exception"}


class Reader(Expressions):
    """Reads one file, whole."""

    def read(self, tree: ast.Module) -> list[str]:
        """Twice: a method may use what a later one sets on ``self``."""
        self.muted += 1
        self.run(tree.body)
        self.muted -= 1
        self.scopes = [{}]
        self.run(tree.body)
        return self.problems

    def run(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            self.statement(node)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self.bring_in(node)
        elif isinstance(node, ast.ClassDef):
            self.own_class(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.function(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            self.assign(node)
        elif isinstance(node, ast.If):
            self.condition(node)
        elif isinstance(node, ast.Try):
            self.attempt(node)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self.bind(node.target, self.element(self.value(node.iter)))
            self.run([*node.body, *node.orelse])
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    self.statement(child)
                elif isinstance(child, ast.withitem):
                    self.value(child.context_expr)
                elif isinstance(child, ast.match_case):
                    self.run(child.body)
                elif isinstance(child, ast.expr):
                    self.value(child)

    def bring_in(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                path = alias.name
                bound = alias.name if alias.asname else alias.name.partition(".")[0]
            else:
                path = bound = f"{self.vendor.absolute(self.module, node)}.{alias.name}"
            if self.lookup(node, path) is None or alias.name == "*":
                continue
            found = self.vendor.lookup(bound)
            name = alias.asname or alias.name.partition(".")[0]
            self.scopes[-1][name] = None if found is None or not found.known else Thing(found)

    def lookup(self, node: ast.AST, path: str) -> Found | None:
        """Tells when it does not exist."""
        found = self.vendor.lookup(path)
        if self.is_theirs(path) and found is None:
            self.tell(node, f"there is no {path}")
        elif self.is_theirs(path):
            self.checked.add(path)
        return found

    def condition(self, node: ast.If) -> None:
        self.value(node.test)
        outcome = self.rules.decide(node.test)
        for taken, body in ((True, node.body), (False, node.orelse)):
            if outcome in (None, taken):
                self.run(body)

    def attempt(self, node: ast.Try) -> None:
        caught = {last_name(kind) for handler in node.handlers for kind in kinds(handler)}
        guarded = bool(caught & GUARDS)
        self.muted += guarded
        self.run(node.body)
        self.muted -= guarded
        # The way out of a failed import binds stand-ins, which must not hide what was imported.
        before = dict(self.scopes[-1])
        for handler in node.handlers:
            self.run(handler.body)
        if guarded:
            self.scopes[-1].update(before)
        self.run([*node.orelse, *node.finalbody])

    def assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            values = [self.value(each) for each in node.value.elts]
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else []
                for name, value in zip(names, values, strict=False):
                    self.bind(name, value)
            return
        value = None if node.value is None else self.value(node.value)
        if value is None and isinstance(node, ast.AnnAssign):
            value = self.annotated(node.annotation)
        for target in targets(node):
            self.bind(target, value)

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        scope: dict[str, Thing | OwnClass | None] = {}
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            scope[argument.arg] = self.annotated(argument.annotation)
        if self.current is not None and self.current.methods.get(node.name) is node and arguments:
            scope[arguments[0].arg] = self.current
        for default in [
            *node.args.defaults,
            *filter(None, node.args.kw_defaults),
            *node.decorator_list,
        ]:
            self.value(default)
        self.scopes[-1][node.name] = None
        self.scopes.append(scope)
        self.around.append(node)
        self.run(node.body)
        self.around.pop()
        self.scopes.pop()

    def own_class(self, node: ast.ClassDef) -> None:
        methods = {
            each.name: each
            for each in node.body
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        own = self.classes.setdefault(
            node.name, OwnClass([], methods, more=not self.rules.subclasses)
        )
        own.bases, own.methods = [], methods
        for base in node.bases:
            thing = self.value(base.body if isinstance(base, ast.IfExp) else base)
            if isinstance(thing, Thing) and thing.found.is_class:
                own.bases.append(thing.found)
            elif last_name(base) != "object":
                own.more = True
        if node.name in self.rules.mixins:
            mixed = self.lookup(node, self.rules.mixins[node.name])
            own.bases += [mixed] if mixed is not None else []
        elif self.rules.subclasses:
            self.subclass(node, own)
        self.scopes[-1][node.name] = own
        before, self.current = self.current, own
        self.scopes.append({})
        self.run(node.body)
        own.attributes |= dict.fromkeys(self.scopes.pop())
        self.current = before

    def subclass(self, node: ast.ClassDef, own: OwnClass) -> None:
        """All that is abstract must be defined, and what is overridden must take what it is called
        with."""
        for base in own.bases:
            assigned = {
                target.id
                for each in node.body
                for target in targets(each)
                if isinstance(target, ast.Name)
            }
            missing = (
                self.vendor.abstract(base) - set(own.methods) - assigned
                if self.concerns(base)
                else set()
            )
            if missing:
                self.tell(
                    node,
                    f"{node.name} does not define {', '.join(sorted(missing))}, "
                    f"abstract in {base.path}",
                )
            for name, method in own.methods.items():
                theirs = self.vendor.member(base, name)
                if name != "__init__" and theirs is not None and self.concerns(theirs):
                    self.overrides(method, theirs)

    def overrides(self, method: ast.FunctionDef, theirs: Found) -> None:
        wanted = self.vendor.signature(theirs)
        ours = signature_of(method, method=True)
        if wanted is None:
            return
        self.checked.add(theirs.path)
        if len(wanted.positional) > len(ours.positional) and not ours.star:
            self.tell(
                method,
                f"{method.name} takes {ours.positional}, it is called as {theirs.path} "
                f"with {wanted.positional}",
            )
        if len(ours.required & set(ours.positional)) > len(wanted.positional) and not wanted.star:
            self.tell(
                method,
                f"{method.name} needs {ours.positional}, it is called as {theirs.path} "
                f"with {wanted.positional}",
            )


def kinds(handler: ast.ExceptHandler) -> list[ast.expr]:
    if handler.type is None:
        return [ast.Name("Exception")]
    return handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
