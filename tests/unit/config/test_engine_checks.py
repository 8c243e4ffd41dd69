"""What is refused of an evaluation before its engine is built, without a look at the policy."""

from __future__ import annotations

import json

import pytest

from megatron_rl.config.load import compose, validate
from megatron_rl.config.rules.engine_checks import check_evaluation
from megatron_rl.config.rules.hardware import Machine
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError
from tests.unit.config.test_checks import MODEL

ON_CPU = Machine(None, None, "torch")


@pytest.fixture
def problems(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "data.jsonl").write_text("{}")
    paths = [f"model.path={tmp_path}", "data.train=[]", f"data.eval={tmp_path}/data.jsonl"]
    lengths = ["rollout.max_prompt_tokens=64", "rollout.max_response_tokens=64"]

    def problems(world_size: int, *overrides: str) -> list[str]:
        values = compose("config", [*paths, *lengths, *overrides])
        config = validate(Config, values, "the configuration")
        try:
            check_evaluation(config, world_size, ON_CPU)
        except ConfigError as error:
            return error.problems
        return []

    return problems


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
