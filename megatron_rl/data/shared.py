"""The data of a launch, read and tokenized by one rank of each machine and shared by the others.

That rank writes a file into the machine's temporary folder, all ranks map it into memory, and its
name is removed: pages are shared, and no other launch finds it.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.schema import Config
from megatron_rl.data import prompt_file
from megatron_rl.data.loader import fingerprint
from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.prompt_file import StoredPrompts
from megatron_rl.data.prompts import PromptSource
from megatron_rl.data.reading import Data, Doubt, examined, log, read_data, read_sources
from megatron_rl.errors import first_line
from megatron_rl.runtime.launch import World
from megatron_rl.types import Prompt

logger = logging.getLogger(__name__)


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
    if world.size == 1:
        return read_data(config, tokenizer, vision)
    path = _made_by_first(world, lambda: _file(config, tokenizer, vision))
    stored = None if path is None else load(path)
    world.barrier()  # now all ranks have mapped it, and nobody else ever will
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
    # continued alone would wait in the next collective.
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
    config: Config, tokenizer: PreTrainedTokenizerBase, vision: VisionProcessor | None
) -> Path | None:
    """A new file of these data, readable by this user alone; None where none can be written."""
    data = read_sources(config, tokenizer, vision)
    doubts = examined(data, config)
    path = None
    try:
        handle, name = tempfile.mkstemp(".arrow", "megatron_rl_prompts_")
        os.close(handle)
        path = Path(name)
        save(path, data, doubts)
    except (OSError, ValueError) as error:
        logger.warning("prompts are not shared by the ranks of a machine: %s", first_line(error))
        if path is not None:
            path.unlink(missing_ok=True)
        return None
    return path


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
    """What ``save`` wrote."""
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
