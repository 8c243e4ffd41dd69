"""Rows from the ranks that sampled them to those that train them, on 1, 2 and 4 of four ranks.

``test_data_plane.py`` runs it.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.data.token_rows import TokenRows
from megatron_rl.policy.batches.packing_plan import PlanRule, plan_microbatches
from megatron_rl.policy.batches.work_model import WorkModel
from megatron_rl.rollouts.rows.exchange import exchange_rows, token_rows
from megatron_rl.rollouts.rows.ownership import Route, owning_ranks
from megatron_rl.rollouts.rows.partials import (
    gathered,
    mismatch_of_partials,
    mismatch_partials,
    response_sums,
    token_mean,
)
from megatron_rl.runtime.launch import World
from megatron_rl.types import Completion

GROUP_SIZES = (4, 4, 3, 4, 1, 4, 4)
NUM_ROWS = sum(GROUP_SIZES)
LENGTHS = np.random.default_rng(5).integers(1, 4000, NUM_ROWS)


def completion(row: int) -> Completion:
    """What was sampled as ``row``, whoever asks."""
    draw = np.random.default_rng(row)
    length = int(LENGTHS[row])
    ids = draw.integers(0, 150_000, length).tolist()
    return Completion(ids, (-draw.exponential(0.3, length)).tolist(), False, 1)


def old_logprobs(rows: TokenRows) -> np.ndarray:
    """Those of the trainer: a function of the row, as with a policy that does not round."""
    noise = [
        np.random.default_rng(1000 + row).normal(0, 0.02, length)
        for row, length in zip(rows.rows, rows.lengths, strict=True)
    ]
    together = np.concatenate([np.empty(0), *noise])
    return rows.columns["sampler_logprobs"] + together.astype(np.float32)


def owned(world: World) -> TokenRows:
    """The rows this rank trains."""
    ranks = list(range(world.size))
    # Any: a response is where there was room for it.
    source = np.random.default_rng(7).integers(0, world.size, NUM_ROWS)
    plan = plan_microbatches(
        LENGTHS.tolist(), range(NUM_ROWS), PlanRule(world.size, 8192, 1, WorkModel(2000))
    )
    route = Route(LENGTHS, source, owning_ranks([plan], NUM_ROWS, ranks))
    sampled = np.flatnonzero(source == world.rank)
    held = token_rows(sampled, [completion(row) for row in sampled.tolist()])
    received = exchange_rows(held, route, world)
    assert sorted(received.rows.tolist()) == sorted(
        row for rows in plan[world.rank] for row in rows
    )
    back = exchange_rows(received, replace(route, source=route.target, target=source), world)
    back = back.take(held.rows)
    for name, values in held.columns.items():
        assert np.array_equal(back.columns[name], values), "there and back again"
    return received


def metrics(world: World, rows: TokenRows) -> dict[str, float]:
    old = old_logprobs(rows)
    partials = mismatch_partials(old, rows.columns["sampler_logprobs"], rows.lengths)
    entropies = response_sums(old, rows.lengths)
    table = gathered(world, rows.rows, np.column_stack([partials, entropies]), NUM_ROWS)
    return {
        **mismatch_of_partials(table[:, :4], int(LENGTHS.sum())),
        "rollout/entropy": token_mean(table[:, 4], LENGTHS),
    }


def check_tokens(rows: TokenRows) -> None:
    views = zip(rows.rows, rows.views("token_ids"), rows.views("sampler_logprobs"), strict=True)
    for row, ids, logprobs in views:
        sampled = completion(int(row))
        assert np.array_equal(ids, np.asarray(sampled.token_ids))
        assert np.array_equal(logprobs, np.asarray(sampled.sampler_logprobs))


def reports() -> list[dict[str, Any]]:
    """What this rank, one of four, saw in the groups of 1, 2 and 4 ranks it belongs to."""
    seen = []
    for size in (1, 2, 4):
        group = dist.new_group(list(range(size)))
        if dist.get_rank() >= size:
            continue
        world = World(dist.get_rank(), size, dist.get_rank(), "test", group)
        rows = owned(world)
        check_tokens(rows)
        report = {
            "size": size,
            "rows": len(rows.rows),
            "tokens": sha256(rows.columns["token_ids"].tobytes()).hexdigest(),
            "metrics": {key: value.hex() for key, value in metrics(world, rows).items()},
        }
        seen.append(report)
    return seen
