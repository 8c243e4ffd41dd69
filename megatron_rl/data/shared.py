"""The data of a launch, read and tokenized by one rank of each machine and shared by the others."""

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.schema import Config
from megatron_rl.data import prompt_file
from megatron_rl.data.loader import fingerprint
from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.prompt_file import StoredPrompts
from megatron_rl.data.prompts import PromptSource
from megatron_rl.data.reading import (
    Data,
    Doubt,
    all_prompts,
    examined,
    log,
    read_data,
    read_sources,
)
from megatron_rl.errors import first_line
from megatron_rl.runtime.launch import World

logger = logging.getLogger(__name__)


def shared_data(
    config: Config,
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionProcessor | None = None,
) -> Data:
    """Collective: what ``read_data`` gives, and logs.

    The file is in the machine's temporary folder until all ranks have mapped it.

    Raises:
        ValueError: as ``read_data``, on every rank.
    """
    if world.size == 1:
        return read_data(config, tokenizer, vision)

    def read() -> tuple[Path, Data, list[Doubt]] | None:
        if world.local_rank != 0:
            return None
        try:
            data = read_sources(config, tokenizer, vision)
            path, stored = save(data)
            return path, stored, examined(data, config)
        except OSError as error:
            logger.warning(
                "prompts are not shared by the ranks of a machine: %s", first_line(error)
            )
            return None

    # Ranks of a machine follow each other: of the ranks 8 to 15 of the second one the first is 8.
    own = world.on_all_ranks(read)[world.rank - world.local_rank]
    if own is not None:
        prompt_file.mapped(own[0])
    world.barrier()
    if own is None:
        return read_data(config, tokenizer, vision)
    path, data, doubts = own
    if world.local_rank == 0:
        path.unlink()
    log(data, doubts, config)
    return data


def save(data: Data) -> tuple[Path, Data]:
    """Writes a file that this user alone can read; the data with their prompts there.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, name = tempfile.mkstemp(prefix="megatron_rl_prompts_")
    os.close(descriptor)
    path = Path(name)
    try:
        prompt_file.write(path, [*data.train_prompts, *all_prompts(data.held_out)])
    except BaseException:
        path.unlink()
        raise
    stored: list[PromptSource] = []
    start = 0
    for source in (*data.train, *data.held_out):
        stop = start + len(source.prompts)
        rows = StoredPrompts(path, start, stop, fingerprint(source.prompts))
        stored.append(replace(source, prompts=rows))
        start = stop
    num_train = len(data.train)
    # Sources follow each other in the file, those of the training first.
    whole = StoredPrompts(path, 0, len(data.train_prompts), fingerprint(data.train_prompts))
    return path, Data(tuple(stored[:num_train]), tuple(stored[num_train:]), whole)
