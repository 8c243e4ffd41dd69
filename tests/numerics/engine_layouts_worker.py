"""Engines cut into pipeline stages, or with whole experts on their tensor ranks: what they sample,
and that both methods of weight sync fill them.

Usage: ``engine_layouts_worker.py FOLDER CASE...``, see ``CASES``.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

from safetensors.torch import load_file

from megatron_rl.planning.parameter_counts import engine_counts
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
# Name -> architecture, layout of the policy, layout of the engine.
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "stages": ("qwen3", dict(tensor=2), dict(tensor=1, pipeline=2)),
    "stages of a tied model": ("qwen2_tied", dict(pipeline=2), dict(tensor=1, pipeline=2)),
    "stages of experts": ("qwen3_moe", dict(expert=2), dict(tensor=1, pipeline=2)),
    "whole experts": ("qwen3_moe", dict(tensor=2), dict(tensor=2, expert_parallel=True)),
    "both": ("qwen3_moe", dict(tensor=2), dict(tensor=2, pipeline=2, expert_parallel=True)),
}


def engine_follows_the_policy(arch: str, layout: dict[str, int], cut: dict[str, Any]) -> None:
    engine = engine_of(arch, **cut)
    loaded, policy = loaded_of(engine), policy_of(arch, layout)
    try:
        gaps = [gap(engine, arch, START)]
        GatherSync(policy, engine, verify=True).sync(1)
        gathered, want = loaded.take(), answers(engine)
        gaps.append(gap(engine, arch, OTHER))
        weights = load_file(path_of(arch, START) / "model.safetensors")
        engine.load_weights(iter(weights.items()), 2)
        assert not equal(loaded.take(), gathered) and answers(engine)[:2] != want[:2]
        sync = planned(policy, engine)
        report = sync.sync(3)
        assert equal(loaded.take(), gathered)
        assert answers(engine) == (*want[:2], {3})
        sent = sum(WORLD.all_gather(report.bytes_sent))
        assert sent == sync.plan.bytes_sent == sync.plan.lower_bound
        assert max(gaps) <= MAX_GAP, gaps
        holds_what_is_planned(engine, policy.arch)
    finally:
        policy.close()


def gap(engine: Any, arch: str, seed: int) -> float:
    """The largest |engine - transformers|; the same answers on all ranks of a replica."""
    groups = engine.generate(PROMPTS, small.sampling())
    everybody = WORLD.all_gather(small.tokens(groups))
    assert all(tokens == everybody[0] for tokens in everybody)
    return small.logprob_gap(small.build(arch, seed), PROMPTS, groups, lambda logits: logits)


def holds_what_is_planned(engine: Any, arch: Any) -> None:
    """The numbers of this rank are those of the memory plan, but for rows that pad a vocabulary."""
    config = engine._config
    stage = WORLD.rank % config.ranks // config.tensor
    held = sum(math.prod(shard.shape) for shard in engine.weight_boxes())
    plan = engine_counts(arch, config)[stage]
    padding = 2 * 64 * arch.hidden_size
    assert plan - padding <= held <= plan, (stage, held, plan)


if __name__ == "__main__":
    cases = {name: partial(engine_follows_the_policy, *CASES[name]) for name in sys.argv[2:]}
    small.run_cases(cases)
