"""What each step of ``source.schedule=free`` was trained on, for tools/replay_step.py.

Which weights sampled which token of a free run follows from timing, so the steps of a run cannot be
sampled again: they are recorded. ``run_dir/record/step_NNNNNN.safetensors``, written by rank 0 when
a step has its groups, before it is trained:

- of each token its id, the sampler's logprob, and as spans the version of the weights that sampled
  it;
- of each response its length, whether it is truncated, its group, reward and verdict;
- of each group its prompt (uid) and its number in the stream;
- in the header the settings and the processes that the step is trained with.

It takes 8 bytes a token and about 100 a response. ``source.record_gib`` bounds the folder: the
oldest steps go.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from megatron_rl.checkpoints.directory import PARTIAL
from megatron_rl.config.schema import Config
from megatron_rl.rollouts.rows.experience import Experience, Responses
from megatron_rl.rollouts.store import saved_score
from megatron_rl.runtime import disk

FOLDER = "record"
SUFFIX = ".safetensors"
FORMAT = 2
TOKENS = ("token_ids", "sampler_logprobs")
ROWS = ("lengths", "truncated", "weight_versions", "group_ids")
# Fields of an experience before it is scored, beside its responses.
_REST = (
    *("discarded_groups", "sampling_rounds", "discarded_tokens", "dropped_tokens"),
    *("excluded_tokens", "excluded_share", "hook_metrics", "source_metrics"),
)
logger = logging.getLogger(__name__)


class StepRecord:
    """Writes the record, on rank 0; ``tools/replay`` reads it. Example:
    ``StepRecord(config, world.size).write(7, experience, [48, 49])``."""

    def __init__(self, config: Config, world_size: int) -> None:
        self._folder = Path(config.run_dir) / FOLDER
        self._max_bytes = int(config.source.record_gib * 2**30)
        self._header = {
            "format": FORMAT,
            "values": config.model_dump(mode="json"),
            "world_size": world_size,
        }
        self._has_begun = False

    def write(self, step: int, experience: Experience, groups: Sequence[int]) -> None:
        """``experience``: with the tokens of all rows. ``groups``: their numbers in the stream of
        prompts.

        Raises:
            ValueError: no space left.
        """
        if not self._has_begun:
            self._begin(step)
        responses = experience.responses
        _, firsts = np.unique(responses.group_ids, return_index=True)
        header = self._header | {
            "step": step,
            "groups": list(groups),
            "uids": [responses.prompts[first].uid for first in firsts],
            "scores": [saved_score(score) for score in responses.scores],
            "rest": {name: getattr(experience, name) for name in _REST},
        }
        path = record_path(self._folder, step)
        partial = path.with_name(path.name + PARTIAL)
        tensors = _tensors(responses)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with disk.room_for(self._folder, size, "the record of a step"):
            save_file(tensors, partial, {"facts": json.dumps(header)})
            partial.replace(path)
        self._drop_oldest(step)

    def _begin(self, step: int) -> None:
        self._has_begun = True
        self._folder.mkdir(exist_ok=True)
        logger.info(
            "steps are recorded in %s, at most %s (source.record_gib), for tools/replay_step.py",
            self._folder,
            disk.as_text(self._max_bytes),
        )
        repeated = [other for other in recorded_steps(self._folder) if other >= step]
        for other in repeated:
            record_path(self._folder, other).unlink()
        if repeated:
            message = "the record of steps %d to %d was removed: they are repeated"
            logger.info(message, repeated[0], repeated[-1])

    def _drop_oldest(self, step: int) -> None:
        """Removes old steps down to the limit; ``step``, just written, stays."""
        paths = [record_path(self._folder, other) for other in recorded_steps(self._folder)]
        total = sum(path.stat().st_size for path in paths)
        for path in paths:
            if total <= self._max_bytes or path == record_path(self._folder, step):
                break
            total -= path.stat().st_size
            path.unlink()


def _tensors(responses: Responses) -> dict[str, torch.Tensor]:
    tokens = responses.tokens.take(range(len(responses)))
    versions = tokens.columns["weight_versions"]
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    values = {name: tokens.columns[name] for name in TOKENS}
    values |= {name: getattr(responses, name) for name in ROWS}
    values |= {"span_starts": starts, "span_versions": versions[starts]}
    return {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in values.items()}


def record_path(folder: Path, step: int) -> Path:
    """The file of a step in ``run_dir/record``."""
    return folder / f"step_{step:06d}{SUFFIX}"


def recorded_steps(folder: Path) -> list[int]:
    """The recorded steps in ascending order; empty without the folder."""
    names = [path.name.removesuffix(SUFFIX) for path in folder.glob(f"step_*{SUFFIX}")]
    return sorted(int(name.removeprefix("step_")) for name in names)
