"""Data sets of the `datasets` library: ``hf:NAME[:CONFIG]:SPLIT``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.data_names import HF
from megatron_rl.data.rows import Rows
from megatron_rl.errors import first_line

# A part of a split is written as that library writes it: train[:100], train[10%:20%].
SPEC = re.compile(r"(?P<name>[^:]+)(:(?P<config>[^:\[\]]+))?:(?P<split>[^:\[\]]+(\[[^\]]*\])?)")
SAVED = (
    "dataset_dict.json",
    "state.json",
)  # what save_to_disk leaves in the folder of a set of splits, or of one split
LIBRARY = "pip install 'megatron_rl[datasets]', or pip install datasets"


@dataclass(frozen=True)
class HfSet:
    """Example: ``hf:openai/gsm8k:main:train`` is ``HfSet("openai/gsm8k", "main", "train")``."""

    name: str
    config: str | None
    split: str

    @property
    def label(self) -> str:
        """Begins the uid of every prompt: ``gsm8k/train``."""
        return f"{Path(self.name).name}/{self.split}"

    @property
    def data_source(self) -> str:
        """The name on the hub; of a folder its last part."""
        return Path(self.name).name if Path(self.name).is_dir() else self.name


def parse(entry: str) -> HfSet:
    """Raises ValueError where ``entry`` is not ``hf:NAME:SPLIT`` or ``hf:NAME:CONFIG:SPLIT``."""
    match = SPEC.fullmatch(entry.removeprefix(HF))
    if match is None:
        raise ValueError(
            f"{entry}: write hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT, e.g. hf:openai/gsm8k:main:train"
        )
    return HfSet(match["name"], match["config"], match["split"])


def read_rows(entry: str) -> Rows:
    """(row number from 1, columns) of a data set.

    It is on the hub, in the library's cache, or in a local folder: of data files, or written by
    ``save_to_disk``. Values are plain Python, nothing is decoded (an image stays its bytes).

    Raises:
        ValueError: the library is not installed, it finds no such data set, configuration or split,
        or cannot read it.
    """
    wanted = parse(entry)
    library = _library()
    local = wanted.name.startswith(("/", ".", "~"))
    if local and not Path(wanted.name).is_dir():
        raise ValueError(
            f"{entry}: no such folder {wanted.name}; give a folder of data files, or a name on "
            "the hub"
        )
    try:
        dataset = _load(library, wanted)
    except Exception as error:  # the library raises its own, the hub's and Python's
        raise ValueError(
            f"{entry}: the library datasets cannot load it ({type(error).__name__}: "
            f"{first_line(error)}); correct name, configuration and split, or give a local "
            "folder (HF_HUB_OFFLINE=1 looks in the cache alone)"
        ) from error
    table = dataset.with_format("arrow")[:]
    if not len(table):
        raise ValueError(f"{entry}: the split has no row; give one with at least one")
    return list(enumerate(table.to_pylist(), start=1))


def _load(library: Any, wanted: HfSet) -> Any:
    folder = Path(wanted.name)
    if not any((folder / name).is_file() for name in SAVED):
        return library.load_dataset(wanted.name, wanted.config, split=wanted.split)
    saved = library.load_from_disk(str(folder))
    splits = saved if isinstance(saved, dict) else {str(saved.split or wanted.split): saved}
    if wanted.split not in splits:
        raise ValueError(f"there are the splits {', '.join(splits)}, whole as they were saved")
    return splits[wanted.split]


def _library() -> Any:
    # Imported on use: it takes seconds, and a run on files does without.
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"hf:... needs the package datasets; {LIBRARY}") from error
    datasets.disable_progress_bars()
    return datasets
