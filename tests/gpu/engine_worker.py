"""torchrun program (1 process, 1 GPU): hand-overs between a policy and an engine that really
sleeps.

Arguments: a folder; the quantisation of the engine (null, fp8); its sleep level (one engine a
process: they share an allocator). It has not run on a GPU yet.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from policy_worker import BATCH, MICROBATCHES, build, loss, write_model

from megatron_rl.engine.engine import VllmEngine
from megatron_rl.passes import LocalBatch
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.rollouts.backends.colocated import Colocation
from megatron_rl.runtime import launch
from megatron_rl.runtime.memory import Ledger, memory_in_use
from megatron_rl.types import Prompt, Sampling
from megatron_rl.weight_sync.gather import GatherSync
from tests import zoo

QUANTIZATION, LEVEL = sys.argv[2], int(sys.argv[3])
EVERYTHING = ("optimizer", "gradients", "weights")
PROMPTS = [Prompt(f"p{i}", (3 + i, 4, 5), "", "test") for i in range(4)]


def hand_overs(policy: MegatronPolicy, path: Path, launch_id: str) -> None:
    overrides = [
        f"rollout.sleep_level={LEVEL}",
        f"rollout.quantization={QUANTIZATION}",
        "rollout.gpu_memory_utilization=0.2",
    ]
    overrides += ["rollout.max_prompt_tokens=64", "rollout.max_response_tokens=64"]
    overrides += os.environ.get(
        "MEGATRON_RL_TEST_ENGINE", ""
    ).split()  # to look for what makes a test fail
    config = zoo.configured(path, *overrides)
    engine = VllmEngine(str(path), config.rollout, seed=1, launch_id=launch_id)
    assert torch.cuda.current_stream() == torch.cuda.default_stream(), (
        "the policy's gradients belong to this one"
    )
    ledger = Ledger(lambda: memory_in_use(engine.memory_bytes))
    sync = GatherSync(policy, engine, verify=True)
    source = Colocation(policy, engine, sync, EVERYTHING, ledger)
    before = policy.score(LocalBatch(BATCH, MICROBATCHES)).logprobs
    source.publish(1)
    with source.generation():
        first = engine.generate(PROMPTS, Sampling(2, 16, seed=7))
    source.to_policy()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert engine.memory_bytes() == 0
    assert engine.weight_version == (1 if LEVEL == 1 else -1)
    with pytest.raises(RuntimeError, match="asleep"):
        engine.generate(PROMPTS, Sampling(2, 16, seed=7))
    with source.generation():
        assert (
            engine.generate(PROMPTS, Sampling(2, 16, seed=7)) == first
        )  # the same weights, by whatever way they came back
    source.to_policy()
    values = ledger.end_step()
    assert (
        values["memory/sleep_engine_gib"]
        == 0
        < values["memory/wake_weights_engine_gib"]
        < values["memory/wake_kv_cache_engine_gib"]
    )
    assert values["memory/wake_kv_cache_allocated_gib"] < values["memory/reload_allocated_gib"]
    assert torch.equal(policy.score(LocalBatch(BATCH, MICROBATCHES)).logprobs, before)
    policy.update(LocalBatch(BATCH, MICROBATCHES), loss)
    print(f"OK level {LEVEL}", flush=True)


if __name__ == "__main__":
    world = launch.start()
    model = write_model()
    trained = build(model, "precision=bf16")
    assert isinstance(trained, MegatronPolicy)
    hand_overs(trained, model, world.launch_id)
    launch.exit_process(0)
