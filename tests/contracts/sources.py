"""Python files of other packages, read as text: from folders that hold packages, and from wheels.
Nothing is imported."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath


class Place:
    """One folder (an environment's site-packages, an unpacked wheel) or one ``.whl`` file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wheel = zipfile.ZipFile(path) if path.suffix == ".whl" else None
        self.files = set(self.wheel.namelist()) if self.wheel else set()
        self.folders = {
            parent.as_posix() for file in self.files for parent in PurePosixPath(file).parents
        }

    def text(self, file: str) -> str | None:
        """Of the file at this path inside the place; None where there is none."""
        if self.wheel is not None:
            return self.wheel.read(file).decode("utf-8") if file in self.files else None
        path = self.path / file
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def has_folder(self, folder: str) -> bool:
        if self.wheel is not None:
            return folder in self.folders
        return (self.path / folder).is_dir()


class Sources:
    """Modules by dotted name. A package comes whole from the first place that has it, so that no
    two versions are mixed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.places = [Place(path) for path in paths]
        self._trees: dict[str, tuple[ast.Module, bool] | None] = {}

    def place(self, module: str) -> Place | None:
        top = module.partition(".")[0]
        return next((place for place in self.places if place.has_folder(top)), None)

    def tree(self, module: str) -> ast.Module | None:
        """None where there is no such module as Python source."""
        found = self._read(module)
        return None if found is None else found[0]

    def is_package(self, module: str) -> bool:
        found = self._read(module)
        return self.is_folder(module) if found is None else found[1]

    def is_folder(self, module: str) -> bool:
        """A package, with or without ``__init__.py``."""
        place = self.place(module)
        return place is not None and place.has_folder(module.replace(".", "/"))

    def exists(self, module: str) -> bool:
        return self._read(module) is not None or self.is_folder(module)

    def _read(self, module: str) -> tuple[ast.Module, bool] | None:
        if module not in self._trees:
            self._trees[module] = self._parsed(self.place(module), module.replace(".", "/"))
        return self._trees[module]

    @staticmethod
    def _parsed(place: Place | None, path: str) -> tuple[ast.Module, bool] | None:
        for file, package in ((f"{path}/__init__.py", True), (f"{path}.py", False)):
            text = None if place is None else place.text(file)
            if text is not None:
                return ast.parse(text), package
        return None
