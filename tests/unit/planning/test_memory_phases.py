"""Which parts are in memory together, and what a phase needs."""

import math
from dataclasses import replace

import pytest

from megatron_rl.planning.engine_memory import GIB
from megatron_rl.planning.phases import (
    ENGINE_KEEPS_GIB,
    OVERHEAD_GIB,
    MemoryBudget,
    demands,
    needed_gib,
    phases,
    problems,
)
from tests.unit.planning_of_7b import GPU, LOAD, PARAMETERS, config, plan


def test_a_checkpoint_copies_the_share_of_a_rank():
    """Float32 weights and moments, whoever holds them; the rest follows from them, but for the
    reference."""
    one = plan({"distributed_optimizer": True})[0]
    assert one.checkpoint_copy == 12 * math.ceil(PARAMETERS / 8) == plan({})[0].checkpoint_copy
    with_reference = plan({}, replace(LOAD, keep_reference=True))[0]
    assert with_reference.checkpoint_copy == (12 + 2) * math.ceil(PARAMETERS / 8)
    four = plan({"distributed_optimizer": True, "tensor": 4})[0]
    assert four.checkpoint_copy == 12 * (four.weights // 2) // 2, "two ranks hold the same quarter"
    lean = config("memory.offload=[optimizer]", "rollout.sleep_level=2")
    kept = replace(four, reference=10**9)
    by_phase = {one.phase: one for one in demands([kept], lean, replace(GPU, host_gib=20.0))}
    assert by_phase["host copies"].need_gib == pytest.approx((10**9 + four.optimizer) / GIB)
    # The reference a second time, to be written.
    assert by_phase["checkpoint"].need_gib == pytest.approx(
        (2 * 10**9 + four.optimizer + four.checkpoint_copy) / GIB
    )
    waiting = config("checkpoint.background=false", "rollout.sleep_level=2")
    assert "checkpoint_copy" not in phases(waiting, "cuda")["checkpoint"]
    assert "checkpoint_copy" not in phases(waiting, "cpu")["the run"]
    assert "checkpoint_copy" in phases(lean, "cpu")["the run"]


def test_a_copy_that_does_not_fit_is_named_with_its_keys():
    four = plan({"distributed_optimizer": True, "tensor": 4})[0]
    empty = config("memory.offload=[]", "rollout.sleep_level=2")
    (message,) = problems([four], empty, MemoryBudget("cuda", 1000.0, host_gib=10.0))
    assert message.startswith("checkpoint needs 10.6 GiB on a rank of pipeline stage 0")
    assert "most of it is checkpoint_copy (10.6 GiB): set checkpoint.background=false" in message
    assert "or use more data-parallel ranks" in message


def test_phases_follow_the_hand_over():
    lean = config("memory.offload=[optimizer,gradients,weights]", "rollout.sleep_level=1")
    found = phases(lean, "cuda")
    assert found["training"] == (
        "weights",
        "gradients",
        "optimizer",
        "fp8_copies",
        "activations",
        "logits",
        "teacher",
    )
    assert found["weight sync"] == ("weights", "engine_weights", "engine_sampler"), (
        "the sync reads the weights, which leave after it"
    )
    assert found["generation"] == ("engine_weights", "engine_sampler", "kv_cache")
    held = ("reference", "teacher_copies", "experts")
    assert found["host copies"] == (*held, "weights", "optimizer", "engine_backup")
    assert found["checkpoint"] == (*found["host copies"], "reference", "checkpoint_copy")
    assert phases(config("rollout.sleep_level=2"), "cuda")["host copies"] == held


@pytest.mark.parametrize(
    ("offload", "held"),
    [
        ("[]", ("weight sync", "generation")),
        ("[weights]", ("weight sync",)),
        ("[gradients]", ()),
        ("[gradients,weights]", ()),
    ],
)
def test_fp8_copies_leave_with_the_first_part(offload, held):
    found = phases(config(f"memory.offload={offload}"), "cuda")
    both = ("weight sync", "generation")
    assert tuple(phase for phase in both if "fp8_copies" in found[phase]) == held


FP8 = "rollout=vllm_fp8"
PLANNED = "weight_sync.method=reshard"


@pytest.mark.parametrize(
    ("overrides", "held"),
    [
        ([FP8, PLANNED, "rollout.tensor=2"], True),
        ([FP8, PLANNED, "rollout.tensor=2", "rollout.sleep_level=0"], True),
        ([FP8, PLANNED, "rollout.tensor=1"], False),
        ([FP8, "weight_sync.method=gather", "rollout.tensor=2"], False),
        ([PLANNED, "rollout.tensor=2"], False),
    ],
)
def test_shards_of_a_plan_stay_unquantized_until_all_ranks_have_theirs(overrides, held):
    found = phases(config(*overrides), "cuda")
    assert ("engine_unquantized" in found["weight sync"]) == held
    assert "engine_weights" in found["weight sync"], "what is replaced is there all the time"
    others = [found[phase] for phase in found if phase != "weight sync"]
    assert not any("engine_unquantized" in parts for parts in others)


def test_what_a_sleeping_engine_keeps_counts_on_the_device():
    (stage,) = plan({"tensor": 4, "distributed_optimizer": True}, rollout={"kv_cache_gib": 50.0})
    budget = MemoryBudget("cuda", 80.0, 100.0)
    beside = {
        one.phase: one.need_gib - needed_gib(stage, one.parts)
        for one in demands([stage], config(), budget)
    }
    device = OVERHEAD_GIB["cuda"] + ENGINE_KEEPS_GIB["cuda"]
    want = dict.fromkeys(("training", "weight sync", "generation"), device)
    assert beside == pytest.approx(want | {"host copies": 0.0, "checkpoint": 0.0})


def test_on_a_cpu_everything_is_held_at_once_and_what_is_offloaded_twice():
    (stage,) = plan({})
    budget = MemoryBudget("cpu", 8.0)
    (one,) = demands([stage], config(), budget)
    (two,) = demands(
        [stage], config("memory.offload=[weights,gradients]", "rollout.sleep_level=2"), budget
    )
    names = (
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "engine_weights",
        "kv_cache",
        "checkpoint_copy",
    )
    assert one.need_gib == pytest.approx(
        sum(getattr(stage, name) for name in names) / GIB + OVERHEAD_GIB["cpu"]
    )
    assert two.need_gib - one.need_gib == pytest.approx(stage.weights / GIB)
