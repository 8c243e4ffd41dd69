"""Which files an entry of ``data.train`` stands for, and the names by which rows are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.data_names import GENERATED, HF, KINDS, is_file_name, matching_files
from megatron_rl.data import hf_sets


def parts_of(name: str) -> list[str]:
    """The files an entry matches, sorted; itself where it names a data set or generated tasks.

    Raises:
        ValueError: a pattern that matches nothing. A file that is missing is reported when it is
        read.
    """
    if not is_file_name(name):
        return [name]
    files = [str(path) for path in matching_files(name)]
    if not files and any(character in name for character in "*?["):
        raise ValueError(f"{name}: no file matches the pattern; {KINDS}")
    return files or [name]


def labels(parts: Sequence[str]) -> dict[str, str]:
    """A short name for each part, different from all others.

    It is the file's stem, else its name with as many folders as are needed.

    Example: ``a/train.jsonl`` and ``b/train.jsonl`` are named so; ``a/train.jsonl`` alone is
    ``train``.

    Raises:
        ValueError: one file comes twice.
    """
    real = Counter(str(Path(part).resolve()) if is_file_name(part) else part for part in parts)
    twice = [part for part, count in real.items() if count > 1]
    if twice:
        raise ValueError(
            f"{twice[0]}: comes twice among the sources; name each file once (data.train_weights "
            "gives it more weight)"
        )
    chosen = {part: _label(part, 1) for part in parts}
    deepest = max((len(Path(part).parts) for part in parts), default=1)
    for depth in range(2, deepest + 2):  # 2: the name with its suffix
        counts = Counter(chosen.values())
        chosen = {
            part: label if counts[label] == 1 else _label(part, depth)
            for part, label in chosen.items()
        }
    # Still alike: two lists of generated tasks, two data sets of one name.
    counts = Counter(chosen.values())
    seen: Counter[str] = Counter()
    for part, label in chosen.items():
        seen[label] += 1
        if counts[label] > 1:
            chosen[part] = f"{label}#{seen[label]}"
    return chosen


def _label(part: str, depth: int) -> str:
    if part.startswith(GENERATED):
        return GENERATED.rstrip(":")
    if part.startswith(HF):
        return hf_sets.parse(part).label
    return Path(part).stem if depth == 1 else "/".join(Path(part).parts[1 - depth :])
