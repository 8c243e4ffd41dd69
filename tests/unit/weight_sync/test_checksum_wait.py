"""On an accelerator the checksums of a transfer arrive in the order of one stream: that one is
waited for before they are read, and nothing else, for an engine may be sampling on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from megatron_rl.weight_sync import transport
from megatron_rl.weight_sync.planner.flows import Stream
from megatron_rl.weight_sync.planner.program import Program
from megatron_rl.weight_sync.planner.schedule import BucketId
from megatron_rl.weight_sync.transport import Transport, TransportReport

NOTHING = Program(0, (), (), 1, sources={}, targets={}, uses={})
BUCKET = BucketId(Stream(0, 1, "float32"), 0, 0)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the comparison finds in the checksum."""
    values: list[int] = []

    def compare(messages: Any, checksums: Mapping[BucketId, Tensor], group: Any) -> None:
        values.append(int(checksums[BUCKET]))

    monkeypatch.setattr(transport, "compare", compare)
    return values


def refuse(*_: Any) -> NoReturn:
    raise AssertionError("waits for the whole device, or for a device where there is none")


def played(monkeypatch: pytest.MonkeyPatch, current_stream: Callable[..., Any]) -> None:
    """Stands for what torch asks of an accelerator."""
    for module in (torch.accelerator, torch.cuda):
        monkeypatch.setattr(module, "synchronize", refuse)
        monkeypatch.setattr(module, "current_stream", current_stream)


def report_of(checksum: Tensor) -> TransportReport:
    return TransportReport(0, 0, 0, 0, {BUCKET: checksum})


def test_the_current_stream_is_waited_for_before_checksums_are_read(
    monkeypatch: pytest.MonkeyPatch, read: list[int]
) -> None:
    checksum = torch.zeros(1, dtype=torch.uint8)
    of: list[torch.device] = []

    def current_stream(device: torch.device) -> SimpleNamespace:
        of.append(device)
        # What is still under way to the host is there once the stream has come so far.
        return SimpleNamespace(synchronize=lambda: checksum.fill_(7))

    played(monkeypatch, current_stream)
    Transport(NOTHING, "cuda:3").compare(report_of(checksum))
    assert of == [torch.device("cuda", 3)], "of the device that the transfer ran on"
    assert read == [7]


def test_a_cpu_has_no_stream(monkeypatch: pytest.MonkeyPatch, read: list[int]) -> None:
    played(monkeypatch, refuse)
    Transport(NOTHING).compare(report_of(torch.full((1,), 5, dtype=torch.uint8)))
    assert read == [5]
