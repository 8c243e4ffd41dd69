"""Tokenized prompts in an Arrow file that the processes of a machine map into memory.

One writes it, all share its pages, and a prompt becomes a Python object when it is asked for.
"""

import functools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

import pyarrow

from megatron_rl.types import Image, Prompt

_SCHEMA = pyarrow.schema(
    [
        ("prompt", pyarrow.large_binary()),  # pickled: whatever a source has in ``extra``
        ("contents", pyarrow.large_list(pyarrow.large_binary())),  # of its images
    ]
)


@dataclass(frozen=True)
class StoredPrompts(Sequence[Prompt]):
    """Rows ``start`` to ``stop`` of a file, which is mapped when the first one is asked for. As a
    message to another process of the machine they are their place alone."""

    path: Path
    start: int
    stop: int
    fingerprint: str  # the result of ``loader.fingerprint`` for these prompts

    def __len__(self) -> int:
        return self.stop - self.start

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        # A range knows negative places, steps and ends: of rows 10 to 19 [-1] is 19, [2:4] is the
        # range of 12 and 13.
        rows = range(self.start, self.stop)[index]
        if isinstance(rows, range):
            return [self._prompt(row) for row in rows]
        return self._prompt(rows)

    def _prompt(self, row: int) -> Prompt:
        pickled, contents = (column[row] for column in mapped(self.path).columns)
        buffers = [content.as_buffer() for content in contents]
        prompt: Prompt = pickle.loads(pickled.as_buffer(), buffers=buffers)
        return prompt


def write(path: Path, prompts: Sequence[Prompt]) -> None:
    """Raises OSError where the file cannot be written."""
    pickled: list[bytes] = []
    contents: list[list[memoryview]] = []
    for prompt in prompts:
        outside: list[pickle.PickleBuffer] = []
        whole = replace(prompt, images=tuple(map(_with_buffer, prompt.images)))
        pickled.append(pickle.dumps(whole, protocol=5, buffer_callback=outside.append))
        contents.append([buffer.raw() for buffer in outside])
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, _SCHEMA) as stream:
        stream.write_batch(pyarrow.record_batch([pickled, contents], schema=_SCHEMA))


@functools.cache
def mapped(path: Path) -> pyarrow.RecordBatch:
    """The rows of a file, which may be removed afterwards."""
    # Not closed: the rows point into the mapping, and hold it as long as they are used.
    with pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)).read_buffer()) as stream:
        return stream.read_next_batch()


def _with_buffer(image: Image) -> Image:
    """The image with its content, where it has one, as a buffer: pickle leaves it outside, so that
    who reads the prompt does not copy it out of the mapped file."""
    if isinstance(image.source, Path):
        return image
    return replace(image, source=pyarrow.py_buffer(image.source))
