"""Sizes and habits that keep the code readable: short functions and files, strict configuration, no
silent error handling."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
TREES = ("megatron_rl", "tools", "tests", "examples", "conf", ".ci", ".github")
TEXT = {".py", ".yaml", ".yml", ".sh", ".sbatch", ".md", ".toml", ".ini", ".txt", ""}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# Data and prose, not code: a set of pinned versions, the records of measurements, recorded outputs.
LONG_FILES = re.compile(r"(^tools/constraints_\w+\.txt|\.md|/expected_output\.\w+)$")
MAX_STEP_LINES = 25
MAX_ENTRY_LINES = 80
MAX_POLICY_MEMBERS = 6
MAX_FOLDER_FILES = 15  # of Python, in a folder of the package

# A setting comes from conf/ alone. What is read from the environment is what the launcher says
# about this process.
ENVIRONMENT_READERS = {
    "megatron_rl/rewards/workers/served.py": "the key of a server, which no file may hold",
    "megatron_rl/runtime/launch.py": "rank, world size and rendezvous address set by torchrun",
    "megatron_rl/runtime/guard/failure.py": "rank, rendezvous address, error file set by torchrun",
    "megatron_rl/runtime/guard/first_failure.py": "rendezvous address set by torchrun",
    "megatron_rl/runtime/process.py": (
        "whether torchrun or `serve` started it, as which rank; variables, to put them back"
    ),
    "megatron_rl/rewards/workers/server.py": (
        "handed on to a child process, with the path to this package added"
    ),
    "megatron_rl/sweep.py": "the GPUs of this process, to share them among the runs of a sweep",
    "megatron_rl/sweeping/running.py": "handed on to the runs of a sweep, child processes",
    "megatron_rl/rollouts/environments/agent.py": "handed on to an agent, a child process",
    "megatron_rl/serve.py": "handed on to the server, a child process",
    "megatron_rl/trainer/build.py": "deterministic kernels of libraries, before their first call",
    "megatron_rl/engine/requirements.py": "allocator settings that vLLM cannot work with",
}
CONFIG_NAMES = {"config", "cfg", "conf", "settings"}
FORBIDDEN_MARK = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
VAGUE_NAME = re.compile(r"manager|helper", re.IGNORECASE)
VAGUE_FILE = re.compile(r"^(utils?|helpers?|misc|common)\.py$|manager|helper", re.IGNORECASE)
CONTEXT_MANAGER = re.compile(r"context_?manager", re.IGNORECASE)


def package_files() -> list[Path]:
    return sorted((REPO / "megatron_rl").rglob("*.py"))


@functools.cache
def text_files() -> list[Path]:
    """Every text file of the project: the trees above and the files at the top."""
    found = [
        path
        for tree in TREES
        for path in (REPO / tree).rglob("*")
        if "__pycache__" not in path.parts
    ]
    found += [
        path for path in REPO.iterdir() if path.name not in ("LICENSE", ".git")
    ]  # .git is a file in a linked work tree
    return sorted(path for path in found if path.is_file() and path.suffix in TEXT)


def python_files() -> list[Path]:
    return [
        path
        for path in text_files()
        if path.suffix == ".py" and path.relative_to(REPO).parts[0] in TREES
    ]


@functools.lru_cache(maxsize=1)
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All of a file: the rules look at one file after the other."""
    return tuple(ast.walk(ast.parse(source)))


def functions(source: str) -> Iterator[tuple[str, int]]:
    """(qualified name, number of lines from ``def`` to the last statement) of every function,
    nested ones too."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{prefix}{child.name}."
                if not isinstance(child, ast.ClassDef):
                    yield inner[:-1], child.end_lineno - child.lineno + 1
            yield from visit(child, inner)

    yield from visit(nodes(source)[0], "")


def long_functions(source: str) -> list[str]:
    return [
        f"{name}: {lines} lines" for name, lines in functions(source) if lines > MAX_FUNCTION_LINES
    ]


def bad_names(source: str) -> list[str]:
    """Classes and functions called after nothing in particular."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [node.name for node in nodes(source) if isinstance(node, kinds)]
    return [name for name in names if VAGUE_NAME.search(CONTEXT_MANAGER.sub("", name))]


def environment_reads(source: str) -> list[int]:
    """Lines that read the process environment. Setting a variable for a library or a child is no
    read."""
    writes: set[int] = set()
    for node in nodes(source):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            writes.add(id(node.value))
        called = getattr(node, "func", None)
        if isinstance(called, ast.Attribute) and called.attr in ("update", "setdefault"):
            writes.add(id(called.value))
    lines = []
    for node in nodes(source):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {"environ", "getenv"} & {alias.name for alias in node.names}
        ):
            lines.append(node.lineno)
        if (
            isinstance(node, ast.Attribute)
            and id(node) not in writes
            and ast.unparse(node) in ("os.environ", "os.getenv", "os.environb")
        ):
            lines.append(node.lineno)
    return lines


def swallowed_exceptions(source: str) -> list[int]:
    """Lines of ``except:``, and of ``except Exception`` (or BaseException) that neither raises
    again nor looks at the exception."""
    lines = []
    for node in nodes(source):
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is not None and re.search(r"\b(Base)?Exception\b", ast.unparse(node.type))
        inside = [inner for statement in node.body for inner in ast.walk(statement)]
        raises = any(isinstance(inner, ast.Raise) for inner in inside)
        looks = any(
            isinstance(inner, ast.Name) and inner.id in (node.name, "traceback") for inner in inside
        )
        if node.type is None or (broad and not raises and not looks):
            lines.append(node.lineno)
    return lines


def config_defaults(source: str) -> list[int]:
    """Lines that give a setting a second home: ``config.get(key, default)``, ``getattr(config, key,
    default)``. ``getattr`` with the default None is allowed: it asks which of several schemas a
    section has, and invents no value.
    """
    lines = []
    for node in nodes(source):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if (
            called.endswith(".get")
            and len(node.args) + len(node.keywords) > 1
            and isinstance(node.func, ast.Attribute)
        ):
            owner = node.func.value
        elif called == "getattr" and len(node.args) == 3 and ast.unparse(node.args[2]) != "None":
            owner = node.args[0]
        else:
            continue
        if CONFIG_NAMES & set(re.findall(r"\w+", ast.unparse(owner))):
            lines.append(node.lineno)
    return lines


# The rules that read the tree of a file, and where they hold.
RULES = {
    long_functions: TREES,
    bad_names: ("megatron_rl", "tools", "examples"),
    environment_reads: ("megatron_rl",),
    swallowed_exceptions: TREES,
    config_defaults: ("megatron_rl",),
}


@functools.cache
def findings() -> dict[Callable[[str], list], list[tuple[str, object]]]:
    """(file, what is wrong there) by rule; each file is parsed once."""
    found: dict = {check: [] for check in RULES}
    for path in python_files():
        name = str(path.relative_to(REPO))
        source = path.read_text(encoding="utf-8")
        for check, trees in RULES.items():
            if path.relative_to(REPO).parts[0] in trees:
                found[check] += [(name, wrong) for wrong in check(source)]
    return found


def listed(check: Callable[[str], list]) -> str:
    return "\n".join(f"{name}: {wrong}" for name, wrong in findings()[check])


def test_files_are_short():
    lengths = {
        str(path.relative_to(REPO)): len(path.read_text(encoding="utf-8").splitlines())
        for path in text_files()
    }
    long = {
        name: lines
        for name, lines in lengths.items()
        if lines > MAX_FILE_LINES and not LONG_FILES.search(name)
    }
    assert not long, f"longer than {MAX_FILE_LINES} lines: {long}"


def test_folders_of_the_package_hold_few_files():
    sizes = Counter(path.parent.relative_to(REPO) for path in package_files())
    crowded = {str(folder): size for folder, size in sizes.items() if size > MAX_FOLDER_FILES}
    assert not crowded, f"more than {MAX_FOLDER_FILES} Python files: {crowded}"


def test_a_class_name_occurs_once_in_the_package():
    places = defaultdict(list)
    for path in package_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(REPO)))
    repeated = {name: files for name, files in places.items() if len(files) > 1}
    assert not repeated, repeated


def test_functions_are_short():
    assert not listed(long_functions), listed(long_functions)


def test_the_step_and_the_entry_can_be_read_at_one_go():
    trainer = (REPO / "megatron_rl/trainer/trainer.py").read_text(encoding="utf-8")
    lengths = dict(functions(trainer))
    assert lengths["Trainer.step"] <= MAX_STEP_LINES
    assert (
        len((REPO / "megatron_rl/train.py").read_text(encoding="utf-8").splitlines())
        <= MAX_ENTRY_LINES
    )


def test_what_the_trainer_asks_of_a_policy_is_little():
    protocols = (REPO / "megatron_rl/protocols.py").read_text(encoding="utf-8")
    members = [name for name, _ in functions(protocols) if name.startswith("Policy.")]
    assert 0 < len(members) <= MAX_POLICY_MEMBERS, members


def test_names_say_a_role():
    assert not listed(bad_names), listed(bad_names)
    files = [str(path.relative_to(REPO)) for path in python_files() if VAGUE_FILE.search(path.name)]
    assert not files, files


def test_text_is_ascii():
    found = [
        f"{path.relative_to(REPO)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not line.isascii()
    ]
    assert not found, "\n".join(found)


def test_no_setting_comes_from_the_environment():
    reading = {name for name, _ in findings()[environment_reads]}
    new = sorted(reading - ENVIRONMENT_READERS.keys())
    assert not new, listed(environment_reads)
    stale = sorted(ENVIRONMENT_READERS.keys() - reading)
    assert not stale, f"listed and not reading: {stale}"


def test_no_exception_is_swallowed():
    assert not listed(swallowed_exceptions), listed(swallowed_exceptions)


def test_every_setting_has_one_home():
    assert not listed(config_defaults), listed(config_defaults)


def test_nothing_is_left_for_later():
    found = [
        f"{path.relative_to(REPO)}: {mark}"
        for path in text_files()
        for mark in FORBIDDEN_MARK.findall(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("check", "bad", "good"),
    [
        (
            long_functions,
            "class A:\n  def f():\n" + "    x = 1\n" * 60,
            "def f():\n" + "    x = 1\n" * 59,
        ),
        (bad_names, "class StateManager: ...", "class Policy: ...\ndef is_contextmanager(): ..."),
        (bad_names, "def batch_helper(): ...", "def batch(): ..."),
        (environment_reads, "import os\nx = os.environ['A']", "import os\nos.environ['A'] = '1'"),
        (
            environment_reads,
            "import os\nx = os.environ.get('A', '')",
            "import os\nos.environ.setdefault('A', '1')",
        ),
        (environment_reads, "import os\nx = os.getenv('A')", "import os\nos.environ.update(A='1')"),
        (environment_reads, "from os import environ", "from os import path"),
        (environment_reads, "import os\nx = 'A' in os.environ", "import os\ndel os.environ['A']"),
        (swallowed_exceptions, "try: f()\nexcept: raise", "try: f()\nexcept KeyError: pass"),
        (
            swallowed_exceptions,
            "try: f()\nexcept Exception: pass",
            "try: f()\nexcept Exception as e: report(e)",
        ),
        (
            swallowed_exceptions,
            "try: f()\nexcept Exception: print('no')",
            "try: f()\nexcept Exception: traceback.print_exc()",
        ),
        (
            swallowed_exceptions,
            "try: f()\nexcept (KeyError, Exception) as e: pass",
            "try: f()\nexcept Exception: raise",
        ),
        (config_defaults, "x = config.get('a', 3)", "x = counts.get('a', 3)"),
        (config_defaults, "x = self.config.optim.get('a', default=3)", "x = config.get('a')"),
        (config_defaults, "x = getattr(cfg, 'a', 3)", "x = getattr(cfg, 'a', None)"),
        (FORBIDDEN_MARK.findall, "# TO\x44O later", "# to do so"),
    ],
)
def test_each_rule_can_fail(check, bad, good):
    assert check(bad), bad
    assert not check(good), good


def test_file_rules_can_fail():
    assert VAGUE_FILE.search("utils.py")
    assert VAGUE_FILE.search("checkpoint_manager.py")
    assert not VAGUE_FILE.search("layout.py")
    assert not LONG_FILES.search("megatron_rl/policy/model.py")
    assert not LONG_FILES.search("conf/config.yaml")
