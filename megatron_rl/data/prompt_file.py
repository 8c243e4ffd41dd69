"""Tokenized prompts in an Arrow file that the processes of a machine map into memory.

One writes it, all share its pages, and a prompt becomes a Python object when it is asked for.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import pyarrow

from megatron_rl.types import Image, Prompt

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
        ("extra", pyarrow.large_binary()),  # pickled: whatever a source has there
        ("text", pyarrow.large_string()),
        ("images", pyarrow.large_list(_IMAGE)),
    ]
)


class StoredPrompts(Sequence[Prompt]):
    """Rows ``start`` to ``stop`` of a file, which is mapped when the first one is asked for. As a
    message to another process of the machine they are their place alone."""

    def __init__(
        self, path: Path, start: int, stop: int, fingerprints: Mapping[tuple[int, int], str]
    ) -> None:
        """``fingerprints``: of ranges of rows, by start and stop."""
        self._path = path
        self._start = start
        self._stop = stop
        self._fingerprints = fingerprints

    @property
    def fingerprint(self) -> str | None:
        """The result of ``loader.fingerprint`` for these prompts, where the writer computed it."""
        return self._fingerprints.get((self._start, self._stop))

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
            column[row] for column in mapped(self._path).columns
        )
        return Prompt(
            uid=uid.as_py(),
            token_ids=tuple(token_ids.values.to_numpy().tolist()),
            answer=answer.as_py(),
            data_source=data_source.as_py(),
            extra=pickle.loads(extra.as_buffer()),
            text=text.as_py(),
            images=tuple(map(_image, images)),
        )

    def joined(self, other: StoredPrompts) -> StoredPrompts | None:
        """Both, where ``other`` follows in the same file."""
        if other._path != self._path or other._start != self._stop:
            return None
        return StoredPrompts(self._path, self._start, other._stop, self._fingerprints)


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


def write(path: Path, prompts: Sequence[Prompt]) -> None:
    """Raises OSError where the file cannot be written."""
    columns = [
        [prompt.uid for prompt in prompts],
        [prompt.token_ids for prompt in prompts],
        [prompt.answer for prompt in prompts],
        [prompt.data_source for prompt in prompts],
        [pickle.dumps(prompt.extra) for prompt in prompts],
        [prompt.text for prompt in prompts],
        [[_row(image) for image in prompt.images] for prompt in prompts],
    ]
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, _SCHEMA) as stream:
        stream.write_batch(pyarrow.record_batch(columns, schema=_SCHEMA))


@functools.cache
def mapped(path: Path) -> pyarrow.RecordBatch:
    """The rows of a file, which may be removed afterwards."""
    # Not closed: the rows point into the mapping, and hold it as long as they are used.
    with pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)).read_buffer()) as stream:
        return stream.read_next_batch()


def _row(image: Image) -> dict[str, Any]:
    kind = "path" if isinstance(image.source, Path) else "content"
    source = str(image.source) if kind == "path" else image.source
    return {"digest": image.digest, "width": image.width, "height": image.height, kind: source}


def _image(stored: pyarrow.StructScalar) -> Image:
    """The inverse of ``_row``. A content is not copied: it stays in the mapped file, and goes to
    other processes as bytes."""
    path = stored["path"].as_py()
    source = stored["content"].as_buffer() if path is None else Path(path)
    width, height = (stored[name].as_py() for name in ("width", "height"))
    return Image(stored["digest"].as_py(), width, height, source)
