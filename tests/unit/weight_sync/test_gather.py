"""The gather sync with a policy and an engine made of plain dictionaries."""

import pytest
import torch

from megatron_rl.errors import WeightSyncError
from megatron_rl.runtime import digest
from megatron_rl.runtime.digest import tensor_digest
from megatron_rl.weight_sync import checks, gather
from megatron_rl.weight_sync.checks import verify_tensors
from megatron_rl.weight_sync.failure import Stage, SyncProgress
from megatron_rl.weight_sync.gather import GatherSync

WEIGHTS = {"a": torch.ones(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16)}


class Source:
    gathered_bytes_sent = 0

    def gathered_weights(self):
        for item in WEIGHTS.items():
            self.gathered_bytes_sent += 3
            yield item


class Target:
    """Keeps what it gets."""

    def __init__(self):
        self.weight_version, self.received = 0, {}

    def load_weights(self, weights, version, confirm):
        self.received = dict(weights)
        confirm()
        self.weight_version = version


class Refusing(Target):
    def load_weights(self, weights, version, confirm):
        next(iter(weights))
        raise OSError("no room")


def test_report_and_content():
    target = Target()
    report = GatherSync(Source(), target, verify=True).sync(7)
    assert (report.version, report.num_tensors, report.bytes_sent, report.bytes_total) == (
        7,
        2,
        6,
        24 + 10,
    )
    assert (
        target.weight_version == 7
        and target.received.keys() == WEIGHTS.keys()
        and report.seconds > 0
    )


def test_changed_bytes_are_named(monkeypatch):
    """Another rank has the same but for one tensor."""
    other = {name: tensor_digest(tensor + (name == "b")) for name, tensor in WEIGHTS.items()}
    monkeypatch.setattr(
        checks, "all_gather", lambda value, schema: [value, _same_kind(value, other)]
    )
    target = Target()
    with pytest.raises(
        WeightSyncError, match=r"1 of 2 tensors differ: b \(other bytes on rank 1 than on rank 0\)"
    ):
        GatherSync(Source(), target, verify=True).sync(1)
    assert target.weight_version == 0, "wrong weights never count as a version"
    GatherSync(Source(), target, verify=False).sync(1)
    assert target.weight_version == 1


@pytest.mark.parametrize(("checked", "times"), [(True, 1), (False, 0)])
def test_a_digest_is_taken_once_and_only_to_be_compared(monkeypatch, checked, times):
    taken = []
    monkeypatch.setattr(digest, "tensor_digest", lambda tensor: taken.append(tensor) or "")
    GatherSync(Source(), Target(), verify=checked).sync(1)
    assert len(taken) == times * len(WEIGHTS)


def test_an_engine_that_refuses_keeps_its_rank_gathering_to_the_end():
    """Its peers gather too, and would wait for it."""
    source = Source()
    with pytest.raises(OSError, match="no room"):
        GatherSync(source, Refusing(), verify=True).sync(1)
    assert source.gathered_bytes_sent == 6


class Failing(Source):
    """Fails inside its second gather, where its peers cannot be told."""

    def gathered_weights(self):
        yield "a", WEIGHTS["a"]
        raise OSError("the link is down")


class Late(Target):
    def load_weights(self, weights, version, confirm):
        super().load_weights(weights, version, confirm)
        raise OSError("no room for the caches")


@pytest.mark.parametrize(
    ("source", "target", "told"),
    [
        (Failing(), Target(), []),
        (Source(), Refusing(), ["no room"]),
        (Source(), Late(), ["None", "no room for the caches"]),  # the first: before the comparison
    ],
)
def test_peers_are_told_where_they_can_be(monkeypatch, source, target, told):
    calls = []
    monkeypatch.setattr(gather, "raise_everywhere", lambda error: calls.append(str(error)))
    with pytest.raises(OSError, match=r"the link is down|no room"):
        GatherSync(source, target, verify=False).sync(1)
    assert calls == told


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (Stage.NOT_BEGUN, "did not begin, nothing has moved"),
        (Stage.READYING, "did not begin"),
        (Stage.OPENING, "failed"),
        (Stage.FINISHING, "failed"),
        (Stage.COMPLETE, "is complete, but the server did not resume"),
    ],
)
def test_a_failure_says_how_far_the_sync_got(stage, words):
    assert str(SyncProgress(3, stage)) == f"the update to weight version 3 {words}"
    assert stage.moved == (words not in ("did not begin", "did not begin, nothing has moved"))


def test_ranks_are_named(monkeypatch):
    """Three ranks: the second has other bytes of one tensor, the third lacks another."""
    good = {"a": "1", "b": "2"}
    tables = [good, {**good, "a": "9"}, {"a": "1"}]
    monkeypatch.setattr(
        checks, "all_gather", lambda value, schema: [_same_kind(value, table) for table in tables]
    )
    words = (
        r"2 of 2 tensors differ: a \(other bytes on rank 1 than on rank 0\); b \(not sent on"
        r" rank 2\)"
    )
    with pytest.raises(WeightSyncError, match=words):
        verify_tensors(good)


def test_equal_on_all_ranks(monkeypatch):
    calls = []
    good = {"a": "1", "b": "2"}

    def all_gather(value, schema):
        calls.append(value)
        return [value] * 3

    monkeypatch.setattr(checks, "all_gather", all_gather)
    verify_tensors(good)
    assert len(calls) == 1 and isinstance(calls[0], str), "one digest a rank, no tables"


def test_many_differences_are_cut_short(monkeypatch):
    tables = [{f"t{i:02}": str(i + shift) for i in range(20)} for shift in (0, 1)]
    monkeypatch.setattr(
        checks, "all_gather", lambda value, schema: [_same_kind(value, table) for table in tables]
    )
    with pytest.raises(WeightSyncError, match=r"20 of 20 .*t07 \(.*\); and 12 more$"):
        verify_tensors(tables[0])


def _same_kind(value, table):
    """Digests when digests are exchanged, tables when tables are."""
    return table if isinstance(value, dict) else checks.combined_digest(table)
