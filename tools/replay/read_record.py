"""A step as a free run has recorded it (``megatron_rl/rollouts/step_record.py``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from megatron_rl.data.token_rows import TokenRows
from megatron_rl.rollouts.rows.experience import Experience, Responses, experience_of
from megatron_rl.rollouts.rows.partials import response_sums
from megatron_rl.rollouts.step_record import FORMAT, ROWS, TOKENS, record_path
from megatron_rl.types import APPENDED, Prompt, Score


@dataclass(frozen=True)
class Recorded:
    """A step as it was recorded. ``values``: the configuration that it is trained with;
    ``groups``: the numbers in the stream of those that were taken; ``uids``: of each group."""

    step: int
    values: Mapping[str, Any]
    world_size: int
    groups: Sequence[int]
    uids: Sequence[str]
    tensors: Mapping[str, np.ndarray]
    scores: Sequence[Mapping[str, Any]]
    rest: Mapping[str, Any]

    def experience(self, prompt_of: Callable[[str], Prompt], *, is_main: bool) -> Experience:
        """As the source gave it: equal on all ranks but for the tokens, which lie on rank 0.
        ``prompt_of``: by uid."""
        prompts = [prompt_of(uid) for uid in self.uids]
        lengths = self.tensors["lengths"]
        columns = {name: self.tensors[name] for name in TOKENS}
        columns["weight_versions"] = self.token_versions
        if (sampled := self.token_versions != APPENDED).all():
            num_appended = None
        else:
            columns["sampled"] = sampled
            num_appended = lengths - response_sums(sampled, lengths).astype(np.int64)
        tokens = TokenRows(np.arange(len(lengths)), lengths, columns)
        responses = Responses(
            prompts=[prompts[group] for group in self.tensors["group_ids"]],
            **{name: self.tensors[name] for name in ROWS},
            scores=[Score(**score) for score in self.scores],
            tokens=tokens if is_main else tokens.take([]),
            holders=np.zeros(len(lengths), dtype=np.int64),
            num_appended=num_appended,
        )
        return replace(experience_of(responses), **self.rest)

    @property
    def token_versions(self) -> np.ndarray:
        """int32 [tokens], of one response after the other."""
        starts = self.tensors["span_starts"]
        lengths = np.diff(starts, append=self.tensors["lengths"].sum())
        return np.repeat(self.tensors["span_versions"], lengths)


def read_step(folder: Path, step: int) -> Recorded:
    """The inverse of ``StepRecord.write``.

    Raises:
        ValueError: there is no such record, or it cannot be read.
    """
    path = record_path(folder, step)
    if not path.is_file():
        raise ValueError(f"{path}: there is no record of step {step}")
    try:
        with safe_open(path, "np") as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is damaged ({error}); replay a step before it") from error
    if facts["format"] != FORMAT:
        raise ValueError(
            f"{path}: has format {facts['format']}, this program reads {FORMAT}; replay it with"
            " the program that wrote it"
        )
    del facts["format"]
    return Recorded(tensors=tensors, **facts)
