"""Megatron policy and vLLM on every rank: the planned sync leaves every worker with the bits that
the gathered one leaves, and sends no byte more than is wanted elsewhere.

Usage: ``reshard_worker.py FOLDER CASE...``, a case being ``<arch>:<train layout>:<rollout
tensor>``, for example ``qwen3:tensor=2,pipeline=2:1``, or the name of a fault.
"""

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.config.model_config import ITEM_BYTES
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.types import Shard
from megatron_rl.weight_sync.gather import GatherSync
from megatron_rl.weight_sync.planner.shards import collect
from tests.numerics import reshard_faults
from tests.numerics import rollout_models as small
from tests.numerics.reshard_parts import (
    OTHER,
    START,
    WORLD,
    Loaded,
    answers,
    engine_of,
    loaded_of,
    path_of,
    planned,
    policy_of,
)
from tests.unit.weight_sync.training_tables import TrainLayout, shape_from_hf, train_shards
from tools.planning.engine_tables import RolloutLayout, rollout_shards
from tools.planning.shard_table import expand

SHORT = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep", "expert_tensor": "etp"}


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    assert one.keys() == two.keys(), one.keys() ^ two.keys()
    return all(torch.equal(value, two[name]) for name, value in one.items())


def window(shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(shard.start, shard.shape, strict=True))


def masks(shards: list[Shard]) -> dict[str, np.ndarray]:
    """Which elements of each tensor are in a shard."""
    of: dict[str, np.ndarray] = {}
    for shard in shards:
        of.setdefault(shard.name, np.zeros(shard.full, dtype=bool))[window(shard)] = True
    return of


def bytes_missing(sources: list[Shard], targets: list[Shard]) -> int:
    """Counted element by element: what this rank wants and does not have, in bytes."""
    have = masks(sources)
    sizes = {shard.name: ITEM_BYTES[shard.dtype] for shard in targets}
    return sum(
        sizes[name] * int((mask & ~have[name]).sum() if name in have else mask.sum())
        for name, mask in masks(targets).items()
    )


def place(shard: Shard) -> tuple[object, ...]:
    in_tensor = (shard.name, shard.full, shard.start, shard.shape)
    return (*in_tensor, shard.dtype, shard.key, shard.offset)


def check_shards(
    policy: MegatronPolicy, engine: VllmEngine, arch: str, layout: dict, tensor: int
) -> tuple[list[Shard], list[Shard]]:
    """Live shards are those of the declared tables, and hold what the gathered weights hold."""
    config = json.loads((path_of(arch, OTHER) / "config.json").read_text())
    shape = shape_from_hf(config, small.number_format(arch))
    ranks = math.prod(layout[k] for k in ("tensor", "pipeline", "context") if k in layout)
    sizes = {SHORT[key]: value for key, value in layout.items()}
    train = TrainLayout(**sizes, dp=WORLD.size // ranks, vocab_multiple=64)
    rollout = RolloutLayout(tp=tensor, dp=WORLD.size // tensor)
    sources, targets = policy.weight_shards(), engine.weight_shards()
    for live, table in (
        (sources, train_shards(shape, train, WORLD.rank)),
        (targets, rollout_shards(shape, rollout, WORLD.rank)),
    ):
        declared, found = (set(map(place, expand(each))) for each in (table, collect(live)))
        assert declared == found, sorted(declared ^ found)[:4]
    whole = dict(policy.gathered_weights())
    for shard in sources:
        parameter = policy.weight(shard.key).detach()
        offset = parameter.storage_offset() + shard.offset
        live = parameter.as_strided(shard.shape, shard.stride, offset)
        assert torch.equal(live, whole[shard.name][window(shard)]), shard
    return sources, targets


def compare(
    policy: MegatronPolicy,
    engine: VllmEngine,
    loaded: Loaded,
    shards: tuple[list[Shard], list[Shard]],
    start: Path,
) -> None:
    GatherSync(policy, engine, verify=True).sync(1)
    gathered, want = loaded.take(), answers(engine)
    engine.load_weights(iter(load_file(start / "model.safetensors").items()), 2)
    assert not equal(loaded.take(), gathered) and answers(engine)[:2] != want[:2], (
        "the two models differ"
    )
    sync = planned(policy, engine, cast=policy.config.bf16)  # vLLM keeps A_log in float32
    for version in (3, 4):  # the second sync uses the same plan
        report = sync.sync(version)
        assert equal(loaded.take(), gathered)
        assert answers(engine) == (*want[:2], {version})
    missing = sum(WORLD.all_gather(bytes_missing(*shards)))
    sent = sum(WORLD.all_gather(report.bytes_sent))
    assert sent == missing == sync.plan.bytes_sent == sync.plan.lower_bound
    assert report.bytes_total == bytes_missing([], shards[1])
    assert report.num_tensors == len(masks(shards[1]))


def planned_equals_gathered(arch: str, layout: dict, tensor: int) -> None:
    engine = engine_of(arch, tensor)
    loaded, policy = loaded_of(engine), policy_of(arch, layout)
    try:
        shards = check_shards(policy, engine, arch, layout, tensor)
        compare(policy, engine, loaded, shards, path_of(arch, START))
    finally:
        policy.close()


def parse(case: str) -> tuple[str, dict, int]:
    arch, layout, tensor = case.split(":")
    return (
        arch,
        {key: int(value) for key, value in (item.split("=") for item in layout.split(",") if item)},
        int(tensor),
    )


if __name__ == "__main__":
    asked = {name.split(":")[0] for name in sys.argv[2:]}
    for arch, seed in product(sorted(asked & {*small.BY_TRANSFORMERS}), (START, OTHER)):
        path_of(arch, seed)
    cases: dict[str, Callable[[], None]] = {}
    for name in sys.argv[2:]:
        cases[name] = (
            partial(planned_equals_gathered, *parse(name))
            if ":" in name
            else getattr(reshard_faults, name)
        )
    small.run_cases(cases)
