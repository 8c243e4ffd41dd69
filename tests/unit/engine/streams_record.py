"""Streams of CUDA without CUDA: which one is current, and which waited for which."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class Stream:
    def __init__(self, record: StreamRecord, name: str) -> None:
        self.record, self.name = record, name

    def wait_stream(self, other: Stream) -> None:
        self.record.waits.append((self.name, other.name))


class StreamRecord:
    """Stands for the part of ``torch.cuda`` that deals with streams. The first stream made is
    ``engine``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[tuple[str, str]] = []
        self._names = itertools.chain(
            ["engine"], (f"other{number}" for number in itertools.count())
        )
        self._current = Stream(self, "policy")
        for name, value in (
            ("is_available", lambda: True),
            ("Stream", self.make),
            ("current_stream", lambda device=None: self._current),
            ("set_stream", self.set),
            ("stream", self.inside),
        ):
            monkeypatch.setattr(torch.cuda, name, value)

    @property
    def current(self) -> str:
        return self._current.name

    def make(self) -> Stream:
        return Stream(self, next(self._names))

    def set(self, stream: Stream) -> None:
        self._current = stream

    @contextmanager
    def inside(self, stream: Stream) -> Iterator[None]:
        before = self._current
        self.set(stream)
        try:
            yield
        finally:
            self.set(before)
