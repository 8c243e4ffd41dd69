"""Figures of how code is written: width, density, comments, sizes of functions.

    python tools/style_figures.py [FOLDER ...] [--rooms]

One row for each folder (megatron_rl where none is named); with --rooms one for each of its
subfolders, too. The table is Markdown, to be pasted into a record. What is counted:

- a code line holds code; blank lines, comments on lines of their own and docstrings (any statement
  that is a string) are none, and the width of a line counts its indentation;
- a multi-assignment is ``a, b = x, y``; a swap, whose two sides hold the same expressions, is none,
  and neither is the unpacking of one value (``a, b = pair``);
- a nested comprehension has two ``for`` or holds a comprehension; a chained conditional holds a
  conditional as its value or its alternative;
- a function's lines run from ``def`` to its last statement; its parameters leave out self, cls,
  ``*args`` and ``**kwargs``.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

WIDE_COLUMNS = 100
LONG_LINES = 60
MANY_PARAMETERS = 6
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
HEADINGS = (
    "folder",
    "files",
    "code lines",
    "width p75 / p90 / p99",
    f"> {WIDE_COLUMNS} columns",
    "multi-assignments",
    "nested comprehensions",
    "conditional expressions",
    "chained",
    "comment / code lines",
    f"functions > {LONG_LINES} lines",
    f"> {MANY_PARAMETERS} parameters",
)


@dataclass
class Figures:
    """Counts of some files.

    Example: of ``a, b = 1, 2  # why`` they are one code line 17 columns wide, one
    multi-assignment, and no comment line.
    """

    num_files: int = 0
    widths: list[int] = field(default_factory=list)  # of each code line
    comment_lines: int = 0
    multi_assignments: int = 0
    nested_comprehensions: int = 0
    conditionals: int = 0
    chained_conditionals: int = 0
    num_functions: int = 0
    long_functions: int = 0
    functions_of_many_parameters: int = 0

    def add(self, source: str) -> None:
        """Counts one file. Raises SyntaxError where ``source`` is no Python."""
        tree = ast.parse(source)
        self.num_files += 1
        self._add_lines(source, docstring_lines(tree))
        for node in ast.walk(tree):
            self.multi_assignments += is_multi_assignment(node)
            self.nested_comprehensions += is_nested_comprehension(node)
            self.conditionals += isinstance(node, ast.IfExp)
            self.chained_conditionals += is_chained_conditional(node)
            if isinstance(node, FUNCTIONS):
                self._add_function(node)

    def _add_lines(self, source: str, in_docstrings: set[int]) -> None:
        for number, line in enumerate(source.splitlines(), 1):
            if number in in_docstrings or not line.strip():
                continue
            if line.lstrip().startswith("#"):
                self.comment_lines += 1
            else:
                self.widths.append(len(line))

    def _add_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.num_functions += 1
        self.long_functions += node.end_lineno - node.lineno + 1 > LONG_LINES
        self.functions_of_many_parameters += num_parameters(node) > MANY_PARAMETERS

    def row(self, name: str) -> list[str]:
        """The cells of the table, in the order of ``HEADINGS``; rates are per 1,000 code lines."""
        num_lines = max(len(self.widths), 1)
        wide_lines = sum(width > WIDE_COLUMNS for width in self.widths)
        rates = [
            self.multi_assignments,
            self.nested_comprehensions,
            self.conditionals,
            self.chained_conditionals,
        ]
        return [
            name,
            str(self.num_files),
            str(len(self.widths)),
            " / ".join(str(quantile(self.widths, share)) for share in (0.75, 0.9, 0.99)),
            f"{100 * wide_lines / num_lines:.1f} %",
            *(f"{1000 * count / num_lines:.1f}" for count in rates),
            f"{self.comment_lines / num_lines:.3f}",
            f"{self.long_functions} / {self.num_functions}",
            f"{self.functions_of_many_parameters} / {self.num_functions}",
        ]


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines that a string standing as a statement takes."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


def is_multi_assignment(node: ast.AST) -> bool:
    """Whether ``node`` is ``a, b = x, y`` and no swap."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    values = sorted(ast.unparse(value) for value in node.value.elts)
    for target in node.targets:
        if isinstance(target, ast.Tuple):
            return sorted(ast.unparse(element) for element in target.elts) != values
    return False


def is_nested_comprehension(node: ast.AST) -> bool:
    """Whether ``node`` is a comprehension with two ``for``, or with another one somewhere in it."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    inside = (inner for inner in ast.walk(node) if inner is not node)
    return len(node.generators) > 1 or any(isinstance(inner, COMPREHENSIONS) for inner in inside)


def is_chained_conditional(node: ast.AST) -> bool:
    """Whether ``node`` is ``a if x else b if y else c``, or has the second one in front."""
    if not isinstance(node, ast.IfExp):
        return False
    return isinstance(node.body, ast.IfExp) or isinstance(node.orelse, ast.IfExp)


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Named parameters of a function; a leading self or cls is none."""
    positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    if positional and positional[0] in ("self", "cls"):
        positional = positional[1:]
    return len(positional) + len(node.args.kwonlyargs)


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least ``share`` of all values do not exceed; 0 without values."""
    if not values:
        return 0
    return sorted(values)[math.ceil(share * len(values)) - 1]


def figures(paths: Iterable[Path]) -> Figures:
    """Figures of all files together.

    Raises:
        ValueError: a file is no Python that this interpreter reads.
    """
    total = Figures()
    for path in paths:
        try:
            total.add(path.read_text(encoding="utf-8"))
        except SyntaxError as error:
            raise ValueError(
                f"{path}: cannot be read by Python {sys.version.split()[0]} ({error}); "
                "use a newer one, or name a folder without it"
            ) from error
    return total


def rows(folder: Path, *, rooms: bool) -> list[list[str]]:
    """The row of a folder; with ``rooms`` those of its subfolders and of its own files first.

    Raises:
        ValueError: the folder holds no Python files.
    """
    paths = sorted(folder.rglob("*.py"))
    if not paths:
        raise ValueError(f"{folder}: holds no Python files here; name a folder with code")
    by_room: dict[str, list[Path]] = {}
    for path in paths:
        inner = path.relative_to(folder)
        room = f"{inner.parts[0]}/" if len(inner.parts) > 1 else "its own files"
        by_room.setdefault(room, []).append(path)
    table = []
    if rooms:
        table = [figures(by_room[room]).row(room) for room in sorted(by_room)]
    return [*table, figures(paths).row(f"**{folder}**")]


def markdown(table: Iterable[Sequence[str]]) -> str:
    """A table with ``HEADINGS`` above it."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *table]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--rooms", action="store_true", help="a row for each subfolder, too")
    options = parser.parse_args(arguments)
    folders = options.folders or [Path("megatron_rl")]
    try:
        table = [row for folder in folders for row in rows(folder, rooms=options.rooms)]
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(markdown(table))


if __name__ == "__main__":
    main()
