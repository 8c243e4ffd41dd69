"""The CUDA stream in which the engine works, apart from the policy's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class EngineStream:
    """A stream of the engine's own: it is built in it, and every call of it is made in it.

    vLLM holds on to the stream that it works in: it captures CUDA graphs there, which the default stream
    cannot, and its copies to the host wait for the stream of its first step. A communicator or a capture
    that finds the default stream therefore makes a new one the current stream of the thread, for all that
    follows. The policy's gradients, on the other hand, belong to the stream of their parameters: in
    another one autograd would wait for an event per parameter.

    Without a CUDA device nothing happens.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the current stream is the engine's, and waits for what was queued in the caller's;
        afterwards, also after an exception, it is the caller's, and waits for what was queued inside.

        vLLM must have been imported before: it learns of the streams set from then on.
        """
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                yield
                # Should vLLM have set another one after all, what it remembers is of that one.
                self._stream = torch.cuda.current_stream()
        finally:
            caller.wait_stream(self._stream)
