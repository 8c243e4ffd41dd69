"""A checkpoint on its way to the disk, from the copied state to the sealed folder."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from megatron_rl.checkpoints.directory import PARTIAL
from megatron_rl.checkpoints.part_writer import PartWriter
from megatron_rl.checkpoints.sealing import seal
from megatron_rl.errors import first_line
from megatron_rl.runtime import disk

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class _SaveReport:
    """How far a rank is."""

    sealed: bool
    error: str | None = None  # why it will not get further
    is_user: bool = False  # the user can fix it (a full disk)


@dataclass
class CheckpointSave:
    """What ``Policy.start_save`` returns on every rank.

    Args:
        info: on rank 0, which seals the checkpoint; None elsewhere.
        after: called in rank 0's thread when the checkpoint is whole.
    """

    path: Path
    writer: PartWriter
    num_bytes: int
    num_ranks: int
    info: Mapping[str, Any] | None
    after: Callable[[], None] | None
    _sealed: bool = False
    _error: Exception | None = None
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        # daemon: a process that ends by an error does not wait for it, see ``end``.
        self._sealer = threading.Thread(target=self._seal, daemon=True)
        if self.info is not None:
            self._sealer.start()

    def check(self, gather: Gather, *, wait: bool = False) -> bool:
        """Collective: whether the checkpoint is whole, on all ranks alike.

        Args:
            gather: gives the values of all ranks, in rank order.
            wait: until it is whole.

        Raises:
            ValueError: the disk of some rank is full.
            RuntimeError: some rank could not write for another reason.
        """
        if not wait:
            return self._reports(gather)[0].sealed
        self.writer.join()
        # Before the sealer is waited for: where a rank has failed, its receipt will never come.
        self._reports(gather)
        if self.info is not None:
            self._sealer.join()
        return self._reports(gather)[0].sealed

    def end(self, within_s: float) -> None:
        """Not collective: waits for this process's threads, for a run that ends by an error."""
        ends_at = monotonic() + within_s
        self.writer.join(within_s)
        if self.info is not None:
            self._sealer.join(max(0.0, ends_at - monotonic()))

    def _reports(self, gather: Gather) -> list[_SaveReport]:
        reports: list[_SaveReport] = gather(self._report())
        for rank, report in enumerate(reports):
            if report.error is None:
                continue
            # Without this part the checkpoint will never be whole.
            self._cancelled.set()
            if report.is_user:
                raise ValueError(report.error)
            raise RuntimeError(
                f"checkpoint {self.path.name}: rank {rank} could not write its part: {report.error}"
            )
        return reports

    def _report(self) -> _SaveReport:
        error = self.writer.error or self._error
        if error is None:
            return _SaveReport(self._sealed)
        partial = self.path.with_name(self.path.name + PARTIAL)
        # Raised once more, so that ``room_for`` turns what a full disk has caused into an error of
        # the user's.
        try:
            with disk.room_for(partial, self.num_bytes, f"the checkpoint {self.path.name}"):
                raise error
        except ValueError as raised:
            return _SaveReport(False, str(raised), is_user=True)
        except Exception as raised:  # noqa: BLE001 (sent to all ranks, which raise it)
            return _SaveReport(False, f"{type(raised).__name__}: {first_line(raised)}")

    def _seal(self) -> None:
        assert self.info is not None
        try:
            if seal(self.path, self.num_ranks, self.info, self._cancelled):
                if self.after is not None:
                    self.after()
                self._sealed = True
        except Exception as error:  # noqa: BLE001 (raised by ``check``)
            self._error = error
