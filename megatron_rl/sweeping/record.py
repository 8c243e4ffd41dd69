"""``sweep.json`` in the folder of a sweep: which trials it has, for other programs."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.checkpoints.directory import PARTIAL
from megatron_rl.sweeping.trials import Trial

NAME = "sweep.json"


def write(out: Path, trials: Sequence[Trial], words: Sequence[str]) -> None:
    """Describes the sweep of the newest start.

    ``name``; ``created``, of the first start into this folder; ``command``; ``keys`` that differ;
    ``trials``: ``name`` (its folder), ``label`` (without the seed), ``seed``, ``values`` of the
    keys as they were typed, ``same_as``: the trial that was run for it, or null.

    Raises:
        ValueError: the folder cannot be written, or has a file of this name that is another.
    """
    file = out / NAME
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    keys: dict[str, None] = {}  # a set in the order of the command line
    entries = []
    for trial in trials:
        values = _values(trial)
        keys |= dict.fromkeys(values)
        entry = {
            "name": trial.name,
            "label": trial.label,
            "seed": trial.config.seed,
            "values": values,
            "same_as": trial.same_as,
        }
        entries.append(entry)
    content = {
        "name": sweep_name(out),
        "created": _created(file) or now,
        "command": shlex.join(["python", "-m", "megatron_rl.sweep", *words]),
        "keys": list(keys),
        "trials": entries,
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{NAME}{PARTIAL}")
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise ValueError(
            f"--out {out}: cannot be written ({error.strerror}: {error.filename}); give a folder "
            "to write into"
        ) from None


def sweep_name(out: Path) -> str:
    """The name of a sweep is that of its folder."""
    return out.resolve().name


def _values(trial: Trial) -> dict[str, str]:
    pairs = [text.lstrip("+").partition("=") for text in trial.differing]
    return {key: value for key, _, value in pairs}


def _created(file: Path) -> str | None:
    if not file.is_file():
        return None
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["created"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{file}: is not the file of a sweep; move it away, or give another --out"
        ) from None
