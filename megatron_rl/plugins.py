"""A user's own code, imported by name: ``--plugin my.module`` or ``--plugin path/to/file.py``.

Importing a plug-in registers what it defines (a verifier, an estimator, a model family, ...) by the
decorators of those packages. Installed packages name theirs under the entry point
``megatron_rl.plugins`` and need no option. Processes that are started later (workers of verifiers,
runs of a sweep) are handed ``loaded()`` and import the same.
"""

import argparse
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_rl.errors import RegistrationError, first_line

_ENTRY_POINTS = "megatron_rl.plugins"
_loaded: list[str] = []
_sources: dict[str, str] = {}  # plug-in -> SHA-256 of its file


def add_plugin_option(parser: argparse.ArgumentParser, when: str = "imported first") -> None:
    """``--plugin``, which may be repeated; ``when``: what becomes of it."""
    text = f"your own code, {when}; see examples/plugins"
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="MODULE_OR_FILE", help=text
    )


def load_plugins(names: Sequence[str]) -> None:
    """Imports installed plug-ins and those named, each once.

    Example: ``load_plugins(["my_package.estimators", "examples/plugins/clipped_advantage.py"])``.

    Raises:
        ValueError: a name that cannot be imported: names it, with the reason.
    """
    for entry in importlib.metadata.entry_points(group=_ENTRY_POINTS):
        module = _import_source(entry.module, f"entry point {_ENTRY_POINTS}: {entry.name}")
        _sources[entry.module] = _digest(module)
    for name in names:
        module = _import_source(name, "--plugin")
        absolute = str(Path(name).resolve()) if name.endswith(".py") else name
        if absolute not in _loaded:
            _loaded.append(absolute)
        _sources[absolute] = _digest(module)


def loaded() -> tuple[str, ...]:
    """The names that ``load_plugins`` was given, files by absolute path, in order."""
    return tuple(_loaded)


def sources() -> dict[str, str]:
    """Every plug-in of this process, installed ones too, with the SHA-256 of its file.

    A run records them: a name alone does not say which code ran.
    Example: ``{"/plugins/drop_easy.py": "9f2c..."}``.
    """
    return dict(_sources)


def _digest(module: ModuleType) -> str:
    """SHA-256 of the module's file; empty for a namespace package, which has none."""
    if module.__file__ is None:
        return ""
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()


def _import_source(name: str, origin: str) -> ModuleType:
    """The module ``name`` (dotted, or a path that ends in ``.py``), imported once for a process.

    Args:
        origin: the option or key that named it, for the message.

    Raises:
        ValueError: no such file or module, or its import fails.
    """
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        return _import_file(Path(name).resolve())
    except RegistrationError as error:
        raise ValueError(f"{origin} = {name}: {error}") from error
    # A program that is no module ends the process at its end, or where it reads its arguments.
    except (Exception, SystemExit) as error:
        remedy = "give a module that Python can import, or the path of a .py file"
        if isinstance(error, SystemExit):
            remedy = "an import must return: put what ends it below if __name__ == '__main__':"
        raise ValueError(
            f"{origin} = {name}: cannot be imported ({named(error)}){place(error)}; {remedy}"
        ) from error


def named(error: BaseException) -> str:
    """First line of an error of a user's code, with its class: ``"KeyError: 'x'"``."""
    class_name = type(error).__name__
    text = first_line(error)
    return text if text.startswith(class_name) else f"{class_name}: {text}"


def place(error: BaseException) -> str:
    """The place where a user's code failed, for a message: ``", line 3 of mine.py"``.

    The innermost line outside this package, Python and installed libraries; empty without one.
    """
    folders = sysconfig.get_paths()
    libraries = tuple(folders[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    others = ("<frozen", str(Path(__file__).resolve().parent), *libraries)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(others)]
    if not theirs:
        return ""
    return f", line {theirs[-1].lineno} of {Path(theirs[-1].filename).name}"


def import_function(spec: str, key: str) -> Any:
    """The object ``path.py:name`` or ``package.module:name``.

    Args:
        key: the configuration key that holds ``spec``, for the message.

    Raises:
        ValueError: ``spec`` has no colon, its module cannot be imported, it has no such name, or
            the object cannot be called.
    """
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise ValueError(f"{key} = {spec}: write path.py:name or package.module:name")
    function = getattr(_import_source(source, key), name, None)
    if function is None:
        raise ValueError(
            f"{key} = {spec}: {source} has no {name!r}; correct the name after the colon"
        )
    if not callable(function):
        raise ValueError(f"{key} = {spec}: is no function; name one that can be called")
    return function


def _import_file(path: Path) -> ModuleType:
    """The module of a file, imported once."""
    # Named after its whole path, so that two files called reward.py do not collide.
    name = "megatron_rl_plugin_" + "_".join(path.with_suffix("").parts[1:])
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
