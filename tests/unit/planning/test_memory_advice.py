"""What the memory plan says: one line, and what to change where it does not fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_rl.planning.phases import MemoryBudget, describe, problems
from tests.unit.planning_of_7b import GPU, LOAD, QWEN2_5_7B, config, plan


def test_a_32b_fp8_engine_on_one_gpu_is_not_refused():
    large = replace(
        QWEN2_5_7B,
        hidden_size=5120,
        num_heads=40,
        num_kv_heads=8,
        num_layers=64,
        ffn_hidden_size=27648,
        head_dim=128,
    )
    run = config("memory.offload=[optimizer,gradients,weights]")

    def found(quantization):
        rollout = {"tensor": 1, "kv_cache_gib": None, "quantization": quantization}
        stages = plan(
            {"tensor": 8, "distributed_optimizer": True},
            replace(LOAD, world_size=16),
            large,
            rollout=rollout,
        )
        return problems(stages, run, GPU)

    assert found("fp8") == []
    assert "leaves nothing for keys and values" in found(None)[0]


def test_what_does_not_fit_is_named_with_its_key_and_value():
    messages = problems(plan({}), config("parallel.distributed_optimizer=false"), GPU)
    assert [message.split(" needs ")[0] for message in messages] == [
        "training",
        "weight sync",
        "generation",
    ]
    assert all("pipeline stage 0, there are 80.0 GiB" in message for message in messages)
    assert (
        "most of it is optimizer (85.1 GiB): set parallel.distributed_optimizer=true, or raise"
        " parallel.tensor (now 1)" in messages[0]
    )
    assert "add gradients, optimizer to memory.offload (now ())" in messages[1]
    assert "add weights, gradients, optimizer to memory.offload (now ())" in messages[2]
    away = config("memory.offload=[optimizer,gradients]")
    assert [message.split()[0] for message in problems(plan({}), away, GPU)] == ["training"]
    fits = plan({"tensor": 4, "distributed_optimizer": True})
    assert problems(fits, config(), GPU) == []


def remedies(phase, largest, *overrides):
    """What is advised to a run of ``overrides`` whose ``phase`` lacks memory, most of it for
    ``largest``."""
    run = config(*overrides)
    stage = replace(plan({})[0], **{largest: 10**12})
    (message,) = [
        text
        for text in problems([stage], run, replace(GPU, host_gib=10.0))
        if text.startswith(phase)
    ]
    assert f"most of it is {largest} (" in message
    return message.partition("GiB): ")[2].split(", or ")


ROWS = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text())


@pytest.mark.parametrize(
    ("phase", "largest", "overrides", "advised"),
    ROWS["advised_is_what_is_allowed_and_not_done_yet"],
)
def test_advised_is_what_is_allowed_and_not_done_yet(phase, largest, overrides, advised):
    assert remedies(phase, largest, *overrides) == advised


def test_an_engine_that_never_sleeps_stays_beside_training():
    large = plan({"tensor": 4, "distributed_optimizer": True}, rollout={"kv_cache_gib": 50.0})
    awake, asleep = (
        problems(large, config(f"rollout.sleep_level={level}"), GPU) for level in (0, 1)
    )
    assert [message.split(" needs ")[0] for message in awake] == [
        "training",
        "weight sync",
        "generation",
    ]
    assert [message.split(" needs ")[0] for message in asleep] == ["generation"]


def test_copies_on_the_host_are_compared_with_its_memory():
    stages = plan({}, replace(LOAD, keep_reference=True))
    assert stages[0].reference == stages[0].weights
    lean = config("memory.offload=[optimizer]", "rollout.sleep_level=1")
    roomy = MemoryBudget("cuda", 1000.0, 150.0)
    assert problems(stages, lean, roomy) == []
    message, at_checkpoints = problems(stages, lean, replace(roomy, host_gib=50.0))
    assert at_checkpoints.startswith("checkpoint needs ")
    # The reference (14.2), the engine's sleeping weights (13.4 locked for 7.1 of its two ranks'
    # 14.2) and its sampler (1.1 locked for 0.6) beside 85.1 of the optimizer.
    assert "host copies needs 113.7 GiB" in message
    assert "take optimizer out of memory.offload (now ('optimizer',))" in message


def test_the_plan_is_one_line():
    stages = plan({"tensor": 4, "distributed_optimizer": True})
    line = describe(stages, config("rollout.sleep_level=1"), MemoryBudget("cuda", 79.1, 100.0))
    assert "\n" not in line
    assert (
        "(pipeline stage 0): weights 3.55, gradients 7.09, optimizer 10.64, activations 1.60,"
        " logits 0.29, " in line
    )
    assert "engine weights 7.09, engine sampler 0.62, kv cache 3.00" in line
    assert "training 28.17 of 79.10, weight sync 33.99 of 79.10, generation 36.99 of 79.10" in line
    assert "host copies 14.44 of 100.00, checkpoint 25.08 of 100.00" in line


def test_a_share_of_the_device_that_leaves_no_cache_is_named():
    stages = plan(
        {"tensor": 4, "distributed_optimizer": True},
        device_gib=11.0,
        rollout={"kv_cache_gib": None, "gpu_memory_utilization": 0.6},
    )
    assert stages[0].kv_cache == 0
    message = problems(stages, config(), MemoryBudget("cuda", 11.0))[0]
    assert message.startswith(
        "rollout.gpu_memory_utilization = 0.6: of 11.0 GiB it leaves nothing for keys and values"
        " after 7.1 GiB of weights and 0.2 GiB of the sampler"
    )
