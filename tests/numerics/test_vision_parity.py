"""A vision-language policy, on real megatron-core in many layouts, against transformers and torch
on the same weights (float32)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import zoo
from tests.numerics.policy_cases import Case, _case, with_asked
from tests.numerics.policy_worker import compare
from tests.numerics.seeing import RESPONSES, seeing_reference
from tests.numerics.test_policy_parity import check, worst
from tests.ranks import call

TOKENS = sum(map(len, RESPONSES))
SEQUENCE = dict(tensor=2, sequence=True)
OVERLAP = dict(distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
VL = "qwen2_5_vl"
TIED = "qwen2_5_vl_tied"
DEEP = "qwen3_vl"
MOE = "qwen3_vl_moe"
DELTA, DELTA_MOE = "qwen3_5_vl", "qwen3_5_moe_vl"
_LISTED = [
    _case(VL, 1),
    _case(VL, 2, tensor=2, full=True),  # a part of the next
    _case(VL, 2, **SEQUENCE, recompute="full"),
    _case(VL, 2, pipeline=2),
    _case(VL, 2),
    _case(VL, 2, **OVERLAP),
    _case(DEEP, 1),
    _case(DEEP, 2, **SEQUENCE, recompute="selective", full=True),
    _case(DEEP, 2, pipeline=2, virtual_pipeline=2, full=True),
    _case(DEEP, 2, **OVERLAP, full=True),
    _case(MOE, 1),
    _case(MOE, 2, **SEQUENCE, expert=2, recompute="selective", full=True),
    _case(MOE, 2, pipeline=2, virtual_pipeline=2, full=True),
    _case(MOE, 2, expert=2, **OVERLAP, full=True),
    _case(DELTA, 1),
    _case(DELTA, 2, **SEQUENCE, recompute="selective", full=True),
    _case(DELTA_MOE, 1, full=True),
    _case(DELTA_MOE, 2, **SEQUENCE, expert=2, full=True),
    _case(DELTA_MOE, 2, expert=2, **OVERLAP, full=True),
    _case(VL, 1, recompute="selective", full=True),
    _case(VL, 2, pipeline=2, virtual_pipeline=2, full=True),
    _case(VL, 2, overlap_grad_reduce=True, full=True),
    _case(VL, 4, tensor=2, pipeline=2, full=True),
    _case(VL, 4, **SEQUENCE, pipeline=2, virtual_pipeline=2, full=True),
    _case(VL, 4, **SEQUENCE, context=2, full=True),
    _case(VL, 4, context=2, pipeline=2, full=True),
]
CASES = with_asked(_LISTED, zoo.SEEING)


@pytest.fixture(scope="module")
def answers(seeing_models: Path) -> Any:
    """The directory of a model, and what transformers says about it."""

    @cache
    def answer(model: str) -> tuple[Path, dict[str, Any]]:
        return seeing_models / model, seeing_reference(model, None)

    return answer


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.full if case.full else (), id=case.name)
        for case in CASES
    ],
)
def test_a_policy_that_sees_equals_transformers(case: Case, answers: Any) -> None:
    ranks = call(case.processes, compare, case, *answers(case.model), timeout=200)
    check(case, ranks, bound=5e-6, tokens=TOKENS)
    if not case.sharded_gradients:
        assert worst(ranks, "gradients_tower_") <= 2e-6
        assert worst(ranks, "gradients_language_") <= 2e-6
