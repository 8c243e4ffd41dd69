"""The planned weight sync between real Megatron policies and real vLLM engines: parameters and
answers bit-equal to the gathered sync, bytes sent equal to those counted one by one, and every
fault refused with names."""

from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics.rollout_models import verdict

WORKER = Path(__file__).parent / "reshard_worker.py"
FAULTS = (
    "declared_shards_serve_where_nothing_was_recorded",
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
        "mixtral:tensor=2",
        "qwen3:tensor=2",
        "qwen3:pipeline=2",
        "qwen2_tied:pipeline=2",
        "llama:",
    ),
    (2, 2): (
        "qwen3_moe:tensor=2,expert=2",
        "qwen3:tensor=2",
        "qwen3:",
        "qwen2_tied:tensor=2",
        "qwen2_tied:pipeline=2",
    ),
}
NIGHTLY = {
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
    done: dict[tuple[int, int], str] = {}

    def run(size: int, tensor: int) -> str:
        if (size, tensor) not in done:
            cases = [f"{case}:{tensor}" for case in {**CASES, **NIGHTLY}[size, tensor]]
            faults = FAULTS if (size, tensor) == (2, 1) else ()
            done[size, tensor] = launch(
                WORKER,
                size,
                [tmp_path_factory.mktemp("reshard"), *cases, *faults],
                timeout=LIMIT_S[size],
            ).stdout
        return done[size, tensor]

    return run


def parameters(cases):
    return [
        pytest.param(*key, case, id=f"{key[0]}-{case}-{key[1]}")
        for key, some in cases.items()
        for case in some
    ]


@pytest.mark.parametrize(("size", "tensor", "case"), parameters(CASES))
def test_planned_equals_gathered(output, size, tensor, case):
    assert not verdict(output(size, tensor), f"{case}:{tensor}", size), verdict(
        output(size, tensor), f"{case}:{tensor}", size
    )


@pytest.mark.parametrize("name", FAULTS)
def test_fault(output, name):
    assert not verdict(output(2, 1), name, 2), verdict(output(2, 1), name, 2)


@pytest.mark.full
@pytest.mark.timeout(660)  # the first test of a launch waits for all of it
@pytest.mark.parametrize(("size", "tensor", "case"), parameters(NIGHTLY))
def test_planned_equals_gathered_nightly(output, size, tensor, case):
    assert not verdict(output(size, tensor), f"{case}:{tensor}", size), verdict(
        output(size, tensor), f"{case}:{tensor}", size
    )
