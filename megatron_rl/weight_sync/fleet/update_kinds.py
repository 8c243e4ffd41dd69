"""What a server does around an update: it stands still while its weights are replaced, or samples
on while new ones are staged beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.weight_sync.fleet.commands import InFlight, NotReachedError, Server

POLL_S = 0.02
_LOOK_EVERY_S = 2.0


class UpdateKind(Protocol):
    """The commands that one server gets, in this order; each raises ConnectionError."""

    def begin(self, server: Server) -> None:
        """Before its workers are called. A server that cannot is to serve on."""

    def carry_out(
        self, server: Server, info: Mapping[str, Any], has_ended: Callable[[], bool]
    ) -> None:
        """Returns when its workers have ended their part; ``has_ended``: whether they say so,
        raises ConnectionError where they do not in time."""

    def end(self, server: Server, version: int) -> None:
        """All weights have arrived."""

    def call_off(self, server: Server) -> None:
        """Nothing has moved, and nothing will."""

    def release(self, server: Server) -> None:
        """It broke off; another update may follow."""


@dataclass(frozen=True)
class InPlaceUpdate:
    """The server is paused from ``begin`` to ``end``, and then has the new weights."""

    in_flight: InFlight

    def begin(self, server: Server) -> None:
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
        self, server: Server, info: Mapping[str, Any], has_ended: Callable[[], bool]
    ) -> None:
        server.update(info)

    def end(self, server: Server, version: int) -> None:
        server.finish(version)
        server.resume()

    def call_off(self, server: Server) -> None:
        server.cancel()
        server.resume()

    def release(self, server: Server) -> None:
        server.cancel()


@dataclass(frozen=True)
class StagedUpdate:
    """The server samples with its old weights throughout; ``commands.switch_weights`` makes it go
    on with the new ones."""

    def begin(self, server: Server) -> None:
        server.alive()

    def carry_out(
        self, server: Server, info: Mapping[str, Any], has_ended: Callable[[], bool]
    ) -> None:
        server.stage(info)
        look_at = time.monotonic() + _LOOK_EVERY_S
        while not has_ended():
            if time.monotonic() > look_at:
                server.alive()
                look_at = time.monotonic() + _LOOK_EVERY_S
            time.sleep(POLL_S)

    def end(self, server: Server, version: int) -> None: ...

    def call_off(self, server: Server) -> None: ...

    def release(self, server: Server) -> None: ...
