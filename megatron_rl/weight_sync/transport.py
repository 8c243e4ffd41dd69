"""Carries out a program: local copies, and point-to-point messages with bounded staging memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.runtime.digest import Kind, WeightSyncError, checksum, kind_on, piece_bytes
from megatron_rl.weight_sync.boxes import Boxes, View
from megatron_rl.weight_sync.program import Message, Program
from megatron_rl.weight_sync.verify import HALF_UPDATED, Place, agree, compare

Parameters = Callable[[str], Tensor]
ALIGNMENT = 16  # bytes: of messages in a staging buffer


@dataclass(frozen=True)
class TransportReport:
    """What one run moved on this rank, in bytes; ``peak_staging_bytes``: size of the send and receive buffers.
    ``checksums``: of the pieces of every bucket, one after the other, as it left or arrived here, when asked for; on the host, or on
    their way there."""

    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    peak_staging_bytes: int
    checksums: Mapping[Place, Tensor] = field(default_factory=dict)


class RunningChecksum:
    """Checksums of the pieces of a buffer, each taken while its bytes are in the cache: just written, or about to be read."""

    def __init__(self, buffer: Tensor, kind: Kind, piece: int | None = None) -> None:
        self.buffer, self.kind, self.piece = buffer, kind, piece or piece_bytes(buffer.numel(), kind)
        self.end, self.sums = 0, list[Tensor]()

    def written(self, end: int) -> None:
        """The bytes before ``end`` are there."""
        while self.end < self.buffer.numel() and min(self.end + self.piece, self.buffer.numel()) <= end:
            piece = self.buffer[self.end : self.end + self.piece]
            self.sums.append(checksum(piece, self.kind))
            self.end += piece.numel()

    def wanted(self, end: int) -> None:
        """The bytes before ``end`` are to be read, all of them are there."""
        self.written(min(self.buffer.numel(), -(-end // self.piece) * self.piece))

    def result(self) -> Tensor:
        """On the host; from an accelerator without waiting for it."""
        assert self.end == self.buffer.numel()
        return torch.cat(self.sums).to("cpu", non_blocking=True)


def pack(message: Message, source: Parameters, buffer: Tensor, sums: RunningChecksum | None = None) -> None:
    """Gather the bytes of a bucket from the local parameters."""
    typed = buffer.view(getattr(torch, message.stream[2]))
    for chunk in message.chunks:
        ((_, view),) = chunk.views
        end = chunk.begin
        block = typed[end : end + math.prod(chunk.rect[1])].view(chunk.rect[1])
        for target, values in _in_parts(block, strided(source(view[0]), view), sums):
            target.copy_(values)
            end += values.numel()
            if sums is not None:
                sums.written(end * typed.element_size())


def unpack(
    message: Message, buffer: Tensor, destination: Parameters, done: Callable[[str], None], sums: RunningChecksum | None = None
) -> None:
    """Scatter the bytes of a bucket into the local parameters; ``done(key)`` after each view."""
    typed = buffer.view(getattr(torch, message.stream[2]))
    for chunk in message.chunks:
        block = typed[chunk.begin : chunk.begin + math.prod(chunk.rect[1])].view(chunk.rect[1])
        for part, view in chunk.views:
            row = part[0].start
            for target, values in _in_parts(strided(destination(view[0]), view), block[part], sums):
                row += values.shape[0]
                if sums is not None:
                    sums.wanted((chunk.begin + row * block.stride(0)) * typed.element_size())
                target.copy_(values)
            done(view[0])


def _in_parts(target: Tensor, values: Tensor, sums: RunningChecksum | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors of one shape, some rows of each at a time: as many as a piece of the checksum has room for."""
    size = target.numel() * target.element_size()
    piece = piece_bytes(size, kind_on(target.device)) if sums is None else sums.piece
    rows = max(1, piece * target.shape[0] // size)
    yield from zip(target.split(rows), values.split(rows))


def strided(parameter: Tensor, view: View) -> Tensor:
    """The view of a parameter that a box describes, without gradient. Offsets count from the parameter's own first element."""
    _, offset, shape, stride = view
    return parameter.detach().as_strided(shape, stride, parameter.storage_offset() + offset)


class Transport:
    """Runs one program again and again, on the process group whose ranks the plan speaks of.

    ``device``: where staging buffers live; that of the parameters. ``kind``: of the checksums; None: what suits the device.
    Collective: every rank of the group constructs it.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        kind: Kind | None = None,
    ) -> None:
        self.program, self.device, self.group, self.kind = program, torch.device(device), group, kind or kind_on(device)
        self.staging: list[Tensor] = []
        self.seen: dict[tuple[str, str], tuple] = {}
        self.messages = {(one.stream, one.begin): one for step in program.rounds for one in (*step.sends, *step.receives)}
        if dist.is_initialized():
            # NCCL wants all ranks in the first operation of a group on a device; a round may have only two.
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def run(
        self,
        source: Parameters,
        destination: Parameters,
        written: Callable[[str], None] | None = None,
        *,
        checked: bool = False,
        failed: Exception | None = None,
    ) -> TransportReport:
        """Collective: move everything. ``source(key)`` and ``destination(key)`` give the local parameters, at the moment of use;
        ``written(key)`` is called once for each destination parameter that receives anything (a vocabulary shard may be padding
        throughout), when its last element is in place. ``checked``: the report has checksums.

        While round n travels, round n + 1 is packed and a share of the local copies is made; at most ``in_flight`` rounds hold
        buffers. Call ``check_sources`` first.

        A rank where something goes wrong (a parameter is not what the plan or the first run saw, ``source``, ``destination`` or
        ``written`` raises) reads and writes no more, but its messages keep their turns, with whatever is in them, so that no peer waits;
        then all ranks raise. ``failed``: what went wrong on this rank before.
        Raises WeightSyncError on every rank, with what went wrong on which; at once, and on the ranks that notice it, when a peer is gone.
        """
        run = _Run(self, source, destination, written, checked)
        run.error = failed
        with torch.no_grad():
            report = run.all()
        self.agree(run.error)
        return report

    def check_sources(self, source: Parameters, failed: Exception | None = None) -> None:
        """Collective. Raises ValueError on every rank, naming rank and parameter, when a source on any rank lacks, or has another
        dtype, shape or stride than the plan or the first run saw; WeightSyncError when one has no room for the staging buffers, which
        the next run uses. ``failed``: what went wrong on this rank before."""
        staging: list[Tensor] = []
        try:
            if failed is None:
                for key, expected in self.program.sources.items():
                    self._check("training", key, expected, source(key))
                staging = self.buffers()
        except Exception as error:  # noqa: BLE001 (raised on every rank)
            failed = error
        self.agree(failed, half=False)
        self.staging = staging

    def buffers(self) -> list[Tensor]:
        """Memory for the rounds in flight: round n uses number n modulo their count, so each has the size of its largest round."""
        sizes = [sum(_aligned(message.size) for message in (*step.sends, *step.receives)) for step in self.program.rounds]
        return [
            torch.empty(max(sizes[slot :: self.program.in_flight]), dtype=torch.uint8, device=self.device)
            for slot in range(min(self.program.in_flight, len(sizes)))
        ]

    def check_destination(self, key: str, parameter: Tensor) -> None:
        """Raises ValueError when the parameter is not what the plan or the first run saw."""
        self._check("rollout", key, self.program.destinations[key], parameter)

    def _check(self, side: str, key: str, planned: tuple[str, int], parameter: Tensor) -> None:
        """Raises ValueError when a parameter is not what it was planned, or first seen, to be."""
        dtype, extent = planned
        size = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride())) + 1 if parameter.numel() else 0
        if size < extent:
            raise ValueError(
                f"rank {self.program.rank}: {side} parameter {key!r} of shape {tuple(parameter.shape)} spans {size} elements, the plan "
                f"needs {extent}; make a new plan"
            )
        now = (str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape), parameter.stride(), parameter.device.type)
        expected = self.seen.setdefault((side, key), (dtype, *now[1:3], self.device.type))
        if now != expected:
            raise ValueError(
                f"rank {self.program.rank}: {side} parameter {key!r} has (dtype, shape, stride, device) {now}, planned or first seen as "
                f"{expected}; make a new plan"
            )

    def compare(self, report: TransportReport) -> None:
        """Collective: raises WeightSyncError on every rank when a bucket of a checked run arrived with other bytes than were sent."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # the checksums have arrived
        compare(self.messages, report.checksums, self.kind, self.group)

    def agree(self, error: Exception | None, *, half: bool = True) -> None:
        """Collective: see ``verify.agree``. ``half``: weights may have moved."""
        agree(error, HALF_UPDATED if half else "", self.group, self.device)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Run:
    """The state of one run: rounds under way, staging memory in use, writes still to come."""

    def __init__(
        self,
        transport: Transport,
        source: Parameters,
        destination: Parameters,
        written: Callable[[str], None] | None,
        checked: bool,
    ) -> None:
        self.program, self.device, self.group = transport.program, transport.device, transport.group
        self.transport, self.source, self.find, self.written = transport, source, destination, written
        self.checked, self.checksums = checked, dict[Place, Tensor]()
        self.error: Exception | None = None
        self.open: dict[str, Tensor] = {}
        self.left = dict(self.program.writes)
        self.flying: deque[tuple[int, list[dist.Work], list[tuple[Message, Tensor]]]] = deque()
        # From check_sources, where every rank learns of one that has no room; kept no longer than the run.
        self.staging, transport.staging = transport.staging or transport.buffers(), []
        self.sent = self.received = self.copied = 0

    def all(self) -> TransportReport:
        program, next_copy = self.program, 0
        for index in range(len(program.rounds)):
            while len(self.flying) >= program.in_flight:
                self.finish()
            self.issue(index)
            share = (index + 1) * len(program.copies) // len(program.rounds)
            self.copy(next_copy, share)
            next_copy = share
        self.copy(next_copy, len(program.copies))
        while self.flying:
            self.finish()
        left = [key for key, count in self.left.items() if count]
        assert self.error is not None or not left, f"never completed: {left[:5]}"
        staging = sum(buffer.numel() for buffer in self.staging)
        return TransportReport(self.sent, self.received, self.copied, staging, self.checksums)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Keeps what goes wrong on this rank alone for the end, when every rank learns of it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (raised on every rank at the end)
            self.error = error

    def destination(self, key: str) -> Tensor:
        if key not in self.open:
            self.open[key] = self.find(key)
            self.transport.check_destination(key, self.open[key])
        return self.open[key]

    def done(self, key: str) -> None:
        self.left[key] -= 1
        if self.left[key] == 0:
            del self.open[key]
            if self.written is not None:
                self.written(key)

    def copy(self, first: int, last: int) -> None:
        with self.local():
            for copy in self.program.copies[first:last] if self.error is None else ():
                key, _, shape, _ = copy.destination
                target = strided(self.destination(key), copy.destination)
                target.copy_(strided(self.source(copy.source[0]), copy.source))
                self.copied += math.prod(shape) * target.element_size()
                self.done(key)

    def issue(self, index: int) -> None:
        step = self.program.rounds[index]
        ends = list(accumulate((_aligned(message.size) for message in (*step.receives, *step.sends)), initial=0))
        staging = self.staging[index % len(self.staging)]
        placed = [(message, staging[at : at + message.size]) for message, at in zip((*step.receives, *step.sends), ends)]
        incoming, outgoing = placed[: len(step.receives)], placed[len(step.receives) :]
        for message, buffer in outgoing:
            self.packed(message, buffer)
            self.sent += message.size
        operations = [dist.P2POp(dist.irecv, buffer, self.peer(message), self.group) for message, buffer in incoming]
        operations += [dist.P2POp(dist.isend, buffer, self.peer(message), self.group) for message, buffer in outgoing]
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self.failure(index, error) from error
        self.flying.append((index, works, incoming))

    def finish(self) -> None:
        index, works, incoming = self.flying.popleft()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.failure(index, error) from error
        for message, buffer in incoming:
            self.unpacked(message, buffer)
            self.received += message.size

    def packed(self, message: Message, buffer: Tensor) -> None:
        if self.error is None:
            with self.local():
                sums = RunningChecksum(buffer, self.transport.kind) if self.checked else None
                pack(message, self.source, buffer, sums)
                self.keep(message, sums)

    def unpacked(self, message: Message, buffer: Tensor) -> None:
        if self.error is None:
            with self.local():
                sums = RunningChecksum(buffer, self.transport.kind) if self.checked else None
                unpack(message, buffer, self.destination, self.done, sums)
                self.keep(message, sums)

    def keep(self, message: Message, sums: RunningChecksum | None) -> None:
        if sums is not None:
            self.checksums[message.stream, message.begin] = sums.result()

    def peer(self, message: Message) -> int:
        return message.peer if self.group is None else dist.get_global_rank(self.group, message.peer)

    def failure(self, index: int, error: RuntimeError) -> WeightSyncError:
        step = self.program.rounds[index]
        parts = [
            f"{way} rank {message.peer}: {message.contents}"
            for way, messages in (("to", step.sends), ("from", step.receives))
            for message in messages
        ]
        return WeightSyncError(
            f"rank {self.program.rank}: round {step.number} of the weight sync failed ({'; '.join(parts[:8])}): {error}. {HALF_UPDATED}"
        )


def tensors(parameters: Mapping[str, Tensor]) -> Parameters:
    """The lookup of a plain mapping. Raises ValueError naming a key that it lacks."""

    def get(key: str) -> Tensor:
        if key not in parameters:
            raise ValueError(f"parameter {key!r} is in the plan but not among the {len(parameters)} parameters of this process")
        return parameters[key]

    return get


def exchange(
    held: Sequence[Boxes], wanted: Sequence[Boxes], group: dist.ProcessGroup | None = None
) -> tuple[dict[int, list[Boxes]], dict[int, list[Boxes]]]:
    """Collective: ``(held, wanted)`` of every rank that holds or wants something, geometry only but for the caller's own."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    everyone: list = [None] * world
    dist.all_gather_object(everyone, ([box.geometry() for box in held], [box.geometry() for box in wanted]), group)
    everyone[rank] = (list(held), list(wanted))
    return tuple({peer: sides[i] for peer, sides in enumerate(everyone) if sides[i]} for i in (0, 1))
