"""The guides of .github/guides are followed to the letter in a scratch copy of the tree, and what
they promise then holds.

A file is a code block below a paragraph that begins with its path in backticks and ends with a
colon; a block of the language ``diff`` changes the file named last. Commands of the bash block are
run in the copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import warm
from tests.launch import run
from tests.test_size import REPO

GUIDES = REPO / ".github" / "guides"
COPIED = ("megatron_rl", "conf", "tests", "tools", ".pytest.ini")
# A paragraph that begins with a path and ends with a colon, or a block.
PATH = r"^`([\w./]+)`(?:[^\n]|\n(?!\n))*?:$"
BLOCK = r"^```(\w+)\n(.*?)^```$"
STEP = re.compile(f"{PATH}|{BLOCK}", re.DOTALL | re.MULTILINE)
LIMIT_S = 240


@dataclass(frozen=True)
class Step:
    """One block of a guide: a new file, a change of one (``language`` diff), or commands (bash).

    Example: ``Step("conf/method/a.yaml", "yaml", "name: a\\n")``.
    """

    path: str
    language: str
    text: str


def steps(guide: str) -> list[Step]:
    """The blocks of a guide with the file that each is about."""
    found = []
    path = ""
    for match in STEP.finditer(guide):
        if match[1]:
            path = match[1]
        else:
            found.append(Step(path, match[2], match[3]))
    return found


def written_by(page: Path) -> set[str]:
    """The files that a guide makes or changes."""
    found = steps(page.read_text(encoding="utf-8"))
    return {step.path for step in found if step.language != "bash"}


def changed(text: str, change: str) -> str:
    """``text`` after a change whose lines begin with a space, - or +, as in a diff.

    Raises:
        ValueError: the lines that are to be there stand in the text not exactly once.
    """
    lines = change.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    if text.count(old) != 1:
        raise ValueError(f"stands {text.count(old)} times in the file, not once:\n{old}")
    return text.replace(old, new)


def follow(guide: str, tree: Path) -> Iterator[str]:
    """Writes the files of a guide into ``tree``; yields its commands as they come."""
    for step in steps(guide):
        target = tree / step.path
        if step.language == "bash":
            yield from step.text.splitlines()
        elif step.language == "diff":
            target.write_text(changed(target.read_text(encoding="utf-8"), step.text))
        else:
            assert not target.exists(), f"{step.path} is there already"
            target.write_text(step.text, encoding="utf-8")


def here(command: str) -> list[str]:
    """A command of a guide with the Python of these tests."""
    program, *arguments = command.split()
    # Of no use to a guide: the first would write into the copy, the second takes 2 s to import.
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    known = {
        ".venv/bin/pytest": [str(warm.python()), "-m", "pytest", "-q", *without],
        ".venv/bin/python": [str(warm.python())],
    }
    return [*known[program], *arguments]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the guides change and what their tests need."""
    for name in COPIED:
        source = REPO / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def start(command: str, tree: Path) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return run(here(command), LIMIT_S, env=env, cwd=tree, check=False)


@pytest.mark.parametrize(
    "page",
    [
        # The guide for attention trains and compares with transformers: half a minute.
        pytest.param(page, marks=pytest.mark.full if page.stem == "attention" else (), id=page.stem)
        for page in sorted(GUIDES.glob("*.md"))
    ],
)
def test_a_guide_works_as_written(page: Path, tree: Path) -> None:
    num_commands = 0
    for command in follow(page.read_text(encoding="utf-8"), tree):
        done = start(command, tree)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        assert "pytest" not in command or re.search(r"\d passed", done.stdout), done.stdout
        num_commands += 1
    assert num_commands == 1


@pytest.mark.parametrize("page", sorted(GUIDES.glob("*.md")), ids=lambda page: page.stem)
def test_what_a_guide_writes_is_formatted(page: Path, tree: Path) -> None:
    """So that the lint test passes for whoever follows it."""
    list(follow(page.read_text(encoding="utf-8"), tree))
    paths = sorted(path for path in written_by(page) if path.endswith(".py"))
    config = ["--no-cache", "--config", str(REPO / ".ruff.toml")]
    for command in (["format", "--check"], ["check"]) if paths else ():
        run([sys.executable, "-m", "ruff", *command, *config, *paths], 60, cwd=tree)


def test_every_guide_is_linked_with_its_number_of_files() -> None:
    contributing = (REPO / ".github/CONTRIBUTING.md").read_text(encoding="utf-8")
    counts = dict(re.findall(r"\]\(guides/(\w+\.md)\) \| (\d+)", contributing))
    written = {page.name: written_by(page) for page in GUIDES.glob("*.md")}
    assert counts == {name: str(len(paths)) for name, paths in written.items()}
    assert len(counts) >= 5


def test_a_guide_without_its_file_fails(tree: Path) -> None:
    guide = (GUIDES / "method.md").read_text(encoding="utf-8")
    without = re.sub(r"^```yaml\n.*?^```$", "", guide, flags=re.DOTALL | re.MULTILINE)
    (command,) = follow(without, tree)
    done = start(command, tree)
    assert done.returncode != 0
    assert "rloo_token_mean" in done.stdout


def test_steps_are_read_from_a_page() -> None:
    page = "Say.\n\n`a/b.py`, a file\nof two lines:\n\n```python\nx = 1\n```\n"
    page += "\n```diff\n-x\n+y\n```\n```bash\nf\n```\n"
    assert steps(page) == [
        Step("a/b.py", "python", "x = 1\n"),
        Step("a/b.py", "diff", "-x\n+y\n"),
        Step("a/b.py", "bash", "f\n"),
    ]
    assert steps("`a` is a word\n\n```yaml\nx: 1\n```\n") == [Step("", "yaml", "x: 1\n")]


def test_changes_by_hand() -> None:
    text = "a\nb\nc\n"
    assert changed(text, "-b\n+d\n") == "a\nd\nc\n"
    assert changed(text, " a\n+d\n") == "a\nd\nb\nc\n"
    assert changed(text, "+d\n a\n") == "d\na\nb\nc\n"
    for wrong in ("-x\n+d\n", "-a\n-c\n"):
        with pytest.raises(ValueError, match="stands 0 times"):
            changed(text, wrong)
    with pytest.raises(ValueError, match="stands 2 times"):
        changed("a\na\n", "-a\n")


def test_the_copy_is_what_is_tested(tree: Path) -> None:
    """A change of the copy's package is seen by a program that is started there."""
    (tree / "megatron_rl" / "planted.py").write_text("print('from the copy')\n")
    (tree / "import_planted.py").write_text("import megatron_rl.planted\n")
    done = start(".venv/bin/python import_planted.py", tree)
    assert done.stdout.strip() == "from the copy", os.linesep + done.stdout
