"""Data sets of the `datasets` library: ``hf:NAME[:CONFIG]:SPLIT``."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.data_names import HF
from megatron_rl.data.rows import Rows
from megatron_rl.errors import first_line

# A slice of a split is written as that library writes it: train[:100], train[10%:20%].
_SPEC = re.compile(r"(?P<name>[^:]+)(:(?P<config>[^:\[\]]+))?:(?P<split>[^:\[\]]+(\[[^\]]*\])?)")
# What save_to_disk writes into the folder of several splits, and of one.
_SAVED = ("dataset_dict.json", "state.json")
_INSTALL = "pip install 'megatron_rl[datasets]', or pip install datasets"


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
    match = _SPEC.fullmatch(entry.removeprefix(HF))
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
    hf_set = parse(entry)
    library = _library()
    if hf_set.name.startswith(("/", ".", "~")) and not Path(hf_set.name).is_dir():
        raise ValueError(
            f"{entry}: no such folder {hf_set.name}; give a folder of data files, or a name on "
            "the hub"
        )
    try:
        dataset = _load(library, hf_set)
    except Exception as error:  # the library raises its own, the hub's and Python's
        raise ValueError(
            f"{entry}: the library datasets cannot load it ({type(error).__name__}: "
            f"{first_line(error)}); correct name, configuration and split, or give a local "
            "folder (HF_HUB_OFFLINE=1 looks in the cache alone)"
        ) from error
    # As Arrow, since by its own access the library would decode images and sounds.
    table = dataset.with_format("arrow")[:]
    if not len(table):
        raise ValueError(f"{entry}: the split has no row; give one with at least one")
    return list(enumerate(table.to_pylist(), start=1))


def _load(library: Any, hf_set: HfSet) -> Any:
    folder = Path(hf_set.name)
    if not any((folder / name).is_file() for name in _SAVED):
        return library.load_dataset(hf_set.name, hf_set.config, split=hf_set.split)
    saved = library.load_from_disk(str(folder))
    # A single split may not know its name.
    splits = saved if isinstance(saved, dict) else {str(saved.split or hf_set.split): saved}
    if hf_set.split not in splits:
        raise ValueError(f"there are the splits {', '.join(splits)}, whole as they were saved")
    return splits[hf_set.split]


def _library() -> Any:
    # Imported on use: it takes seconds, and a run on files does without.
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"hf:... needs the package datasets; {_INSTALL}") from error
    datasets.disable_progress_bars()
    return datasets
