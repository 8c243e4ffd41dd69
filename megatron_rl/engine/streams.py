"""The CUDA stream in which the engine works, apart from the policy's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class EngineStream:
    """A stream of the engine's own, in which it is built and every call is made.

    vLLM keeps the stream that it works in: it captures CUDA graphs there, which the default stream
    cannot, and its copies to the host wait for the stream of its first step. A communicator or a
    capture that finds the default stream therefore sets a new current stream for the whole thread.
    The policy's gradients, on the other hand, belong to the stream of their parameters: in another
    one autograd would wait for one event per parameter.

    Without a CUDA device nothing happens.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the current stream is the engine's.

        It waits for what the caller had queued; afterwards, also after an exception, the caller's
        stream is current again and waits for what was queued inside. vLLM must have been imported
        before: it only learns of streams that are set after its import.
        """
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                yield
                # If vLLM has set another one after all, its graphs and copies belong to that.
                self._stream = torch.cuda.current_stream()
        finally:
            caller.wait_stream(self._stream)
