"""Start-up checks: every impossible combination of sizes is refused with key, value and remedy."""

import json
from pathlib import Path

import pytest

from megatron_rl.config.rules.hardware import Machine
from tests.unit.config.made_configs import ROWS, config, problems_in

MODEL = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
}
SMALL = (
    "rollout.max_prompt_tokens=64",
    "rollout.max_response_tokens=64",
    "batch.prompts_per_step=8",
    "batch.prompts_per_minibatch=4",
    "batch.tokens_per_microbatch=256",
)


@pytest.fixture
def run(tmp_path: Path):
    return problems_in(tmp_path, MODEL, *SMALL)


def test_a_sound_configuration_passes(run):
    assert run(4, "parallel=tp2", "rollout.tensor=2") == []


def test_ranks_may_share_a_key_value_head(run):
    """Four ranks train and generate with two key-value heads: the numerics and the reshard tests
    have such layouts."""
    assert run(4, "parallel.tensor=4", "rollout.tensor=4") == []


@pytest.mark.parametrize(("world_size", "overrides", "key"), ROWS["each_clash_is_named"])
def test_each_clash_is_named(run, world_size, overrides, key):
    found = run(world_size, *overrides)
    assert len(found) == 1, found
    assert key in found[0]


def test_clashes_are_reported_together(run):
    assert len(run(2, "rollout.tensor=4", "batch.prompts_per_minibatch=3", "resume=/nowhere")) == 3


def test_fp8_rollouts_bring_their_correction_along(run):
    assert run(1, "rollout=vllm_fp8") == []
    assert run(1, "method=dppo", "rollout=vllm_fp8", "method.mismatch.kind=none") == []


def test_the_machine_is_asked_with_the_sizes_of_the_model(tmp_path):
    sizes = MODEL | {"hidden_size": 96, "intermediate_size": 256}
    run = problems_in(tmp_path, sizes, *SMALL, "precision=fp8_blockwise")
    assert run(4) == []
    found = run(4, machine=Machine((9, 0), None, "torch"))
    assert len(found) == 4
    assert "Transformer Engine" in found[0] and "hidden_size is 96" in found[1]


def stages(first: int, second_from: int, second: int) -> str:
    """The limit ``first``, then ``second`` from a step on."""
    begin = f"{{from_step: 1, max_response_tokens: {first}}}"
    then = f"{{from_step: {second_from}, max_response_tokens: {second}}}"
    return f"rollout.response_stages=[{begin}, {then}]"


def test_stages_of_the_response_limit(run):
    """They begin at the first step, grow, and end with the limit that the engine is built for."""
    assert run(1, stages(16, 11, 64)) == []
    for wrong in (
        stages(16, 1, 64),
        stages(64, 11, 64),
        stages(16, 11, 32),
        "rollout.response_stages=[{from_step: 2, max_response_tokens: 64}]",
        "rollout.response_stages=[]",
    ):
        (problem,) = run(1, wrong)
        assert problem.startswith("rollout.response_stages = [")
        assert "the last limit be rollout.max_response_tokens = 64" in problem


def test_the_response_limit_of_a_step():
    rollout = config(*SMALL, stages(16, 11, 64)).rollout
    assert [rollout.response_limit(step) for step in (1, 10, 11, 500)] == [16, 16, 64, 64]


def test_the_token_of_a_self_reward_is_one_of_the_model(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 50}))
    assert run(1, "rollout.top_k=50") == []
    (problem,) = run(1, "rollout.top_k=51")
    assert problem == "rollout.top_k = 51: the model has 50 tokens; set at most that"
    assert run(1, "method=laser", "method.self_reward.token_id=49") == []
    (problem,) = run(1, "method=laser", "method.self_reward.token_id=50")
    assert problem.startswith("method.self_reward.token_id = 50: the model has 50 tokens")


def test_a_method_that_masks_images_wants_a_model_that_sees(run, tmp_path):
    (problem,) = run(1, "method=papo", "batch.tokens_per_microbatch=4096")
    assert problem.startswith("method.name = papo: masks images, and the model of model.path = ")
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"vision_config": {"depth": 2}}))
    assert run(1, "method=papo", "batch.tokens_per_microbatch=4096") == []


def test_each_response_stands_twice_in_an_update_with_masked_images(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"vision_config": {"depth": 2}}))
    sizes = ("rollout.max_prompt_tokens=48", "rollout.max_response_tokens=16")
    papo = ("method=papo", *sizes)
    assert run(1, *papo, "batch.tokens_per_microbatch=128") == []
    (problem,) = run(1, *papo, "batch.tokens_per_microbatch=127")
    assert problem.startswith("batch.tokens_per_microbatch = 127: one sequence may have")
    assert problem.endswith("(method.perception.masked = current); raise it to 128 or more")
    old = (*papo, "method.perception.masked=old")
    assert run(1, *old, "batch.tokens_per_microbatch=64") == []
    (problem,) = run(1, *old, "batch.tokens_per_microbatch=63")
    assert "stand there twice" not in problem


def test_masked_copies_lie_where_their_tokens_lie(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"vision_config": {"depth": 2}}))
    papo = ("method=papo", "batch.tokens_per_microbatch=4096", "parallel.context=2")
    assert run(2, *papo) == []
    (problem,) = run(4, *papo, "parallel.tensor=2", "parallel.sequence=true")
    assert problem.startswith("parallel.context = 2: with sequence parallelism or pipeline stages")
    assert run(4, *papo, "parallel.tensor=2", "parallel.sequence=false") == []
    old = "method.perception.masked=old"
    assert run(4, *papo, "parallel.tensor=2", "parallel.sequence=true", old) == []
