"""The documentation as a site that needs no network: the guides, the pages next to the code, the
configuration with its comments, and interfaces from their docstrings.

    python tools/docs/build.py --out site

Needs the extra ``docs``. A page stands once, where it belongs, and is staged from there: links to
other pages and pictures follow it, a link to a file that is no page becomes the file's path.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import yaml

REPO = Path(__file__).resolve().parent.parent.parent
GUIDES = PurePosixPath("tools/docs/pages")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
PICTURES = {".png", ".svg"}
STYLE = ".md-typeset td:first-child code { white-space: nowrap; }\n"  # a key is not broken
# Page of the reference -> its title, and the modules or folders of modules that it shows.
API = {
    "protocols": ("Interfaces", ["protocols.py"]),
    "types": ("Types", ["types.py", "passes.py"]),
    "loss": ("Functions of the loss", ["loss/per_response", "loss/per_token"]),
}


def tracked() -> list[PurePosixPath]:
    """Files of the repository, of a copy without git too."""
    words = ["git", "-C", str(REPO), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, capture_output=True, text=True)
    if listed.returncode == 0:
        names = listed.stdout.splitlines()
        return [PurePosixPath(name) for name in names if (REPO / name).is_file()]
    skipped = {".git", ".venv", ".work", "runs"}
    return [
        PurePosixPath(path.relative_to(REPO).as_posix())
        for path in REPO.rglob("*")
        if path.is_file() and path.relative_to(REPO).parts[0] not in skipped
    ]


def place(file: PurePosixPath) -> PurePosixPath:
    """Where a file of the repository stands on the site."""
    if file == PurePosixPath("README.md"):
        return PurePosixPath("index.md")
    if file.is_relative_to(GUIDES):
        return "guides" / file.relative_to(GUIDES)
    # mkdocs leaves out what begins with a dot.
    return PurePosixPath(*(part.removeprefix(".") for part in file.parts))


def linked(text: str, file: PurePosixPath, shown: set[PurePosixPath]) -> str:
    """The text of a page with the links of the site.

    Args:
        file: the page, from the root of the repository.
        shown: the files that are on the site.
    """

    def new(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group(0)
        path, _, anchor = target.partition("#")
        found = PurePosixPath(os.path.normpath(file.parent / path))
        if found not in shown and found / "README.md" in shown:
            found = found / "README.md"
        if found in shown:
            there = os.path.relpath(place(found), place(file).parent)
            return f"{mark}[{words}]({there}{'#' + anchor if anchor else ''})"
        return words if str(found) in words.replace("`", "") else f"{words} (`{found}`)"

    fenced = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(new, part) for part in fenced)


def configuration() -> str:
    """Every setting in a line, from the files of conf/ themselves; then what options change."""
    root = REPO / "conf" / "config.yaml"
    chosen = [
        entry for entry in yaml.safe_load(root.read_text("utf-8"))["defaults"] if entry != "_self_"
    ]
    parts = ["# Configuration", "Every key with its default. `method` has cards.", _table(root, "")]
    for group, default in (pair for entry in chosen for pair in entry.items()):
        if group in ("method", "optional experiment"):
            continue
        parts += [f"## {group}", _table(REPO / f"conf/{group}/{default}.yaml", f"{group}.")]
        others = sorted((REPO / "conf" / group).glob("*.yaml"))
        for file in (file for file in others if file.stem != default):
            parts.append(f"### {group}={file.stem}\n\n{_yaml(file.relative_to(REPO))}")
    return "\n\n".join(parts) + "\n"


def _table(file: Path, prefix: str) -> str:
    cells = [
        [f"`{key}`", f"`{value}`" if value else "", said]
        for key, value, said in settings(file, prefix)
    ]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join(["| key | default | what it is |", "|---|---|---|", *rows])


def settings(file: Path, prefix: str) -> list[tuple[str, str, str]]:
    """(key, default, comments) of each line of a file of settings; of a section, if it has a
    comment, with no default.

    Args:
        prefix: of the keys: the group of the file with a dot.
    """
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = []

    def walk(node: yaml.MappingNode, prefix: str) -> None:
        for key, value in node.value:
            if key.value == "defaults":
                continue
            name, number = prefix + key.value, key.start_mark.line
            first = number
            while first > 0 and lines[first - 1].lstrip().startswith("#"):
                first -= 1
            # The first line of a file is about all of it.
            said = [line.strip(" #") for line in lines[max(first, 1) : number]]
            is_section = isinstance(value, yaml.MappingNode) and not value.flow_style
            is_block = is_section or getattr(value, "style", None) in ("|", ">")
            end = key.end_mark if is_block else value.end_mark
            said.append(lines[end.line][end.column :].partition("#")[2].strip())
            default = "" if is_block else text[value.start_mark.index : value.end_mark.index]
            if not is_section or any(said):
                found.append((name, default, " ".join(filter(None, said))))
            if is_section:
                walk(value, f"{name}.")

    node = yaml.compose(text)
    walk(node, prefix)
    return found


def _yaml(name: str | Path) -> str:
    return f"```yaml\n{(REPO / name).read_text(encoding='utf-8').strip()}\n```"


def interfaces(title: str, names: Iterable[str]) -> str:
    """The public names of modules, from their docstrings; ``names`` below the package."""
    parts = [f"# {title}"]
    for name in names:
        path = REPO / "megatron_rl" / name
        for file in [path] if path.is_file() else sorted(path.glob("[a-z]*.py")):
            module = ".".join(file.relative_to(REPO).with_suffix("").parts)
            parts.append(f"::: {module}")
    return "\n\n".join(parts) + "\n"


def stage(folder: Path) -> None:
    """Writes all pages and pictures of the site into ``folder``."""
    files = tracked()
    shown = {file for file in files if file.suffix in {".md", *PICTURES}}
    for file in sorted(shown):
        target = folder / place(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in PICTURES:
            shutil.copyfile(REPO / file, target)
        else:
            text = (REPO / file).read_text(encoding="utf-8")
            target.write_text(linked(text, file, shown), encoding="utf-8")
    (folder / "site.css").write_text(STYLE, encoding="utf-8")
    reference = folder / "reference"
    reference.mkdir()
    (reference / "configuration.md").write_text(configuration(), encoding="utf-8")
    for name, (title, names) in API.items():
        (reference / f"{name}.md").write_text(interfaces(title, names), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the site")
    out = parser.parse_args().out.resolve()
    try:
        from mkdocs.commands.build import build
        from mkdocs.config import load_config
        from mkdocs.exceptions import MkDocsException
    except ImportError as error:
        sys.exit(f"error: {error}; install the extra: pip install '.[docs]'")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        stage(Path(scratch))
        config = load_config(
            str(REPO / "tools/docs/mkdocs.yml"), docs_dir=scratch, site_dir=str(out), strict=True
        )
        try:
            build(config)
        except MkDocsException as error:
            sys.exit(f"error: {error}")
    print(f"wrote {out / 'index.html'}")


if __name__ == "__main__":
    main()
