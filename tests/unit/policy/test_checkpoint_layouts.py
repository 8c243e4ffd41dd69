"""The layouts that the benchmark of large checkpoints simulates are those of real policies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rl.policy.state.checkpoint import sharded_model
from megatron_rl.policy.state.stored_state import StoredParameter, stored_parameters
from tests.launch import REPO
from tests.ranks import on_ranks
from tests.zoo import save_tiny_model, tiny_policy
from tools.planning.training_shards import TrainingLayout


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen2", "qwen3_moe"):
        save_tiny_model(family, folder / family)
    return folder


def facts(stored: list[StoredParameter]) -> dict[object, object]:
    """By array and place in it; spans aside, for megatron has its own order of parameters."""
    found = {}
    for item in stored:
        boxes = sorted(item.boxes, key=lambda box: box.first)
        found[item.key, boxes[0].offsets] = (item.array_shape, boxes, item.is_main, item.is_expert)
    assert len(found) == len(stored)
    return found


@on_ranks(4)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2", {"tensor": 2}),
        ("qwen2", {"pipeline": 2}),
        ("qwen3_moe", {"expert": 2}),
        ("qwen3_moe", {"pipeline": 2, "expert": 2}),
    ],
)
def test_what_ranks_store_is_what_the_benchmark_says(models, family, layout):
    sys.path.insert(0, str(REPO / "tools/bench"))
    from checkpoint_layouts import Layout, stored_by

    layout = {**layout, "distributed_optimizer": True}
    policy = tiny_policy(models / family, layout, "bfloat16")
    live = stored_parameters(sharded_model(policy), policy.optimizer)
    simulated = Layout(policy.arch, TrainingLayout(policy.parallel, 4, vocab_multiple=16))
    declared = stored_by(simulated, dist.get_rank())
    assert facts(live) == facts(declared)

    def written(stored: list[StoredParameter]) -> int:
        return sum(end - start for item in stored for start, end in [item.writes])

    # Nearly half of what both data-parallel ranks have: what a rank gets ends at a padded length.
    assert written(declared) == pytest.approx(written(live), rel=0.1)
    assert sum(len(item.reads) for item in declared) == sum(len(item.reads) for item in live)
