"""The two kinds of update of a server: paused while its weights are replaced, or sampling while new
weights are staged in the memory of the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.weight_sync.fleet.commands import HttpServer, InFlight, NotReachedError

POLL_S = 0.02
_LOOK_EVERY_S = 2.0


@dataclass(frozen=True)
class InPlaceUpdate:
    """The server is paused from ``begin`` to ``end``, and then has the new weights.

    The commands of an update, in this order; each raises ConnectionError.
    """

    in_flight: InFlight

    def begin(self, server: HttpServer) -> None:
        """Pauses the server before its workers are called. One that cannot pause resumes."""
        try:
            server.pause(self.in_flight)
        except NotReachedError:
            raise
        except ConnectionError as error:
            try:
                server.resume()
            except ConnectionError as also:
                raise ConnectionError(f"{error}; the server may be paused: {also}") from error
            raise

    def carry_out(
        self, server: HttpServer, info: Mapping[str, Any], has_ended: Callable[[], bool]
    ) -> None:
        """Returns when its workers have ended their part; ``has_ended``: whether they say so,
        raises ConnectionError where they do not in time."""
        server.update(info)

    def end(self, server: HttpServer, version: int) -> None:
        """Resumes with the new weights, which have all arrived."""
        server.finish(version)
        server.resume()

    def call_off(self, server: HttpServer) -> None:
        """Resumes with the old weights; nothing has moved."""
        server.cancel()
        server.resume()

    def release(self, server: HttpServer) -> None:
        """Ends an update that broke off, so that another may follow."""
        server.cancel()


@dataclass(frozen=True)
class StagedUpdate:
    """The server samples with its old weights throughout; ``commands.switch_weights`` makes it
    continue with the new ones."""

    def begin(self, server: HttpServer) -> None:
        server.alive()

    def carry_out(
        self, server: HttpServer, info: Mapping[str, Any], has_ended: Callable[[], bool]
    ) -> None:
        server.stage(info)
        look_at = time.monotonic() + _LOOK_EVERY_S
        while not has_ended():
            if time.monotonic() > look_at:
                server.alive()
                look_at = time.monotonic() + _LOOK_EVERY_S
            time.sleep(POLL_S)

    def end(self, server: HttpServer, version: int) -> None: ...

    def call_off(self, server: HttpServer) -> None: ...

    def release(self, server: HttpServer) -> None: ...


UpdateKind = InPlaceUpdate | StagedUpdate
