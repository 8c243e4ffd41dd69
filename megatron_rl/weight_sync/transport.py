"""Carries out a program: local copies, and point-to-point messages with bounded staging memory."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import LostPeerError
from megatron_rl.protocols import Parameters
from megatron_rl.runtime.digest import Kind, checksum, kind_on
from megatron_rl.weight_sync.checks import compare
from megatron_rl.weight_sync.collectives import raise_everywhere
from megatron_rl.weight_sync.failure import HALF_UPDATED
from megatron_rl.weight_sync.planner.program import BucketChunk, Extent, Message, Program, Round
from megatron_rl.weight_sync.planner.schedule import ALIGNMENT, BucketId
from megatron_rl.weight_sync.planner.shards import View

_MAX_MESSAGES_SHOWN = 8


@dataclass(frozen=True)
class TransportReport:
    """What one run moved on this rank, in bytes; ``peak_staging_bytes``: size of the send and
    receive buffers.

    ``checksums``: of every bucket as it left or arrived, if requested; on the host or on its way.
    """

    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    peak_staging_bytes: int
    checksums: Mapping[BucketId, Tensor] = field(default_factory=dict)


class _ParameterForm(NamedTuple):
    """What of a parameter must stay as it was when the program was compiled or first run."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str


class Transport:
    """Runs one program again and again, on the process group whose ranks the plan names.
    Collective: every rank of the group constructs it.

    Attributes:
        device: where staging buffers live; that of the parameters.
        kind: of the checksums, what suits the device.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.program = program
        self.device = torch.device(device)
        self.group = group
        self.kind: Kind = kind_on(device)
        self.staging: list[Tensor] = []
        self.forms: dict[tuple[str, str], _ParameterForm] = {}
        self.messages: dict[BucketId, Message] = {}
        for step in program.rounds:
            for message in (*step.sends, *step.receives):
                self.messages[message.bucket] = message
        if dist.is_initialized():
            # NCCL needs all ranks in the first operation of a group on a device; a round may have
            # only two.
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def run(
        self,
        source: Parameters,
        target: Parameters,
        written: Callable[[str], None] | None = None,
        *,
        checked: bool = False,
        failed: Exception | None = None,
    ) -> TransportReport:
        """Collective: move everything. ``source(key)`` and ``target(key)`` give the local
        parameters, at the moment of use; ``written(key)`` is called once for each target parameter
        that receives anything (a vocabulary shard may be padding throughout), when its last element
        is in place. ``checked``: the report has checksums.

        While round n travels, round n + 1 is packed and a share of the local copies is made; at
        most ``rounds_in_flight`` rounds hold buffers. Call ``check_sources`` first.

        A rank where something goes wrong (a parameter is not what the plan or the first run saw,
        ``source``, ``target`` or ``written`` raises) reads and writes no more, but its messages
        keep their turns, with whatever is in them, so that no peer waits; then all ranks raise.
        ``failed``: what went wrong on this rank before.
        Raises WeightSyncError on every rank, with what went wrong on which; at once, and on the
        ranks that notice it, when a peer is gone.
        """
        # From check_sources, where every rank learns of one that has no room; no longer held than
        # the run takes.
        staging = self.staging or self.buffers()
        self.staging = []
        run = _TransportRun(self, staging, source, target, written, checked, failed)
        with torch.no_grad():
            report = run.all()
        self.raise_everywhere(run.error)
        return report

    def check_sources(self, source: Parameters, failed: Exception | None = None) -> None:
        """Collective. Raises ValueError on every rank, naming rank and parameter, when a source on
        any rank is missing, or has another dtype, shape or stride than the plan or the first run
        saw; WeightSyncError when one has no room for the staging buffers, which the next run uses.
        ``failed``: what went wrong on this rank before."""
        staging: list[Tensor] = []
        try:
            if failed is None:
                for key, extent in self.program.sources.items():
                    self.check("training", key, extent, source(key))
                staging = self.buffers()
        except Exception as error:  # noqa: BLE001 (raised on every rank)
            failed = error
        self.raise_everywhere(failed, moved=False)
        self.staging = staging

    def buffers(self) -> list[Tensor]:
        """Memory for the rounds in flight: round n uses number n modulo their count, so each has
        the size of its largest round. It is free by then: a round begins only when no more than
        ``rounds_in_flight - 1`` are under way, and the oldest ends first."""
        sizes = []
        for step in self.program.rounds:
            sizes.append(sum(_aligned(message.size) for message in (*step.sends, *step.receives)))
        count = min(self.program.rounds_in_flight, len(sizes))
        return [
            torch.empty(max(sizes[slot::count]), dtype=torch.uint8, device=self.device)
            for slot in range(count)
        ]

    def check(self, side: str, key: str, planned: Extent, parameter: Tensor) -> None:
        """Raises ValueError when the parameter is not what the plan or the first run saw."""
        elements = 0  # from the first one to the last, as ``shards.extent`` counts them
        if parameter.numel():
            steps = zip(parameter.shape, parameter.stride(), strict=True)
            elements = sum((size - 1) * step for size, step in steps) + 1
        shape = tuple(parameter.shape)
        if elements < planned.elements:
            raise ValueError(
                f"rank {self.program.rank}: {side} parameter {key!r} of shape {shape} spans"
                f" {elements} elements, the plan needs {planned.elements}; make a new plan"
            )
        dtype = str(parameter.dtype).removeprefix("torch.")
        place = parameter.device.type
        if side == "rollout" and place == "cpu":
            place = self.device.type  # staged weights lie in the memory of the host
        form = _ParameterForm(dtype, shape, parameter.stride(), place)
        # The plan knows dtype and device; shape and strides are those of the first run.
        first_form = form._replace(dtype=planned.dtype, device=self.device.type)
        expected = self.forms.setdefault((side, key), first_form)
        if form != expected:
            raise ValueError(
                f"rank {self.program.rank}: {side} parameter {key!r} has (dtype, shape, stride,"
                f" device) {tuple(form)}, planned or first seen as {tuple(expected)}; make a new"
                " plan"
            )

    def compare(self, report: TransportReport) -> None:
        """Collective: raises WeightSyncError on every rank when a bucket of a checked run arrived
        with other bytes than were sent."""
        if self.device.type != "cpu":
            # The checksums have arrived. Not the whole device: an engine may be sampling on it.
            torch.accelerator.current_stream(self.device).synchronize()
        compare(self.messages, report.checksums, self.group)

    def raise_everywhere(self, error: Exception | None, *, moved: bool = True) -> None:
        """Collective. ``moved``: an engine may have lost old weights."""
        raise_everywhere(error, HALF_UPDATED if moved else "", self.group, self.device)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Flight(NamedTuple):
    """A round under way: its place among the rank's rounds, its messages, and their buffers."""

    index: int
    step: Round
    works: list[dist.Work]
    incoming: list[tuple[Message, Tensor]]


@dataclass
class _TransportRun:
    """The state of one run: rounds under way, staging memory in use, writes still to come."""

    transport: Transport
    staging: Sequence[Tensor]
    source: Parameters
    find_target: Parameters
    written: Callable[[str], None] | None
    checked: bool
    error: Exception | None
    checksums: dict[BucketId, Tensor] = field(default_factory=dict)
    open: dict[str, Tensor] = field(default_factory=dict)  # parameters with views still to come
    flying: deque[_Flight] = field(default_factory=deque)
    sent: int = 0
    received: int = 0
    copied: int = 0

    def __post_init__(self) -> None:
        self.program = self.transport.program
        self.left = dict(self.program.uses)

    def all(self) -> TransportReport:
        rounds = self.program.rounds
        # Local copies are spread over the rounds: they run while messages travel.
        num_copies = len(self.program.copies)
        shares = [num_copies * index // max(len(rounds), 1) for index in range(len(rounds) + 1)]
        for index, step in enumerate(rounds):
            # A place among the rounds in flight, and what this round passes on.
            while len(self.flying) >= self.program.rounds_in_flight or (
                self.flying and self.flying[0].index <= step.after
            ):
                self.finish()
            self.issue(index)
            self.attempt(self.copy, shares[index], shares[index + 1])
        self.attempt(self.copy, shares[-1], num_copies)  # all of them where there is no round
        while self.flying:
            self.finish()
        left = [key for key, count in self.left.items() if count]
        assert self.error is not None or not left, f"never completed: {left[:5]}"
        staging_bytes = sum(buffer.numel() for buffer in self.staging)
        return TransportReport(self.sent, self.received, self.copied, staging_bytes, self.checksums)

    def attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """Keeps what goes wrong on this rank alone for the end, when every rank learns of it; a
        rank that has failed does nothing more."""
        if self.error is None:
            try:
                action(*arguments)
            except Exception as error:  # noqa: BLE001 (raised on every rank at the end)
                self.error = error

    def target(self, key: str) -> Tensor:
        if key not in self.open:
            self.open[key] = self.find_target(key)
            self.transport.check("rollout", key, self.program.targets[key], self.open[key])
        return self.open[key]

    def done(self, key: str) -> None:
        """One of the ``Program.uses`` of a target parameter is over."""
        self.left[key] -= 1
        if self.left[key] == 0:
            del self.open[key]
            if self.written is not None:
                self.written(key)

    def copy(self, first: int, last: int) -> None:
        for copy in self.program.copies[first:last]:
            place = strided(self.target(copy.target.key), copy.target)
            place.copy_(strided(self.source(copy.source.key), copy.source))
            self.copied += math.prod(copy.target.shape) * place.element_size()
            self.done(copy.target.key)

    def issue(self, index: int) -> None:
        """Packs the messages of a round and sends them on their way. A rank that has failed sends
        them unpacked: with whatever is in the buffers."""
        step = self.program.rounds[index]
        staging = self.staging[index % len(self.staging)]
        group = self.transport.group
        operations = []
        incoming = []
        begin = 0
        for message in (*step.receives, *step.sends):
            buffer = staging[begin : begin + message.size]
            begin += _aligned(message.size)
            if message.stream.target == self.program.rank:
                incoming.append((message, buffer))
                call = dist.irecv
            else:
                self.attempt(self.packed, message, buffer)
                self.sent += message.size
                call = dist.isend
            peer = message.peer if group is None else dist.get_global_rank(group, message.peer)
            operations.append(dist.P2POp(call, buffer, peer, group))
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self.failure(step, error) from error
        self.flying.append(_Flight(index, step, works, incoming))

    def finish(self) -> None:
        """Waits for the oldest round under way and unpacks what has come."""
        _, step, works, incoming = self.flying.popleft()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.failure(step, error) from error
        for message, buffer in incoming:
            self.attempt(self.unpacked, message, buffer)
            self.received += message.size

    def packed(self, message: Message, buffer: Tensor) -> None:
        if message.passed_on:  # from where it was written to a round ago
            pack(message, self.target, buffer, self.done)
        else:
            pack(message, self.source, buffer, lambda key: None)
        self.keep_checksum(message, buffer)

    def unpacked(self, message: Message, buffer: Tensor) -> None:
        self.keep_checksum(message, buffer)
        unpack(message, buffer, self.target, self.done)

    def keep_checksum(self, message: Message, buffer: Tensor) -> None:
        if self.checked:
            sums = checksum(buffer, self.transport.kind)
            # From an accelerator without waiting for it: ``Transport.compare`` does.
            self.checksums[message.bucket] = sums.to("cpu", non_blocking=True)

    def failure(self, step: Round, error: RuntimeError) -> LostPeerError:
        messages = [f"to rank {message.peer}: {message.contents}" for message in step.sends]
        messages += [f"from rank {message.peer}: {message.contents}" for message in step.receives]
        shown = "; ".join(messages[:_MAX_MESSAGES_SHOWN])
        return LostPeerError(
            f"rank {self.program.rank}: round {step.number} of the weight sync failed ({shown}):"
            f" {error}. {HALF_UPDATED}"
        )


def strided(parameter: Tensor, view: View) -> Tensor:
    """The view of a parameter that a shard describes, without gradient. Offsets count from the
    parameter's own first element."""
    offset = parameter.storage_offset() + view.offset
    return parameter.detach().as_strided(view.shape, view.stride, offset)


def pack(message: Message, source: Parameters, buffer: Tensor, done: Callable[[str], None]) -> None:
    """Gathers the bytes of a bucket from the local parameters, cast to the dtype of the stream;
    ``done(key)`` after each view."""
    for chunk in message.chunks:
        (landing,) = chunk.landings
        _block(message, chunk, buffer).copy_(strided(source(landing.view.key), landing.view))
        done(landing.view.key)


def unpack(
    message: Message, buffer: Tensor, target: Parameters, done: Callable[[str], None]
) -> None:
    """Scatters the bytes of a bucket into the local parameters; ``done(key)`` after each view."""
    for chunk in message.chunks:
        block = _block(message, chunk, buffer)
        for landing in chunk.landings:
            strided(target(landing.view.key), landing.view).copy_(block[landing.window])
            done(landing.view.key)


def _block(message: Message, chunk: BucketChunk, buffer: Tensor) -> Tensor:
    """The chunk's part of the buffer, in its shape; ``begin`` counts elements."""
    typed = buffer.view(getattr(torch, message.stream.dtype))
    end = chunk.begin + math.prod(chunk.region.shape)
    return typed[chunk.begin : end].view(chunk.region.shape)
