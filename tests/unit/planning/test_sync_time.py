"""Simulated seconds of small plans, worked out by hand."""

from __future__ import annotations

import pytest

from megatron_rl.types import Shard
from megatron_rl.weight_sync.planner.plan import Plan, PlanSettings, make_plan
from megatron_rl.weight_sync.planner.shards import ShardGroup, collect
from tools.planning.sync_time import Links, least_seconds, simulated_seconds

LINKS = Links(nvlink_gb_s=4, network_gb_s=1)
NS = 1e-9


def whole(key: str = "p") -> list[ShardGroup]:
    """16 numbers of four bytes, in two buckets of 32 bytes."""
    return collect([Shard("w", (16,), (0,), (16,), 0, (1,), key, "float32")])


def plan(receivers: range, gpus_per_node: int, rounds_in_flight: int = 2) -> Plan:
    """From rank 0 to each of the others."""
    targets = {rank: whole() for rank in receivers}
    replicas = [[rank] for rank in receivers]
    settings = PlanSettings(32, rounds_in_flight, gpus_per_node, replicas=replicas)
    return make_plan({0: whole()}, targets, settings)


def test_one_message_after_the_other() -> None:
    """64 bytes at 1 GB/s: 64 ns; on one node at 4 GB/s: 16 ns; 5 us more for each of two
    messages."""
    assert simulated_seconds(plan(range(1, 2), 1), LINKS) == pytest.approx(64 * NS)
    assert simulated_seconds(plan(range(1, 2), 2), LINKS) == pytest.approx(16 * NS)
    slow = Links(nvlink_gb_s=4, network_gb_s=1, latency_us=5)
    assert simulated_seconds(plan(range(1, 2), 1), slow) == pytest.approx(64 * NS + 1e-5)


@pytest.mark.parametrize("rounds_in_flight", [1, 2])
def test_a_chain_is_a_pipeline(rounds_in_flight: int) -> None:
    """Three nodes in a row: the first has all after 64 ns, each further one a bucket of 32 ns
    later."""
    chain = plan(range(1, 4), 1, rounds_in_flight)
    assert simulated_seconds(chain, LINKS) == pytest.approx((64 + 2 * 32) * NS)
    assert least_seconds(chain, LINKS) == pytest.approx(64 * NS)


def test_mates_get_it_over_their_own_link() -> None:
    """Ranks 2 and 3 share a node: each gets half across, 32 ns one behind the other on the source's
    link, and passes it on, 8 ns at 4 GB/s."""
    pair = plan(range(2, 4), 2)
    assert least_seconds(pair, LINKS) == pytest.approx(64 * NS)
    assert simulated_seconds(pair, LINKS) == pytest.approx((64 + 8) * NS)


def test_nothing_takes_no_time() -> None:
    own = make_plan({0: whole()}, {0: whole()}, PlanSettings(bucket_bytes=32))
    assert simulated_seconds(own, LINKS) == least_seconds(own, LINKS) == 0
