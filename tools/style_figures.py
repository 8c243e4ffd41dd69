"""Figures of how much code there is: lines, width, comments.

    python tools/style_figures.py [FOLDER ...] [--packages]

One row for each folder (megatron_rl where none is named); with --packages one for each of its
subfolders, too. The table is Markdown, to be pasted into a record. Lines are all lines of the
files; a code line holds code: blank lines, comments on lines of their own and docstrings (any
statement that is a string) are none, and its width counts indentation.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

HEADINGS = (
    "folder",
    "files",
    "lines",
    "code lines",
    "width p75 / p90 / p99",
    "comment / code lines",
)


class Figures:
    """Counts of some files, and the widths of their code lines.

    Example: ``a, b = 1, 2  # why`` is one code line 17 columns wide, and no comment line.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.widths: list[int] = []

    def add(self, source: str) -> None:
        """Counts one file. Raises SyntaxError where ``source`` is no Python."""
        tree = ast.parse(source)
        strings: set[int] = set()  # numbers of the lines of strings that stand as statements
        for node in ast.walk(tree):
            value = node.value if isinstance(node, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                strings.update(range(node.lineno, node.end_lineno + 1))
        lines = source.splitlines()
        self.counts.update({"files": 1, "lines": len(lines)})
        for number, line in enumerate(lines, 1):
            if number in strings or not line.strip():
                continue
            if line.lstrip().startswith("#"):
                self.counts["comments"] += 1
            else:
                self.widths.append(len(line))

    def row(self, name: str) -> list[str]:
        """The cells of the table, in the order of ``HEADINGS``."""
        counts = self.counts
        num_lines = max(len(self.widths), 1)
        return [
            name,
            str(counts["files"]),
            str(counts["lines"]),
            str(len(self.widths)),
            " / ".join(str(quantile(self.widths, share)) for share in (0.75, 0.9, 0.99)),
            f"{counts['comments'] / num_lines:.3f}",
        ]


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least ``share`` of all values do not exceed; 0 without values."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else 0


def rows(folder: Path, *, packages: bool) -> list[list[str]]:
    """The row of a folder; with ``packages`` those of its subfolders and of its own files first.

    Raises:
        ValueError: the folder holds no Python files, or one that this interpreter cannot read.
    """
    total = Figures()
    parts: dict[str, Figures] = {}
    for path in sorted(folder.rglob("*.py")):
        inner = path.relative_to(folder)
        name = f"{inner.parts[0]}/" if len(inner.parts) > 1 else "its own files"
        try:
            for figures in (total, parts.setdefault(name, Figures())):
                figures.add(path.read_text(encoding="utf-8"))
        except SyntaxError as error:
            raise ValueError(
                f"{path}: cannot be read by Python {sys.version.split()[0]} ({error}); "
                "use a newer one, or name a folder without it"
            ) from error
    if not parts:
        raise ValueError(f"{folder}: holds no Python files here; name a folder with code")
    own = [parts[name].row(name) for name in sorted(parts)] if packages else []
    return [*own, total.row(f"**{folder}**")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--packages", action="store_true", help="a row for each subfolder, too")
    options = parser.parse_args(arguments)
    table: list[Sequence[str]] = [HEADINGS, ["---"] * len(HEADINGS)]
    try:
        for folder in options.folders or [Path("megatron_rl")]:
            table += rows(folder, packages=options.packages)
    except ValueError as error:
        sys.exit(f"error: {error}")
    for cells in table:
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
