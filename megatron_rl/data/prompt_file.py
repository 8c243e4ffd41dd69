"""Tokenized prompts in a file that processes map into memory: one writes it, all of a machine share
its pages, and a prompt becomes a Python object when it is asked for.

The file: the digest of what follows, in 64 bytes; then an Arrow stream of one batch with a row for
each prompt.
"""

from __future__ import annotations

import itertools
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import pyarrow
import xxhash

from megatron_rl.types import Image, Prompt

_HEADER_BYTES = 64  # Arrow aligns its buffers to that
_ABOUT = b"megatron_rl"
_IMAGE = pyarrow.struct(
    [
        ("digest", pyarrow.large_string()),
        ("width", pyarrow.int64()),
        ("height", pyarrow.int64()),
        ("path", pyarrow.large_string()),  # null where there is a content
        ("content", pyarrow.large_binary()),
    ]
)
_SCHEMA = pyarrow.schema(
    [
        ("uid", pyarrow.large_string()),
        ("token_ids", pyarrow.large_list(pyarrow.int32())),
        ("answer", pyarrow.large_string()),
        ("data_source", pyarrow.large_string()),
        ("extra", pyarrow.large_string()),  # JSON
        ("text", pyarrow.large_string()),
        ("images", pyarrow.large_list(_IMAGE)),
    ]
)


class StoredPrompts(Sequence[Prompt]):
    """Rows ``start`` to ``stop`` of a file."""

    def __init__(
        self, batch: pyarrow.RecordBatch, start: int, stop: int, fingerprints: Mapping[str, str]
    ) -> None:
        """``fingerprints``: of ranges of rows, by ``START:STOP``."""
        self._batch = batch
        self._start = start
        self._stop = stop
        self._fingerprints = fingerprints

    @property
    def fingerprint(self) -> str | None:
        """The result of ``loader.fingerprint`` for these prompts, where the writer stored it."""
        return self._fingerprints.get(f"{self._start}:{self._stop}")

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        # A range knows negative places, steps and ends: of rows 10 to 19 [-1] is 19, [2:4] is the
        # range of 12 and 13.
        rows = range(self._start, self._stop)[index]
        if isinstance(rows, range):
            return [self._prompt(row) for row in rows]
        return self._prompt(rows)

    def _prompt(self, row: int) -> Prompt:
        uid, token_ids, answer, data_source, extra, text, images = (
            column[row] for column in self._batch.columns
        )
        return Prompt(
            uid=uid.as_py(),
            token_ids=tuple(token_ids.values.to_numpy().tolist()),
            answer=answer.as_py(),
            data_source=data_source.as_py(),
            extra=json.loads(extra.as_py()),
            text=text.as_py(),
            images=tuple(map(_image, images)),
        )

    def joined(self, other: StoredPrompts) -> StoredPrompts | None:
        """Both, where ``other`` follows in the same file."""
        if other._batch is not self._batch or other._start != self._stop:
            return None
        return StoredPrompts(self._batch, self._start, other._stop, self._fingerprints)


def join(parts: Sequence[Sequence[Prompt]]) -> Sequence[Prompt]:
    """All prompts of all parts: of neighbors in one file without reading them."""
    whole = parts[0] if parts else ()
    for part in parts[1:]:
        both = None
        if isinstance(whole, StoredPrompts) and isinstance(part, StoredPrompts):
            both = whole.joined(part)
        if both is None:
            return list(itertools.chain.from_iterable(parts))
        whole = both
    return whole


def write(path: Path, prompts: Sequence[Prompt], about: Mapping[str, Any]) -> None:
    """Makes the file, whole or not at all; of several writers the last one stays.

    Raises:
        ValueError: a prompt has extra columns that JSON does not give back.
        OSError: the file cannot be written.
    """
    batch = _batch(prompts)
    schema = _SCHEMA.with_metadata({_ABOUT: json.dumps(about)})
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("w+b") as file:
            file.write(bytes(_HEADER_BYTES))
            with pyarrow.ipc.new_stream(file, schema) as stream:
                stream.write_batch(batch.replace_schema_metadata(schema.metadata))
            # What Python still holds must be in the file before its content is mapped and digested.
            file.flush()
            os.pwrite(file.fileno(), _digest(draft), 0)
        # Nothing is forced to the disk: after a power cut the digest tells, and it is made anew.
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _batch(prompts: Sequence[Prompt]) -> pyarrow.RecordBatch:
    extras = []
    for prompt in prompts:
        # What comes out of the file must be what went in: JSON makes lists of tuples, and texts of
        # keys that are numbers.
        extra = json.dumps(prompt.extra) if isinstance(prompt.extra, dict) else ""
        if not extra or json.loads(extra) != prompt.extra:
            raise ValueError(f"prompt {prompt.uid} has an extra that is not JSON")
        extras.append(extra)
    columns = [
        [prompt.uid for prompt in prompts],
        [prompt.token_ids for prompt in prompts],
        [prompt.answer for prompt in prompts],
        [prompt.data_source for prompt in prompts],
        extras,
        [prompt.text for prompt in prompts],
        [[_row(image) for image in prompt.images] for prompt in prompts],
    ]
    arrays = []
    for values, field in zip(columns, _SCHEMA, strict=True):
        arrays.append(pyarrow.array(values, field.type))
    return pyarrow.record_batch(arrays, schema=_SCHEMA)


def _row(image: Image) -> dict[str, Any]:
    row: dict[str, Any] = {
        "digest": image.digest,
        "width": image.width,
        "height": image.height,
    }
    if isinstance(image.source, Path):
        return {**row, "path": str(image.source)}
    return {**row, "content": image.source}


def _image(stored: pyarrow.StructScalar) -> Image:
    """The inverse of ``_row``. A content is not copied: it stays in the mapped file, and goes to
    other processes as bytes."""
    path = stored["path"].as_py()
    source = stored["content"].as_buffer() if path is None else Path(path)
    width, height = (stored[name].as_py() for name in ("width", "height"))
    return Image(stored["digest"].as_py(), width, height, source)


def _digest(path: Path) -> bytes:
    """The header of the file: the digest of all that follows it."""
    with pyarrow.memory_map(str(path)) as file:
        content = memoryview(file.read_buffer())[_HEADER_BYTES:]
        return xxhash.xxh3_128(content).hexdigest().encode().ljust(_HEADER_BYTES)


def is_whole(path: Path) -> bool:
    """Whether the file is there and as it was written."""
    try:
        with path.open("rb") as file:
            return file.read(_HEADER_BYTES) == _digest(path)
    except (OSError, ValueError):
        return False


def read(path: Path) -> tuple[pyarrow.RecordBatch, dict[str, Any]]:
    """The rows, mapped, and what was written about them."""
    # Not closed: the rows point into the mapping, and hold it as long as they are used.
    content = pyarrow.memory_map(str(path)).read_buffer()
    with pyarrow.ipc.open_stream(content.slice(_HEADER_BYTES)) as stream:
        batch = stream.read_next_batch()
        return batch, json.loads(stream.schema.metadata[_ABOUT])
