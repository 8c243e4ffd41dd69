"""Rank 0's part of a sync to servers: it gives commands to all of them at the same time and waits
for their workers."""

import ipaddress
import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from megatron_rl.runtime.joint_group import Barrier, combined, peer_timeout_s, serve_store
from megatron_rl.types import TransferOptions
from megatron_rl.weight_sync.fleet.commands import HttpServer, InFlight, NotReachedError

Answer = TypeVar("Answer")
_Reasons = dict[str, str]  # name of a server -> what is wrong with it
_POLL_S = 0.02
_LOOK_EVERY_S = 2.0


class ServersError(RuntimeError):
    """A step of all servers did not begin. ``lost``: those that cannot take part, and why."""

    def __init__(self, lost: Mapping[str, str]) -> None:
        super().__init__(dict(lost))  # pickle makes the error again from this
        self.lost = dict(lost)

    def __str__(self) -> str:
        return problem_text(self.lost)


def problem_text(problems: Mapping[str, str]) -> str:
    """The problems of several servers as one text. A server that is alone needs no name."""
    return "; ".join(f"{name}: {why}" if name else why for name, why in problems.items())


class StepOutcome(NamedTuple):
    """How a step ended."""

    lost: _Reasons  # servers whose command was not carried out
    problems: _Reasons  # what the workers of others say of it


@dataclass
class FleetController:
    """Gives commands to all servers of a group. A command that begins a step of all (a connection,
    an update) returns only when the step ends, and rank 0 takes part in it: threads wait for it.

    Every step has a name of its own, under which rank 0 and the workers pass the barrier.

    An update replaces the weights of servers that are paused from ``begin`` to ``end_update``; or
    new weights are staged, while servers sample with their old ones throughout, and
    ``commands.switch_weights`` makes them continue with the new ones.
    """

    servers: Mapping[str, HttpServer]  # by name; their workers have their ranks in this order
    options: TransferOptions
    secret: str
    in_flight: InFlight  # what becomes of requests under way when a server is paused
    _is_staged: bool = False  # the update that has begun last
    _updates: int = 0
    _step: str = ""
    _commands: dict[str, Future[None]] = field(default_factory=dict)
    _store: dist.TCPStore | None = None
    _barrier: Barrier | None = None
    _ranks: dict[str, range] = field(default_factory=dict)
    _late_at: float = 0.0
    _report_by: float = math.inf
    _silent: set[str] = field(default_factory=set)  # their commands may never be answered

    def __post_init__(self) -> None:
        self._peer_timeout_s = peer_timeout_s(self.options.timeout_s)
        self._pool = ThreadPoolExecutor(len(self.servers))

    def connect(self, num_trainers: int, device_type: str) -> tuple[str, int, int]:
        """Sends the workers the address of the store and waits for them. Returns address and port
        of the store and the group's size: the ranks of the trainer, then the workers.

        Raises:
            ServersError: a server is not reached, or one of its workers cannot take part.
        """
        addresses = self._all(lambda server: server.address())
        size = num_trainers
        for name, num_workers in self._all(lambda server: server.num_workers()).items():
            self._ranks[name] = range(size, size + num_workers)
            size += num_workers
        own = _shared_address(addresses.values())
        # No local name for it, which the traceback of an error would keep: see ``close``.
        self._store = serve_store(own, self.options.timeout_s)
        self._barrier = Barrier(self._store, self.secret)
        info = {
            "port": self._store.port,
            "size": size,
            "device": device_type,
            "options": asdict(self.options),
        }

        def init(name: str) -> None:
            own_info = {"address": addresses[name], "first_rank": self._ranks[name].start}
            self.servers[name].init_transfer({**info, **own_info})

        self._begin_step("init", init)
        return own, self._store.port, size

    def begin(self, *, staged: bool) -> _Reasons:
        """Returns the servers that an update cannot begin with, for instance since they do not
        pause in time. They are to continue serving; one that is not reached has received nothing,
        and is not called a second time."""
        self._is_staged = staged
        return self._each((lambda server: server.alive()) if staged else self._pause)[1]

    def _pause(self, server: HttpServer) -> None:
        """Pauses a server. One that cannot pause resumes."""
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

    def begin_update(self, version: int) -> None:
        """Returns when every worker is about to begin it.

        Raises:
            ServersError: one of them does not.
        """
        self._updates += 1
        step = f"sync{self._updates}"
        info = {"step": step, "version": version}

        def carry_out(name: str) -> None:
            server = self.servers[name]
            if not self._is_staged:
                server.update(info)
                return
            server.stage(info)
            look_at = time.monotonic() + _LOOK_EVERY_S
            while not self._has_ended(step, name):
                if time.monotonic() > look_at:
                    server.alive()
                    look_at = time.monotonic() + _LOOK_EVERY_S
                time.sleep(_POLL_S)

        self._begin_step(step, carry_out)

    def _has_ended(self, step: str, name: str) -> bool:
        """Whether its workers have reported the end. Raises ConnectionError where overdue."""
        assert self._barrier is not None, "connect first"
        if self._barrier.has_reported(step, self._ranks[name]):
            return True
        if time.monotonic() > self._report_by:
            raise ConnectionError(
                f"its workers have not reported within {self.options.timeout_s:g} s how it ended"
            )
        return False

    def _expect_reports(self) -> None:
        """Begins to wait for reports: this side has ended its part of the step."""
        self._report_by = min(self._report_by, time.monotonic() + self.options.timeout_s)

    def _begin_step(self, step: str, command: Callable[[str], None]) -> None:
        """Gives the command and waits until every worker is about to begin the step."""
        assert self._barrier is not None, "connect first"
        self._step = step
        self._late_at = time.monotonic() + self._peer_timeout_s
        self._report_by = math.inf
        self._commands = {name: self._pool.submit(command, name) for name in self.servers}
        all_ranks = [rank for ranks in self._ranks.values() for rank in ranks]
        problems = self._barrier.release(step, all_ranks, self._absent)
        lost = {}
        for name, ranks in self._ranks.items():
            of_server = {rank: problems[rank] for rank in ranks if rank in problems}
            if of_server:
                lost[name] = combined(of_server)
        if lost:
            raise ServersError(lost)

    def _absent(self) -> dict[int, str]:
        """Workers that will not come, as their command or their time is over, and why."""
        assert self._barrier is not None, "connect first"
        is_late = time.monotonic() > self._late_at
        reasons: dict[int, str] = {}
        for name, command in self._commands.items():
            why = ""
            if command.done():
                error = command.exception()
                why = "the server answered before its workers came" if error is None else str(error)
            elif is_late and not all(
                self._barrier.has_arrived(self._step, rank) for rank in self._ranks[name]
            ):
                self._silent.add(name)
                why = f"its workers did not come within {self._peer_timeout_s:g} s"
            if why:
                reasons |= dict.fromkeys(self._ranks[name], why)
        return reasons

    def ends(self) -> StepOutcome:
        """Waits until every server has ended its part of the step."""
        assert self._barrier is not None, "connect first"
        self._expect_reports()
        ends = StepOutcome({}, {})
        for name, command in self._commands.items():
            try:
                command.result()
                problem = combined(self._barrier.reports(self._step, self._ranks[name]))
            except (OSError, RuntimeError) as error:  # of the command, of the store
                ends.lost[name] = str(error)
                continue
            if problem:
                ends.problems[name] = problem
        return ends

    def end_update(self, version: int, names: Collection[str]) -> _Reasons:
        """Has these servers, which have all weights, resume. Returns those that do not."""

        def end(server: HttpServer) -> None:
            server.finish(version)
            server.resume()

        return {} if self._is_staged else self._each(end, names)[1]

    def call_off(self) -> _Reasons:
        """After an update that every rank refused: the servers continue with their old weights.
        Returns those that cannot."""
        ends = self.ends()
        willing = set(self.servers) - set(ends.lost) - set(ends.problems)
        if willing:
            return dict.fromkeys(willing, "some of the workers did not refuse it")

        def call_off(server: HttpServer) -> None:
            server.cancel()
            server.resume()

        lost = {} if self._is_staged else self._each(call_off, ends.problems)[1]
        return {name: f"calling it off: {why}" for name, why in {**ends.lost, **lost}.items()}

    def release(self, names: Collection[str]) -> _Reasons:
        """After an update that broke off these servers may begin another; returns the others."""
        for name in names:
            self._commands[name].exception()  # it is over
        return {} if self._is_staged else self._each(lambda server: server.cancel(), names)[1]

    def _all(self, command: Callable[[HttpServer], Answer]) -> dict[str, Answer]:
        """The answers of all servers. Raises ServersError when one of them does not answer."""
        answers, lost = self._each(command)
        if lost:
            raise ServersError(lost)
        return answers

    def _each(
        self, command: Callable[[HttpServer], Answer], names: Collection[str] | None = None
    ) -> tuple[dict[str, Answer], _Reasons]:
        """Has the servers (None: all) do this at once. Returns answers, and why there is none."""
        futures = {
            name: self._pool.submit(command, server)
            for name, server in self.servers.items()
            if names is None or name in names
        }
        answers: dict[str, Answer] = {}
        lost: _Reasons = {}
        for name, future in futures.items():
            try:
                answers[name] = future.result()
            except ConnectionError as error:
                lost[name] = str(error)
        return answers, lost

    def close(self) -> None:
        """Only now drops the store: workers report to it until their command is over."""
        self._expect_reports()
        wait([command for name, command in self._commands.items() if name not in self._silent])
        self._pool.shutdown(wait=False)
        self._store = None
        self._barrier = None


def _shared_address(addresses: Collection[str]) -> str:
    """An address of this machine that all servers can reach, if there is one: no loopback address,
    which a server on this machine sees."""
    for address in addresses:
        try:
            if not ipaddress.ip_address(address).is_loopback:
                return address
        except ValueError:  # a name
            return address
    return next(iter(addresses))
