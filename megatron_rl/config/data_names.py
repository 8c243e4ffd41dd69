"""Names of data in ``data.train`` and ``data.eval``: files, patterns, data sets, tasks."""

import glob
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

GENERATED = "reasoning_gym:"
HF = "hf:"
KINDS = (
    "give a .jsonl or .parquet file, a pattern such as 'data/*.jsonl', hf:NAME:SPLIT, or "
    "reasoning_gym:<task>"
)


def as_names(value: Any) -> Any:
    """A name, or a list of names as a tuple.

    Raises:
        ValueError: anything else; of a mapping, which is what others write for weights, it says how
            it is written here.
    """
    if isinstance(value, Mapping):
        names = ",".join(map(str, value))
        weights = ",".join(map(str, value.values()))
        here = f"data.train=[{names}] data.train_weights=[{weights}]"
        raise ValueError(f"weights have a key of their own: {here}")
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError("give a name, or a list of names")
    return tuple(value)


def entries(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """One name, or a list of them, as a list. Example: ``"a.jsonl"`` gives ``("a.jsonl",)``."""
    return (value,) if isinstance(value, str) else value


def is_file_name(entry: str) -> bool:
    """Whether ``entry`` names files, rather than a data set or generated tasks."""
    return not entry.startswith((GENERATED, HF))


def matching_files(entry: str) -> list[Path]:
    """The files a name stands for, sorted: itself, or those that it matches as a pattern.

    A file of just that name comes before a pattern (``*``, ``?``, ``[...]``, ``**``), so that a
    name with brackets can be given. Empty: there is none.
    """
    if Path(entry).is_file():
        return [Path(entry)]
    if not glob.has_magic(entry):
        return []
    # Sorted as texts: the order of the files is that of their rows, and must not depend on a disk.
    return [Path(name) for name in sorted(glob.glob(entry, recursive=True)) if Path(name).is_file()]


def data_problems(key: str, value: str | tuple[str, ...]) -> Iterator[str]:
    """One message (key, value, remedy) for each name without a file, or that comes twice."""
    names = entries(value)
    if not names:
        yield f"{key} = []: names nothing; {KINDS}"
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield (
            f"{key}: names {name} twice; name each source once, and give it a larger weight by "
            "data.train_weights"
        )
    for name in filter(is_file_name, dict.fromkeys(names)):
        if matching_files(name):
            continue
        if Path(name).is_dir():
            pattern = f"{name.rstrip('/')}/*.jsonl"
            yield (
                f"{key} = {name}: is a folder; give its files as a pattern, {key}='{pattern}', or "
                f"hf:{name}:SPLIT"
            )
        elif glob.has_magic(name):
            yield f"{key} = {name}: no file matches the pattern; correct it"
        elif Path(name).exists():
            yield f"{key} = {name}: not a regular file; {KINDS}"
        else:
            yield f"{key} = {name}: no such file; {KINDS}"
