"""The responses of an evaluation on the disk: one parquet file a step, whole or not there.

While a step is at work its portions lie in ``step_000020.parts``, each of them whole, so that a
start after a kill asks only what is missing. The last portion makes them one file.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.checkpoints.directory import PARTIAL, step_of, step_path, to_disk
from megatron_rl.errors import concerning
from megatron_rl.reporting.evaluation import Judged
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
    ]
)
_WEIGHTS = b"weights"
_JUDGED = ["uid", "data_source", "correct", "reward", "tokens", "truncated", "extracted"]
_SUFFIX = ".parquet"

AnswerRow = Mapping[str, Any]  # a value for each column of SCHEMA


class AnswerFile:
    """The responses of one step. ``weights``: a fingerprint of what answers, kept in the file."""

    def __init__(self, folder: Path, step: int, weights: str) -> None:
        self.path = step_path(folder, step).with_suffix(_SUFFIX)
        self._step = step
        self._weights = weights
        self._parts = self.path.with_suffix(".parts")
        self._schema = SCHEMA.with_metadata({_WEIGHTS: weights})

    def check(self) -> None:
        """Raises ValueError where responses of other weights are there, or a file is damaged."""
        for path in self._files():
            found = (_opened(path).schema_arrow.metadata or {}).get(_WEIGHTS, b"").decode()
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
        columns = (_opened(path).read(["uid"]).column("uid") for path in self._files())
        return {uid for column in columns for uid in column.unique().to_pylist()}

    def add(self, slices: Iterable[Sequence[AnswerRow]]) -> None:
        """Adds whole prompts, as one portion; every slice is on its way to the disk before the next
        is asked for."""
        self._parts.mkdir(parents=True, exist_ok=True)
        number = len(list(self._parts.glob(f"*{_SUFFIX}")))
        tables = (pa.Table.from_pylist(list(rows), self._schema) for rows in slices)
        self._write(self._parts / f"{number:06d}{_SUFFIX}", tables)

    def finish(self) -> None:
        """Makes one file of the portions."""
        if not self.is_whole:
            batches = itertools.chain.from_iterable(
                _opened(path).iter_batches() for path in self._files()
            )
            tables = (pa.Table.from_batches([batch], self._schema) for batch in batches)
            self._write(self.path, tables)
        shutil.rmtree(self._parts, ignore_errors=True)

    def judged(self) -> Judged:
        """What the metrics are made of; no texts are read but extracted answers."""
        read = _opened(self.path).read(_JUDGED)
        values = {name: read.column(name).to_pylist() for name in _JUDGED}
        numbers = {uid: number for number, uid in enumerate(dict.fromkeys(values["uid"]))}
        return Judged(
            group_ids=np.array([numbers[uid] for uid in values["uid"]], dtype=np.int64),
            data_sources=values["data_source"],
            correct=np.array(values["correct"], dtype=bool),
            rewards=np.array(values["reward"], dtype=np.float64),
            lengths=np.array(values["tokens"], dtype=np.int64),
            truncated=np.array(values["truncated"], dtype=bool),
            extracted=values["extracted"],
        )

    def _files(self) -> list[Path]:
        """The file of the step, or its portions in their order."""
        return [self.path] if self.is_whole else sorted(self._parts.glob(f"*{_SUFFIX}"))

    def _write(self, path: Path, tables: Iterator[pa.Table]) -> None:
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
    found = {}
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        step = step_of(path.with_suffix(""))
        if step is not None:
            found[step] = (_opened(path).schema_arrow.metadata or {}).get(_WEIGHTS, b"").decode()
    return dict(sorted(found.items()))


def _opened(path: Path) -> pq.ParquetFile:
    """Raises ValueError where it cannot be read."""
    with concerning(
        str(path), "delete it: its prompts are asked again", (pa.ArrowInvalid, OSError)
    ):
        return pq.ParquetFile(path)
