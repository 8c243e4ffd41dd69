"""What is refused of an evaluation before its engine is built, without a look at the policy."""

from __future__ import annotations

from functools import partial

import pytest

from megatron_rl.config.rules.engine_checks import check_evaluation
from megatron_rl.config.rules.hardware import Machine
from tests.unit.config.made_configs import problems_in
from tests.unit.config.test_checks import MODEL


@pytest.fixture
def problems(tmp_path):
    lengths = ("rollout.max_prompt_tokens=64", "rollout.max_response_tokens=64")
    run = problems_in(tmp_path, MODEL, "data.train=[]", *lengths)
    return partial(run, by=check_evaluation, machine=Machine(None, None, "torch"))


def test_what_only_a_policy_needs_is_not_asked_for(problems):
    # Neither divides 3 processes, nor fits 8 prompts a step, nor is there FP8 without a GPU.
    policy = ["parallel=tp2", "batch.prompts_per_minibatch=7", "precision=fp8_delayed"]
    assert problems(3, *policy, "rollout.tensor=1") == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.tensor=2"], "rollout.tensor = 2: does not divide the 3 processes; choose"),
        (["evaluation.pass_at=[1,2]"], "pass_at = 2: needs evaluation.responses_per_prompt >= 2"),
        (["evaluation.responses_per_prompt=8"], "all responses would be the same; raise the temp"),
        (["data.eval=/nowhere.jsonl"], "data.eval = /nowhere.jsonl: "),
        (["model.path=/nowhere"], "model.path = /nowhere: no such folder; give a HF directory"),
        (["rollout.max_response_tokens=512"], "= 576: the model has 512 positions; lower one"),
        (["rollout.quantization=fp8"], "rollout.quantization = fp8: needs a GPU of compute"),
    ],
)
def test_what_an_evaluation_cannot_be_is_one_message(problems, overrides, message):
    found = problems(3, *overrides)
    assert len(found) == 1, found
    assert message in found[0]
