"""What a configuration asks of the machine: every wrong pair is refused with key, value and
remedy."""

from __future__ import annotations

import pytest

from megatron_rl.config.model_config import model_sizes
from megatron_rl.config.rules.hardware import Machine, linear_sizes, machine_problems
from tests.unit.config.made_configs import ROWS, config

QWEN2_5_7B = {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
}
MOE = {"num_experts": 8, "moe_intermediate_size": 96}
CPU = Machine(None, None, "torch")
HOPPER = Machine((9, 0), "2.20.2", "transformer_engine")
BLACKWELL = Machine((10, 0), "2.20.2+abc", "transformer_engine")
MACHINES = {"CPU": CPU, "HOPPER": HOPPER, "WITHOUT_ENGINE": Machine((9, 0), None, "apex")}


def problems(machine: Machine, *overrides: str, model=QWEN2_5_7B) -> list[str]:
    return list(machine_problems(config(*overrides), machine, model))


@pytest.mark.parametrize("precision", ["bf16", "fp8_delayed", "fp8_tensorwise", "fp8_blockwise"])
def test_hopper_has_what_these_ask(precision):
    assert (
        problems(
            HOPPER,
            f"precision={precision}",
            "parallel=tp4",
            "precision.adam=fused",
            "precision.adam_moments=bfloat16",
        )
        == []
    )


def test_blackwell_has_mxfp8_and_the_fp8_rollout():
    assert problems(BLACKWELL, "precision=mxfp8", "rollout=vllm_fp8") == []


@pytest.mark.parametrize(("machine", "overrides", "texts"), ROWS["what_is_not_there_is_refused"])
def test_what_is_not_there_is_refused(machine, overrides, texts):
    if isinstance(machine, str):
        machine = MACHINES[machine]
    else:
        capability, *others = machine
        machine = Machine(tuple(capability), *others)
    found = problems(machine, *overrides)
    assert any(all(text in problem for text in texts) for problem in found), found


def test_several_things_are_said_at_once_and_apex_is_a_fused_adam():
    found = problems(Machine((9, 0), None, "apex"), "precision=mxfp8", "precision.adam=fused")
    assert len(found) == 2 and "Blackwell" not in found[0]


def test_sizes_of_a_rank_by_hand():
    assert list(
        linear_sizes(config("parallel.tensor=4").parallel, model_sizes(QWEN2_5_7B)).values()
    ) == [3584, 36 * 128 // 4, 896, 4736]
    experts = {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
    }
    split = config("parallel.tensor=2", "parallel.expert_tensor=3").parallel
    assert list(linear_sizes(split, model_sizes(experts)).values()) == [2048, 2560, 2048, 256]
    mixtral = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
        "num_local_experts": 8,
    }
    assert list(linear_sizes(split, model_sizes(mixtral)).values())[-1] == 14336 // 3


@pytest.mark.parametrize(
    ("precision", "size", "fits"),
    [
        ("fp8_tensorwise", 48, True),
        ("fp8_tensorwise", 40, False),
        ("mxfp8", 96, True),
        ("mxfp8", 48, False),
        ("fp8_blockwise", 256, True),
        ("fp8_blockwise", 192, False),
    ],
)
def test_the_reach_of_a_scale(precision, size, fits):
    model = {**QWEN2_5_7B, "intermediate_size": size}
    found = [
        text
        for text in problems(BLACKWELL, f"precision={precision}", model=model)
        if "feed-forward width" in text
    ]
    assert bool(found) != fits


def test_heads_without_a_cpu_kernel_are_refused_before_the_engine_is_built():
    narrow = QWEN2_5_7B | {"head_dim": 16}
    (problem,) = problems(CPU, model=narrow)
    assert problem.startswith(
        "model.path: head_dim = 16: without a GPU vLLM has attention for 32, 64"
    )
    assert problems(CPU, model=QWEN2_5_7B) == []  # 3584 / 28 = 128
    assert problems(HOPPER, model=narrow) == []
    (problem,) = problems(CPU, "rollout.tensor=2", model=QWEN2_5_7B | MOE)
    assert problem.startswith(
        "model.path: experts of width 96 on rollout.tensor = 2: without a GPU"
    )
    assert problems(CPU, model=QWEN2_5_7B | MOE) == []
    assert (
        problems(CPU, model={"hidden_size": 64}) == []
    )  # what is missing is said by the model's own checks
