"""The files an entry of ``data.train`` stands for, and the labels in the uids of their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.data_names import GENERATED, HF, KINDS, is_file_name, matching_files
from megatron_rl.data import hf_sets


def files_of(name: str) -> list[str]:
    """The files an entry matches, sorted; the entry itself where it is a data set or a generator.

    Raises:
        ValueError: a pattern that matches nothing. A missing file is reported when it is read.
    """
    if not is_file_name(name):
        return [name]
    files = [str(path) for path in matching_files(name)]
    if not files and any(character in name for character in "*?["):
        raise ValueError(f"{name}: no file matches the pattern; {KINDS}")
    return files or [name]


def labels(names: Sequence[str]) -> dict[str, str]:
    """A short label for each file, data set or generator, different from all others.

    It is the file's stem, else its name with as many folders as are needed.

    Example: ``a/train.jsonl`` and ``b/train.jsonl`` are labeled so; ``a/train.jsonl`` alone is
    ``train``.

    Raises:
        ValueError: a file is given twice.
    """
    # A file may be given by two paths.
    resolved: Counter[str] = Counter()
    for name in names:
        resolved[str(Path(name).resolve()) if is_file_name(name) else name] += 1
    repeated = [name for name, count in resolved.items() if count > 1]
    if repeated:
        raise ValueError(
            f"{repeated[0]}: comes twice among the sources; name each file once"
            " (data.train_weights gives it more weight)"
        )
    # Labels that are not the only ones of their kind grow by a component until they are, at most to
    # the whole path: train -> train.jsonl -> a/train.jsonl.
    chosen = {name: _label(name, 1) for name in names}
    deepest = max((len(Path(name).parts) for name in names), default=1)
    for depth in range(2, deepest + 2):
        counts = Counter(chosen.values())
        for name, label in chosen.items():
            if counts[label] > 1:
                chosen[name] = _label(name, depth)
    # Two lists of generated tasks, or two data sets of one name, have no folders to tell them
    # apart.
    counts = Counter(chosen.values())
    numbers: Counter[str] = Counter()
    for name, label in chosen.items():
        numbers[label] += 1
        if counts[label] > 1:
            chosen[name] = f"{label}#{numbers[label]}"
    return chosen


def _label(name: str, depth: int) -> str:
    """``depth``: 1 for a file's stem, 2 for its name, 3 for that with its folder, and so on."""
    if name.startswith(GENERATED):
        return GENERATED.rstrip(":")
    if name.startswith(HF):
        return hf_sets.parse(name).label
    if depth == 1:
        return Path(name).stem
    num_components = depth - 1
    return "/".join(Path(name).parts[-num_components:])
