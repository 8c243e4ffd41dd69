"""The data of a launch, read and tokenized by one rank of each machine and shared by the others.

The file lies in the machine's temporary folder under a fingerprint of all it depends on, so the
next start on the machine finds it. One that is damaged is made anew, and several launches may do
that at once.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash
from transformers import PreTrainedTokenizerBase

from megatron_rl.checkpoints.hf import COMPANIONS
from megatron_rl.config.data_names import HF, entries, is_file_name
from megatron_rl.config.schema import Config
from megatron_rl.data import prompt_file
from megatron_rl.data.labels import files_of
from megatron_rl.data.loader import fingerprint
from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.prompt_file import StoredPrompts
from megatron_rl.data.prompts import PromptSource
from megatron_rl.data.reading import Data, Doubt, examined, log, read_data, read_sources
from megatron_rl.errors import first_line
from megatron_rl.runtime.digest import file_digest
from megatron_rl.runtime.launch import World
from megatron_rl.types import Prompt

logger = logging.getLogger(__name__)

KEPT = 8  # files
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "pyarrow", "reasoning_gym")


def shared_data(
    config: Config,
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionProcessor | None = None,
) -> Data:
    """Collective: what ``read_data`` gives, and logs.

    Raises:
        ValueError: as ``read_data``, on every rank.
    """

    def read() -> tuple[Data, list[Doubt]]:
        data = read_sources(config, tokenizer, vision)
        return data, examined(data, config)

    if world.size == 1:
        return read_data(config, tokenizer, vision)
    has_images = vision is not None
    path = _made_by_first(
        world, lambda: _file(config, world.launch_id, read, has_images=has_images)
    )
    stored = None if path is None else load(path)
    if has_images:
        world.barrier()  # now all ranks have mapped it, and no other process ever will
        if path is not None and world.local_rank == 0:
            path.unlink(missing_ok=True)
    if stored is None:
        return read_data(config, tokenizer, vision)
    data, doubts = stored
    log(data, doubts, config)
    return data


def _made_by_first(world: World, make: Callable[[], Path | None]) -> Path | None:
    """Collective: what ``make`` returns or raises on the first rank of this machine."""
    # An error of the user's is carried to all ranks, of all machines, and raised there: a rank that
    # went on alone would wait in the next collective.
    outcome: tuple[Path | None, ValueError | None] = (None, None)
    if world.local_rank == 0:
        try:
            outcome = (make(), None)
        except ValueError as error:
            outcome = (None, error)
    outcomes = world.all_gather(outcome)
    for _, error in outcomes:
        if error is not None:
            raise error
    # Ranks of a machine follow each other: of the ranks 8 to 15 of the second one the first is 8.
    path, _ = outcomes[world.rank - world.local_rank]
    return path


def _file(
    config: Config,
    launch_id: str,
    read: Callable[[], tuple[Data, list[Doubt]]],
    *,
    has_images: bool = False,
) -> Path | None:
    """The file of these data, written where there is none that is whole; None where none can be."""
    try:
        folder = private_folder()
        path = folder / f"{data_key(config, launch_id, has_images=has_images)}.arrow"
        if prompt_file.is_whole(path):
            path.touch()  # the ones used last are kept
            return path
    except OSError as error:
        logger.warning("prompts are not shared by the ranks of a machine: %s", first_line(error))
        return None
    data, doubts = read()
    try:
        save(path, data, doubts)
        prune(folder)
    except (OSError, ValueError) as error:
        logger.warning("prompts are not shared by the ranks of a machine: %s", first_line(error))
        return None
    return path


def private_folder() -> Path:
    """The folder of these files: of this user alone, as others could put prompts into it.

    Raises:
        OSError: it cannot be made, or belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"megatron_rl_prompts_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077 or folder.is_symlink():
        raise OSError(f"{folder} is open to other users; remove it")
    return folder


def data_key(config: Config, launch_id: str, *, has_images: bool = False) -> str:
    """A fingerprint of all that the prompts depend on: settings, files, tokenizer, libraries, code.

    A data set of a hub is known by name only, and rows name images by their paths, so the key of
    either is that of this launch.
    """
    parts: list[Any] = [config.data.model_dump(mode="json"), config.rollout.max_prompt_tokens]
    parts.append(config.reward.verifier)  # doubts about answers depend on it
    names = [*entries(config.data.train), *entries(config.data.eval)]
    for name in names:
        parts += [[file, _content(file)] for file in files_of(name)]
    if has_images or any(name.startswith(HF) for name in names):
        parts.append(launch_id)
    tokenizer = Path(config.model.path)
    companions: set[Path] = set()
    for pattern in COMPANIONS:
        companions.update(tokenizer.glob(pattern))
    files = [*sorted(companions), *sorted(Path(__file__).parent.rglob("*.py"))]
    parts += [[file.name, file_digest(file)] for file in files]
    parts += list(_versions())
    return xxhash.xxh3_128(json.dumps(parts).encode()).hexdigest()


def _content(name: str) -> str:
    """The digest of a file; "" for other names and for a missing one, reported when it is read."""
    return file_digest(Path(name)) if is_file_name(name) and Path(name).is_file() else ""


def _versions() -> Iterator[str]:
    for name in _LIBRARIES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def save(path: Path, data: Data, doubts: list[Doubt]) -> None:
    """Writes data for ``load``; raises as ``prompt_file.write``."""
    sources = [*data.train, *data.held_out]
    # The ranges of rows that a loader may be built of: all training prompts, and each source alone.
    # With two sources of 3 and one of 2 prompts 0:6 and 0:3, 3:6, 6:8.
    fingerprints = {f"0:{len(data.train_prompts)}": fingerprint(data.train_prompts)}
    described = []
    prompts: list[Prompt] = []
    for source in sources:
        start = len(prompts)
        prompts += source.prompts
        fingerprints[f"{start}:{len(prompts)}"] = fingerprint(source.prompts)
        counts = (len(source.prompts), source.num_rows)
        described.append([source.name, *counts, dict(source.dropped)])
    about: dict[str, Any] = {
        "num_train": len(data.train),
        "sources": described,
        "doubts": doubts,
        "fingerprints": fingerprints,
    }
    prompt_file.write(path, prompts, about)


def load(path: Path) -> tuple[Data, list[Doubt]]:
    """The data that ``save`` wrote."""
    batch, about = prompt_file.read(path)
    sources = []
    start = 0
    for name, count, num_rows, dropped in about["sources"]:
        rows = StoredPrompts(batch, start, start + count, about["fingerprints"])
        sources.append(PromptSource(name, rows, num_rows, dropped))
        start += count
    split = about["num_train"]
    doubts = [(key, text) for key, text in about["doubts"]]  # JSON made lists of the pairs
    return Data(tuple(sources[:split]), tuple(sources[split:])), doubts


def prune(folder: Path) -> None:
    """Keeps the files that were used last; a process that maps one keeps what it maps. Drafts that
    a killed writer left (``*.arrow.*``) count: they are never used again, so they get old."""
    files = sorted(folder.glob("*.arrow*"), key=_last_use)
    for file in files[:-KEPT]:
        file.unlink(missing_ok=True)


def _last_use(file: Path) -> float:
    """Seconds since 1970; 0 for a file that another launch has removed since it was listed."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
