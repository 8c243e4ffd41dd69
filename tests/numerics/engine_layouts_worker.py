"""Engines cut into pipeline stages, or with whole experts on their tensor ranks: what they sample,
and that both methods of weight sync fill them.

Usage: ``engine_layouts_worker.py FOLDER CASE...``, see ``CASES``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.planning.parameter_counts import engine_parameters
from megatron_rl.weight_sync.gather import GatherSync
from tests.numerics import rollout_models as small
from tests.numerics.reshard_parts import (
    OTHER,
    PROMPTS,
    START,
    WORLD,
    answers,
    engine_of,
    loaded_of,
    path_of,
    planned,
    policy_of,
)
from tests.numerics.reshard_worker import equal

MAX_GAP = 1e-4


def stages_follow_the_policy(arch: str, layout: dict[str, int], cut: dict[str, Any]) -> None:
    engine = engine_of(arch, **cut)
    loaded, policy = loaded_of(engine), policy_of(arch, layout)
    try:
        gaps = [gap(engine, arch, START)]
        GatherSync(policy, engine, verify=True).sync(1)
        gathered, want = loaded.take(), answers(engine)
        gaps.append(gap(engine, arch, OTHER))
        both_syncs_agree(policy, engine, arch, loaded, gathered)
        assert answers(engine) == (*want[:2], {3})
        assert max(gaps) <= MAX_GAP, gaps
        holds_what_is_planned(engine, policy.arch)
    finally:
        policy.close()


def whole_experts_are_filled(arch: str, layout: dict[str, int], cut: dict[str, Any]) -> None:
    """Without a forward: vLLM's CPU kernel of experts crashes where it has not all of them."""
    engine = engine_of(arch, **cut)
    loaded, policy = loaded_of(engine), policy_of(arch, layout)
    try:
        GatherSync(policy, engine, verify=True).sync(1)
        both_syncs_agree(policy, engine, arch, loaded, loaded.take())
        holds_what_is_planned(engine, policy.arch)
        first = "experts.0.gate_proj"
        mine = [shard for shard in engine.weight_shards() if first in shard.name]
        assert all(shard.shape == shard.full for shard in mine), "whole"
        assert bool(mine) == (WORLD.rank % cut["tensor"] == 0), "on the first tensor rank alone"
    finally:
        policy.close()


def both_syncs_agree(
    policy: Any, engine: Any, arch: str, loaded: Any, gathered: dict[str, Tensor]
) -> None:
    """The planned sync leaves the bits that the gathered one left, from other weights."""
    weights = load_file(path_of(arch, START) / "model.safetensors")
    engine.load_weights(iter(weights.items()), 2)
    assert not equal(loaded.take(), gathered)
    sync = planned(policy, engine)
    report = sync.sync(3)
    assert equal(loaded.take(), gathered)
    sent = sum(WORLD.all_gather(report.bytes_sent))
    assert sent == sync.plan.bytes_sent == sync.plan.lower_bound


def gap(engine: Any, arch: str, seed: int) -> float:
    """The largest |engine - transformers|; the same answers on all ranks of a replica."""
    groups = engine.generate(PROMPTS, small.sampling())
    everybody = WORLD.all_gather(small.tokens(groups))
    assert all(tokens == everybody[0] for tokens in everybody)
    return small.logprob_gap(small.build(arch, seed), PROMPTS, groups, lambda logits: logits)


def holds_what_is_planned(engine: Any, arch: Any) -> None:
    """The numbers of this rank's layers are those of the memory plan."""
    shards = [each for each in engine.weight_shards() if each.name.startswith("model.layers.")]
    held = sum(math.prod(shard.shape) for shard in shards)
    config = engine._config
    whole, ends = (
        sum(numbers * tensors for _, numbers, tensors in engine_parameters(each, config))
        for each in (arch, replace(arch, num_layers=0))
    )
    assert held == whole - ends, (held, ends)


CASES: dict[str, Callable[[], None]] = {
    "stages": partial(
        stages_follow_the_policy, "qwen3", dict(tensor=2), dict(tensor=1, pipeline=2)
    ),
    "stages of a tied model": partial(
        stages_follow_the_policy, "qwen2_tied", dict(pipeline=2), dict(tensor=1, pipeline=2)
    ),
    "stages of experts": partial(
        stages_follow_the_policy, "qwen3_moe", dict(expert=2), dict(tensor=1, pipeline=2)
    ),
    "whole experts": partial(
        whole_experts_are_filled, "qwen3_moe", dict(tensor=2), dict(tensor=2, expert_parallel=True)
    ),
    "stages of tensor ranks": partial(
        stages_follow_the_policy, "qwen3", dict(tensor=2), dict(tensor=2, pipeline=2)
    ),
}

if __name__ == "__main__":
    small.run_cases({name: CASES[name] for name in sys.argv[2:]})
