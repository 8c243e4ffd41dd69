"""The commands that the documents print: code blocks of Markdown, docstrings of programs, heads of
shell scripts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.test_size import REPO

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SETTING = r"(?:[A-Z][A-Z0-9_]*=\S+ +)*"
# What a line of a docstring, or of a block without a language, must begin with to be a command.
PROGRAM = re.compile(
    rf"{SETTING}(python[\d.]*|torchrun|bash|pytest|pip|sbatch|vllm|\S+/(python|pip|pytest)) "
)


@dataclass(frozen=True)
class Command:
    """``text`` as printed, on one line, without comments and without the optional parts ``[--like
    THIS]`` of a usage line."""

    where: str
    text: str


def commands() -> list[Command]:
    """Every command of README, the guides, the pages for contributors, of examples and benchmarks,
    the programs and the scripts, in the order of the text."""
    found = []
    pages = [
        REPO / "README.md",
        REPO / "conf/README.md",
        *sorted((REPO / "tools/docs/pages").glob("*.md")),
        *sorted((REPO / "examples").glob("**/README.md")),
        REPO / "tools/bench/README.md",
        REPO / "tools/bench/LOG.md",
        *sorted((REPO / ".github").glob("**/*.md")),
    ]
    for folder in ("plugins", "planning"):
        others = sorted((REPO / "examples" / folder).glob("*.md"))
        pages += [page for page in others if page not in pages]
    for page in pages:
        found += [
            Command(name(page), text) for text in of_markdown(page.read_text(encoding="utf-8"))
        ]
    entries = ("train", "sweep", "sample", "evaluate")
    programs = [REPO / "megatron_rl" / f"{entry}.py" for entry in entries]
    programs += [REPO / "examples/vllm_server/push.py"]
    programs += [
        *sorted((REPO / "tools").glob("*.py")),
        *sorted((REPO / "tools/bench").glob("*.py")),
    ]
    for program in programs:
        found += [
            Command(name(program), text)
            for text in of_docstring(program.read_text(encoding="utf-8"))
        ]
    for pattern in ("examples/**/*.sh", "examples/**/*.sbatch", "tools/**/*.sh"):
        for script in sorted(REPO.glob(pattern)):
            found += [
                Command(name(script), text)
                for text in of_script(script.read_text(encoding="utf-8"))
            ]
    return found


def name(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def of_markdown(text: str) -> list[str]:
    """Every line of a bash block, and the lines of blocks without a language that begin with a
    program."""
    found = []
    for match in FENCE.finditer(text):
        language, block = match[1], match[2]
        lines = [without_comment(line) for line in joined(block)]
        if language in ("bash", "sh", "console"):
            found += [line for line in lines if line]
        elif not language:
            found += [line for line in lines if PROGRAM.match(line)]
    return found


def of_docstring(source: str) -> list[str]:
    """The lines of a module's docstring that begin with a program."""
    return [
        usage(line)
        for line in joined(ast.get_docstring(ast.parse(source)) or "")
        if PROGRAM.match(line.strip())
    ]


def of_script(source: str) -> list[str]:
    """The lines of the comment at the head of a shell script that begin with a program."""
    head = []
    for line in source.splitlines():
        if not line.startswith("#"):
            break
        head.append(line.lstrip("#"))
    return [usage(line) for line in joined("\n".join(head)) if PROGRAM.match(line.strip())]


def usage(line: str) -> str:
    """A line of a docstring as a command: what follows two spaces explains it, what stands in
    brackets may be left out."""
    command = re.split(r"\s{2,}", without_comment(line))[0]
    return re.sub(r"\s*\[[^\]\[]*\]|\s+\.\.\.$", "", command)


def joined(block: str) -> Iterator[str]:
    """Lines, those that end in a backslash with the next one."""
    yield from re.sub(r"\\\n\s*", "", block).splitlines()


def without_comment(line: str) -> str:
    """``line`` without what a shell takes for a comment, and without space around it."""
    quote = ""
    for place, mark in enumerate(line):
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "'\"":
            quote = mark
        elif mark == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place].strip()
    return line.strip()
