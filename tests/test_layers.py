"""Imports point down only, siblings do not know each other, and each vendor library is behind one
fence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PACKAGE = REPO / "megatron_rl"

# From the top. A package may import packages of lower layers and itself; those of one layer do not
# import each other. The schema of a method stands with its functions, so the loss is below config.
LAYERS = (
    {"train"},  # starts a sweep where --multirun says so
    {"sweep", "sample", "evaluate", "serve", "vllm_plugin"},
    {"sweeping"},
    {"trainer"},
    {"evaluation"},
    {"run"},
    {"planning"},
    {"signals"},
    {"rollouts"},
    {"weight_sync", "policy", "engine", "data", "rewards", "reporting"},
    {"checkpoints"},
    {"models"},
    {"runtime"},
    {"config"},
    {"protocols"},
    {"passes", "hooks"},
    {"types", "plugins"},
    {"scheduling", "annealing", "loss"},
    {"knobs"},
    {"errors"},
)
HEIGHT = {package: len(LAYERS) - index for index, layer in enumerate(LAYERS) for package in layer}


def package_of(module: str) -> str:
    """The package below ``megatron_rl`` of a dotted name; "" for ``megatron_rl`` itself."""
    parts = module.split(".")[1:]
    inner = ".".join(parts[:2])
    return inner if inner in HEIGHT else ".".join(parts[:1])


VENDOR_PACKAGE = {
    "megatron": "policy",
    "transformer_engine": "policy",
    "apex": "policy",
    "vllm": "engine",
}
# What only reads finished runs, compares or plans is a tool: tools import the package, not it them.
NOT_BELOW = ("tools", "tests", "examples")
# Who imports by a name that no test can follow: a user's modules, and files of the own package.
COMPUTED = "a computed name"
MAY_COMPUTE = ("megatron_rl.plugins", "megatron_rl.signals")
# The loss is pure mathematics on tensors: it talks to no other process and writes nothing.
NOT_IN_LOSS = (
    "torch.distributed",
    "logging",
    "warnings",
    "wandb",
    "tensorboard",
    "rich",
    "hydra",
    "omegaconf",
    "yaml",
)
# The scheduler decides from what it is told: the same events give the same decisions anywhere.
IN_SCHEDULING = {
    "__future__",
    "abc",
    "collections",
    "dataclasses",
    "heapq",
    "math",
    "megatron_rl",
    "typing",
}


def imported_modules(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Absolute dotted names that ``source`` (the text of ``module``) imports, wherever the
    statement stands. ``from a import b`` gives ``a.b``. ``import_module("a")`` and the use of
    ``torch.distributed`` without an import of its own count.
    """
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and _last_name(node.func) in ("import_module", "__import__")
            and node.args
        ):
            is_text = isinstance(node.args[0], ast.Constant)
            yield str(node.args[0].value) if is_text else COMPUTED
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What ``module`` (a dotted name below ``megatron_rl``) imports against the rules, one sentence
    each."""
    found = []
    package = package_of(module)
    for name in dict.fromkeys(imported_modules(source, module, is_package)):
        top = name.split(".")[0]
        other = package_of(name) if top == "megatron_rl" else package
        if other != package and HEIGHT.get(other, 0) >= HEIGHT.get(package, 0):
            found.append(
                f"{module} imports {name}: {other} is not below {package or 'the package itself'}"
            )
        if top in NOT_BELOW:
            found.append(f"{module} imports {name}: a training needs nothing of {top}/")
        if name == COMPUTED and module not in MAY_COMPUTE:
            found.append(f"{module} imports {name}: only {', '.join(MAY_COMPUTE)} may")
        if top in VENDOR_PACKAGE and VENDOR_PACKAGE[top] != package.split(".")[0]:
            found.append(
                f"{module} imports {name}: only megatron_rl.{VENDOR_PACKAGE[top]} imports {top}"
            )
        if package == "scheduling" and top not in IN_SCHEDULING:
            found.append(f"{module} imports {name}: the scheduler is pure, without clock or device")
        if package == "loss" and any(
            name == banned or name.startswith(banned + ".") for banned in NOT_IN_LOSS
        ):
            found.append(f"{module} imports {name}: the loss is pure torch")
    return found


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPO).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """A path that returns to its start, or None."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for target in sorted(graph[node]):
            if found := visit(target, [*path, node]):
                return found
        done.add(node)
        return None

    return next(filter(None, (visit(node, []) for node in sorted(graph))), None)


def test_every_module_keeps_the_layers_and_the_fences():
    found = [
        text
        for name, path in modules().items()
        for text in violations(path.read_text(encoding="utf-8"), name, path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_every_package_has_a_layer():
    packages = {package_of(name) for name in modules() if "." in name}
    assert packages <= set(HEIGHT), f"without a layer: {sorted(packages - set(HEIGHT))}"


def test_no_import_cycle_between_modules():
    known = modules()
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        targets = imported_modules(
            path.read_text(encoding="utf-8"), name, path.name == "__init__.py"
        )
        # `from a import b` names a module a.b or a name in a: keep whichever exists
        graph[name] = {t if t in known else t.rpartition(".")[0] for t in targets} & set(known) - {
            name
        }
    assert cycle(graph) is None, " -> ".join(cycle(graph) or [])


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        (
            "megatron_rl.loss.per_token.kl",
            "from megatron_rl.trainer import step",
            "trainer is not below loss",
        ),
        (
            "megatron_rl.data.loader",
            "import megatron_rl.rewards.math",
            "rewards is not below data",
        ),
        (
            "megatron_rl.policy.model",
            "def f():\n    from ..engine import worker",
            "engine is not below policy",
        ),
        ("megatron_rl.policy.model", "from .. import engine", "engine is not below policy"),
        (
            "megatron_rl.config.load",
            "from megatron_rl.runtime.launch import rank",
            "runtime is not below config",
        ),
        ("megatron_rl.types", "from megatron_rl import protocols", "protocols is not below types"),
        (
            "megatron_rl.trainer.build",
            "from megatron.core import parallel_state",
            "only megatron_rl.policy imports megatron",
        ),
        (
            "megatron_rl.weight_sync.planner.plan",
            "import vllm",
            "only megatron_rl.engine imports vllm",
        ),
        (
            "megatron_rl.engine.engine",
            "import transformer_engine.pytorch as te",
            "only megatron_rl.policy imports transformer_engine",
        ),
        (
            "megatron_rl.runtime.device",
            "import importlib\nimportlib.import_module('apex')",
            "only megatron_rl.policy imports apex",
        ),
        ("megatron_rl.loss.per_token.aggregate", "from torch import distributed", "pure torch"),
        (
            "megatron_rl.config.schema",
            "import importlib\nimportlib.import_module(home)",
            "a computed name",
        ),
        (
            "megatron_rl.loss.per_token.aggregate",
            "import torch\ntorch.distributed.all_reduce(x)",
            "pure torch",
        ),
        ("megatron_rl.loss.per_token.kl", "import logging", "pure torch"),
        ("megatron_rl.run.start", "from tools.reporting import page", "nothing of tools/"),
        (
            "megatron_rl.loss.per_token.kl",
            "from megatron_rl.config.schema import Config",
            "config is not below loss",
        ),
        (
            "megatron_rl.loss.per_token.kl",
            "from megatron_rl.runtime import launch",
            "not below loss",
        ),
        ("megatron_rl.scheduling.work", "import time", "the scheduler is pure"),
        ("megatron_rl.scheduling.work", "import torch", "the scheduler is pure"),
        (
            "megatron_rl.scheduling.work",
            "from megatron_rl.types import Prompt",
            "types is not below scheduling",
        ),
    ],
)
def test_each_rule_can_fail(module, source, why):
    assert any(why in text for text in violations(source, module)), violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "megatron_rl.trainer.trainer",
            (
                "from megatron_rl.policy import model\nfrom megatron_rl.types import Score\nfrom ."
                " import metrics"
            ),
        ),
        (
            "megatron_rl.policy.model",
            "import megatron.core\nfrom .cpu import patch\nimport torch.distributed as dist",
        ),
        ("megatron_rl.config.schema", "from megatron_rl.loss.config import MethodConfig"),
        ("megatron_rl.train", "from megatron_rl.trainer.build import build"),
    ],
)
def test_what_the_rules_allow_passes(module, source):
    assert violations(source, module) == []


def test_a_cycle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
