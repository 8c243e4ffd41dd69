"""The responses of an evaluation on the disk: one parquet file a step, whole or not there.

While a step is at work its portions lie in ``step_000020.parts``, each of them whole, so that a
start after a kill asks only what is missing. The last portion makes them one file.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.checkpoints.directory import PARTIAL, step_of, step_path, to_disk
from megatron_rl.errors import concerning
from megatron_rl.reporting.evaluation import ScoredResponses
from megatron_rl.runtime import disk

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("uid", pa.string()),  # of the prompt
        ("data_source", pa.string()),
        ("prompt", pa.string()),  # as the model reads it
        ("answer", pa.string()),  # the expected one
        ("number", pa.int64()),  # of the response, from 0 on
        ("response", pa.string()),
        ("extracted", pa.string()),
        ("correct", pa.bool_()),
        ("reward", pa.float64()),
        ("tokens", pa.int64()),
        ("truncated", pa.bool_()),
        ("problem", pa.string()),  # why there is no verdict; null: there is one
        ("categories", pa.list_(pa.string())),  # of the prompt
    ]
)
_WEIGHTS = b"weights"
_TEXTS = ("prompt", "answer", "response")
_SCORED = [name for name in SCHEMA.names if name not in (*_TEXTS, "step", "number")]
_SUFFIX = ".parquet"

AnswerRow = Mapping[str, Any]  # a value for each column of SCHEMA


class AnswerFile:
    """The file of the responses of one step.

    Attributes:
        weights: a fingerprint of the weights that answer, kept in the file.
    """

    def __init__(self, folder: Path, step: int, weights: str) -> None:
        self.path = step_path(folder, step).with_suffix(_SUFFIX)
        self._step = step
        self._weights = weights
        self._parts = self.path.with_suffix(".parts")
        self._schema = SCHEMA.with_metadata({_WEIGHTS: weights})

    def check(self) -> None:
        """Raises ValueError where responses of other weights are there, or a file is damaged."""
        for path in self._files():
            found = _weights_of(path)
            if found != self._weights:
                raise ValueError(
                    f"{path}: has the answers of other weights of step {self._step}"
                    f" ({found}, here {self._weights}); give another --out, or delete it"
                )

    @property
    def is_whole(self) -> bool:
        return self.path.is_file()

    def answered(self) -> set[str]:
        """The uids of the prompts whose responses are there."""
        columns = [_opened(path).read(["uid"]).column("uid") for path in self._files()]
        return {uid for column in columns for uid in column.unique().to_pylist()}

    def add(self, slices: Iterable[Sequence[AnswerRow]]) -> None:
        """Adds whole prompts as one portion; a slice is written before the next is asked for."""
        self._parts.mkdir(parents=True, exist_ok=True)
        # Above the highest number, not the count: after a damaged portion has been deleted, as its
        # message asks for, the count is the number of a portion that is still there.
        stems = [path.stem for path in self._parts.glob(f"*{_SUFFIX}")]
        number = max((int(stem) for stem in stems if stem.isdecimal()), default=-1) + 1
        tables = (pa.Table.from_pylist(list(rows), self._schema) for rows in slices)
        self._write(self._parts / f"{number:06d}{_SUFFIX}", tables)

    def finish(self) -> None:
        """Makes one file of the portions."""
        # A kill between the two lines below leaves portions next to a whole file. Nothing reads
        # them then, and the next call removes them.
        if not self.is_whole:
            # A batch at a time: a whole step may not fit the memory.
            batches = chain.from_iterable(_opened(path).iter_batches() for path in self._files())
            tables = (pa.Table.from_batches([batch], self._schema) for batch in batches)
            self._write(self.path, tables)
        shutil.rmtree(self._parts, ignore_errors=True)

    def scored(self) -> ScoredResponses:
        """The columns that metrics are computed from; extracted answers are the only texts."""
        table = _opened(self.path).read(_SCORED)
        values = table.to_pydict()
        # Prompts are numbered as they come: uids b, b, a, a give group_ids 0, 0, 1, 1.
        numbers: dict[str, int] = {}
        for uid in values["uid"]:
            numbers.setdefault(uid, len(numbers))
        return ScoredResponses(
            group_ids=np.array([numbers[uid] for uid in values["uid"]], dtype=np.int64),
            data_sources=values["data_source"],
            correct=np.array(values["correct"], dtype=bool),
            rewards=np.array(values["reward"], dtype=np.float64),
            lengths=np.array(values["tokens"], dtype=np.int64),
            truncated=np.array(values["truncated"], dtype=bool),
            extracted=values["extracted"],
            has_verdict=np.array([problem is None for problem in values["problem"]], dtype=bool),
            # An older file has no such column.
            categories=values.get("categories") or [()] * table.num_rows,
        )

    def _files(self) -> list[Path]:
        """The file of the step, or its portions in their order."""
        return [self.path] if self.is_whole else sorted(self._parts.glob(f"*{_SUFFIX}"))

    def _write(self, path: Path, tables: Iterator[pa.Table]) -> None:
        """Whole or not at all, also after a power cut: the bytes reach the disk before the name
        that promises them, and the folder entry is forced there last."""
        partial = path.with_name(path.name + PARTIAL)
        with disk.room_for(path.parent, 0, "responses"):
            with pq.ParquetWriter(partial, self._schema) as writer:
                for table in tables:
                    writer.write_table(table)
            to_disk(partial)
            partial.replace(path)
            to_disk(path.parent)


def steps_there(folder: Path) -> dict[int, str]:
    """Steps whose file is whole, ascending, with the fingerprint of what answered."""
    paths = {step_of(path.with_suffix("")): path for path in folder.glob(f"*{_SUFFIX}")}
    # Names sort by step only up to 999999: "step_1000000" comes before "step_999999".
    steps = sorted(step for step in paths if step is not None)
    return {step: _weights_of(paths[step]) for step in steps}


def _weights_of(path: Path) -> str:
    """The fingerprint of what answered; empty where the file names none."""
    metadata = _opened(path).schema_arrow.metadata or {}
    return metadata.get(_WEIGHTS, b"").decode()


def _opened(path: Path) -> pq.ParquetFile:
    """Raises ValueError where it cannot be read."""
    remedy = "delete it: its prompts are asked again"
    with concerning(str(path), remedy, (pa.ArrowInvalid, OSError)):
        return pq.ParquetFile(path)
