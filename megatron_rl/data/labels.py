"""The files an entry of ``data.train`` stands for, and the labels in the uids of their rows."""

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
    """A short label for each file, data set or generator, different from all others: a file's stem,
    its path where another file has that stem, and a number where that is not enough.

    Example: ``a/train.jsonl`` and ``b/train.jsonl`` are labeled so; the first alone is ``train``.

    Raises:
        ValueError: a file is given twice.
    """
    # A file may be given by two paths.
    resolved = Counter(str(Path(name).resolve()) if is_file_name(name) else name for name in names)
    repeated = [name for name, count in resolved.items() if count > 1]
    if repeated:
        raise ValueError(
            f"{repeated[0]}: comes twice among the sources; name each file once"
            " (data.train_weights gives it more weight)"
        )
    short = {name: _label(name) for name in names}
    counts = Counter(short.values())
    numbers: Counter[str] = Counter()
    chosen = {}
    for name, label in short.items():
        if counts[label] > 1 and is_file_name(name):
            label = name
        elif counts[label] > 1:
            # No folders tell two lists of generated tasks, or data sets of one name, apart.
            numbers[label] += 1
            label = f"{label}#{numbers[label]}"
        chosen[name] = label
    return chosen


def _label(name: str) -> str:
    if name.startswith(GENERATED):
        return GENERATED.rstrip(":")
    return hf_sets.parse(name).label if name.startswith(HF) else Path(name).stem
