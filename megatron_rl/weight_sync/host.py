"""What rank 0 of the trainer does alone in a sync to a server: it gives the commands, and meets the
workers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict

import torch.distributed as dist

from megatron_rl.runtime.joint_group import JointGroupError, Meeting, host_store, together
from megatron_rl.types import TransferOptions
from megatron_rl.weight_sync.commands import InFlight, NotReachedError, Server


class Host:
    """Gives a server its commands. One that begins a step of all (a connection, an update) ends
    only with it, while rank 0 itself takes part: a thread waits for its answer.

    Every step has a name of its own, under which rank 0 and the workers meet.
    """

    def __init__(self, server: Server, options: TransferOptions, secret: str) -> None:
        self._server = server
        self._options = options
        self._secret = secret
        self._pool = ThreadPoolExecutor(1)
        self._updates = 0
        self._step = ""
        self._command: Future[None] | None = None
        self._store: dist.TCPStore | None = None
        self._meeting: Meeting | None = None
        self._workers = range(0)

    def invite(self, num_trainers: int, device_type: str) -> tuple[str, int, int]:
        """Tells the workers where to come and waits for them. Returns address and port of the store
        and the group's size: the ranks of the trainer, then the workers."""
        address = self._server.address()
        size = num_trainers + self._server.num_workers()
        # No local name for it, which the traceback of an error would keep: see ``close``.
        self._store = host_store(address, self._options.timeout_s)
        self._meeting = Meeting(self._store, self._secret)
        self._workers = range(num_trainers, size)
        info = {
            "address": address,
            "port": self._store.port,
            "first_rank": num_trainers,
            "size": size,
            "device": device_type,
            "options": asdict(self._options),
        }
        self._begin_step("init", lambda: self._server.init_transfer(info))
        return address, self._store.port, size

    def pause(self, in_flight: InFlight) -> None:
        """When the server does not pause in time, it is to serve on; one that is not reached has
        not heard of it, and is not called a second time."""
        try:
            self._server.pause(in_flight)
        except NotReachedError:
            raise
        except ConnectionError as error:
            try:
                self._server.resume()
            except ConnectionError as also:
                raise ConnectionError(f"{error}; the server may be paused: {also}") from error
            raise

    def begin_update(self, version: int) -> None:
        """Returns when every worker is about to begin it."""
        self._updates += 1
        step = f"sync{self._updates}"
        self._begin_step(step, lambda: self._server.update({"step": step, "version": version}))

    def _begin_step(self, step: str, command: Callable[[], None]) -> None:
        """Gives the command and waits until every worker is about to begin the step."""
        assert self._meeting is not None, "workers are invited first"
        self._step = step
        self._command = self._pool.submit(command)
        self._meeting.open(step, self._workers, self._absent)

    def _absent(self) -> str:
        """Why the workers will not come: the command is over. Empty while it is not."""
        assert self._command is not None
        if not self._command.done():
            return ""
        error = self._command.exception()
        if error is None:
            return "the server answered before its workers came"
        return str(error)

    def check(self) -> None:
        """Waits for the end of the step. Raises JointGroupError with what workers say of it."""
        problem = together(self._problems())
        if problem:
            raise JointGroupError(problem)

    def _problems(self) -> dict[int, str]:
        """What each worker says of the step, when it is over."""
        assert self._command is not None and self._meeting is not None
        self._command.result()
        return self._meeting.reports(self._step, self._workers)

    def end_update(self, version: int) -> None:
        """All is in place: the server goes on with the new weights."""
        self._server.finish(version)
        self._server.resume()

    def call_off(self) -> str:
        """After an update that every rank refused: the server goes on with its old weights. Returns
        why it cannot."""
        try:
            if not all(self._problems().values()):
                return "; some of the workers did not refuse it"
            self._server.cancel()
            self._server.resume()
        except (OSError, RuntimeError) as error:  # of a command, of the store
            return f"; calling it off: {error}"
        return ""

    def close(self) -> None:
        """The store goes with the last reference to it, and only now: workers report to it until
        the command is over."""
        self._pool.shutdown()
        self._store = None
        self._meeting = None
