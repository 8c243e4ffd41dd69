"""The engine's stream and the policy's wait for each other, and neither takes the other's place."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.engine.side_effects import EngineStream
from tests.unit.engine.streams_record import StreamRecord


@pytest.fixture
def record(monkeypatch):
    return StreamRecord(monkeypatch)


def test_each_waits_for_the_other(record):
    stream = EngineStream()
    with stream.entered():
        assert record.current == "engine"
        assert record.waits == [("engine", "policy")], "what the policy queued comes first"
    assert record.current == "policy"
    assert record.waits == [("engine", "policy"), ("policy", "engine")]


def test_an_exception_leaves_the_policys_stream_current(record):
    with pytest.raises(KeyError), EngineStream().entered():
        raise KeyError
    assert record.current == "policy"
    assert record.waits[-1] == ("policy", "engine")


def test_a_stream_that_the_engine_sets_is_its_own_from_then_on(record):
    """It remembers that stream; the policy must not be left in it."""
    stream = EngineStream()
    with stream.entered():
        torch.cuda.set_stream(record.make())
    assert record.current == "policy"
    assert record.waits[-1] == ("policy", "other0")
    with stream.entered():
        assert record.current == "other0"


def test_without_a_device_nothing_happens(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.delattr(torch.cuda, name)
    with EngineStream().entered():
        pass
