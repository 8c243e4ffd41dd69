"""The planned weight sync between real Megatron policies and real vLLM engines: parameters and
answers bit-equal to the gathered sync, bytes sent equal to those counted one by one, and every
fault refused with names."""

from functools import cache
from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics.rollout_models import verdict

WORKER = Path(__file__).parent / "reshard_worker.py"
FAULTS = (
    "a_loader_that_computes_means_gather",
    "misfits_are_refused_before_anything_moves",
    "changed_byte_is_named_and_the_engine_refuses",
    "incomplete_transfer_is_refused",
    "rank_raises_in_the_middle",
    "biases_that_a_kernel_widened_take_part",
    "rank_dies_in_the_middle",
)
# (processes, vLLM's tensor parallelism) -> architecture:layout of the policy. The first engine
# decides about expert groups.
CASES = {
    (2, 1): (
        "qwen3_moe:expert=2",
        "deepseek_v3:tensor=2,expert=2",
        "gpt_oss:tensor=2,expert=2",
        "qwen3_next:tensor=2,expert=2",
        "qwen3:tensor=2",
        "qwen2_tied:pipeline=2",
    ),
}
NIGHTLY = {
    (2, 1): (
        "glm4_moe:expert=2",
        "gemma3:pipeline=2",
        "phi3:pipeline=2",
        "olmo3:pipeline=2",
        "mixtral:tensor=2",
        "qwen3_5:tensor=2",
        "qwen3:pipeline=2",
        "llama:",
    ),
    (2, 2): (
        "qwen3_moe:tensor=2,expert=2",
        "glm4_moe:tensor=2,expert=2",
        "deepseek_v3:tensor=2",
        "gpt_oss:expert=2",
        "gpt_oss:pipeline=2",
        "qwen3_next:pipeline=2",
        "qwen3_5_moe:tensor=2,expert=2",
        "qwen3_5:pipeline=2",
        "moonlight:expert=2",
        "gemma3:tensor=2",
        "phi3:tensor=2",
        "olmo2:tensor=2",
        "olmo3:tensor=2",
        "mistral_window:tensor=2",
        "qwen3:",
        "qwen2_tied:pipeline=2",
        "qwen3:tensor=2",
        "qwen2_tied:tensor=2",
        "qwen3_moe:tensor=2",
    ),
    (1, 1): ("qwen3_moe:", "mixtral:", "qwen3:", "qwen2_tied:", "llama:"),
    (4, 1): (
        "qwen3_moe:expert=2,pipeline=2",
        "qwen3:tensor=2,pipeline=2",
        "qwen2_tied:tensor=2,pipeline=2",
        "llama:tensor=4",
    ),
    (4, 2): (
        "qwen3_moe:tensor=2,expert=4",
        "mixtral:tensor=2,pipeline=2,expert=2",
        "qwen3:tensor=2,pipeline=2",
        "qwen2_tied:tensor=2",
        "qwen2_tied:tensor=2,pipeline=2",
        "llama:context=2,pipeline=2",
    ),
    # 2 key-value heads on 4 ranks. No experts: vLLM on CPU cannot reload expert shards that are no
    # multiple of 32 wide, by any path.
    (4, 4): ("qwen3:tensor=2,pipeline=2", "qwen2_tied:pipeline=2", "llama:"),
}

# Of a launch, by its processes. On two cores four of them took 30 to 117 s; more than this is a
# hang.
LIMIT_S = {1: 240, 2: 240, 4: 600}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """What the worker prints of some cases for a number of processes and a tensor parallelism of
    vLLM."""

    @cache
    def run(size: int, tensor: int, names: tuple[str, ...]) -> str:
        args = [tmp_path_factory.mktemp("reshard"), *names]
        return launch(WORKER, size, args, timeout=LIMIT_S[size]).stdout

    return run


def names(cases: dict[tuple[int, int], tuple[str, ...]], size: int, tensor: int) -> tuple[str, ...]:
    """Of the cases of one launch, as the worker knows them."""
    return tuple(f"{case}:{tensor}" for case in cases[size, tensor])


CORE_2_1 = names(CASES, 2, 1) + FAULTS  # in one launch: they share the engines


def parameters(cases):
    return [
        pytest.param(*key, case, id=f"{key[0]}-{case}-{key[1]}")
        for key, some in cases.items()
        for case in some
    ]


@pytest.mark.parametrize(("size", "tensor", "case"), parameters(CASES))
def test_planned_equals_gathered(output, size, tensor, case):
    chosen = CORE_2_1 if (size, tensor) == (2, 1) else names(CASES, size, tensor)
    problem = verdict(output(size, tensor, chosen), f"{case}:{tensor}", size)
    assert not problem, problem


@pytest.mark.parametrize("name", FAULTS)
def test_fault(output, name):
    problem = verdict(output(2, 1, CORE_2_1), name, 2)
    assert not problem, problem


@pytest.mark.full
@pytest.mark.timeout(660)  # the first test of a launch waits for all of it
@pytest.mark.parametrize(("size", "tensor", "case"), parameters(NIGHTLY))
def test_planned_equals_gathered_nightly(output, size, tensor, case):
    problem = verdict(output(size, tensor, names(NIGHTLY, size, tensor)), f"{case}:{tensor}", size)
    assert not problem, problem
