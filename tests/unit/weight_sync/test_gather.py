"""The gather sync with a policy and an engine made of plain dictionaries."""

import pytest
import torch

from megatron_rl.runtime.digest import WeightSyncError, tensor_digest
from megatron_rl.weight_sync import verify
from megatron_rl.weight_sync.gather import GatherSync
from megatron_rl.weight_sync.verify import verify_transfer

WEIGHTS = {"a": torch.ones(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16)}


class Source:
    gathered_bytes_sent = 0

    def gathered_weights(self):
        for item in WEIGHTS.items():
            self.gathered_bytes_sent += 3
            yield item


class Target:
    """Keeps what it gets, after ``change``."""

    def __init__(self, change=lambda name, tensor: (name, tensor)):
        self.change, self.weight_version, self.received = change, 0, {}

    def load_weights(self, weights, version, confirm):
        self.received = dict(self.change(name, tensor) for name, tensor in weights)
        digests = {name: tensor_digest(tensor) for name, tensor in self.received.items()}
        confirm(digests)
        self.weight_version = version
        return digests


def test_report_and_content():
    target = Target()
    report = GatherSync(Source(), target, verify=True).sync(7)
    assert (report.version, report.num_tensors, report.bytes_sent, report.bytes_total) == (7, 2, 6, 24 + 10)
    assert target.weight_version == 7 and target.received.keys() == WEIGHTS.keys() and report.seconds > 0


def test_changed_bytes_are_named():
    target = Target(lambda name, tensor: (name, tensor + (name == "b")))
    with pytest.raises(WeightSyncError, match=r"1 of 2 tensors differ: b \(received with other bytes on rank 0\)"):
        GatherSync(Source(), target, verify=True).sync(1)
    assert target.weight_version == 0, "wrong weights never count as a version"
    GatherSync(Source(), target, verify=False).sync(1)
    assert target.weight_version == 1


def test_an_engine_that_refuses_keeps_its_rank_gathering_to_the_end():
    """Its peers gather too, and would wait for it."""

    def refuse(name, tensor):
        raise OSError("no room")

    source = Source()
    with pytest.raises(OSError, match="no room"):
        GatherSync(source, Target(refuse), verify=True).sync(1)
    assert source.gathered_bytes_sent == 6


def test_a_renamed_tensor_is_named_twice():
    target = Target(lambda name, tensor: ("c" if name == "b" else name, tensor))
    with pytest.raises(WeightSyncError, match=r"2 of 3 tensors differ: b \(not received on rank 0\); c \(not sent on rank 0\)"):
        GatherSync(Source(), target, verify=True).sync(1)


def test_ranks_are_named(monkeypatch):
    """Three ranks: the second sends other bytes of one tensor, the third never receives another."""
    good = {"a": "1", "b": "2"}
    tables = [(good, good), ({**good, "a": "9"}, {**good, "a": "9"}), (good, {"a": "1"})]
    monkeypatch.setattr(verify, "_all_gather", lambda value: [_same_kind(value, pair) for pair in tables])
    with pytest.raises(WeightSyncError) as caught:
        verify_transfer(good, good)
    text = str(caught.value)
    assert "2 of 2 tensors differ" in text and "b (not received on rank 2)" in text
    assert "a (sent with other bytes on rank 1, received with other bytes on rank 1)" in text


def test_equal_on_all_ranks(monkeypatch):
    calls = []
    good = {"a": "1", "b": "2"}

    def all_gather(value):
        calls.append(value)
        return [_same_kind(value, (good, good))] * 3

    monkeypatch.setattr(verify, "_all_gather", all_gather)
    verify_transfer(good, good)
    assert len(calls) == 1 and all(isinstance(part, str) for part in calls[0]), "two digests a rank, no tables"


def test_many_differences_are_cut_short():
    sent, received = ({f"t{i:02}": str(i + shift) for i in range(20)} for shift in (0, 1))
    with pytest.raises(WeightSyncError, match=r"20 of 20 .*t07 \(.*\); and 12 more$"):
        verify_transfer(sent, received)


def _same_kind(value, pair):
    """Digests when digests are exchanged, tables when tables are."""
    return pair if isinstance(value[0], dict) else tuple(verify.combined_digest(table) for table in pair)
