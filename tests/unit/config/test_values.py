"""Values that a run cannot have: refused with key, value and remedy before anything is built."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

import pytest

from megatron_rl.config.rules.checks import num_optimizer_steps
from megatron_rl.config.rules.engine_checks import least_cache_bytes
from megatron_rl.config.rules.hardware import Machine
from megatron_rl.errors import ConfigError
from tests.unit.config.made_configs import ROWS, config, problems_in

MODEL = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(("override", "message"), ROWS["a_value_out_of_its_range_is_named"])
def test_a_value_out_of_its_range_is_named(override, message):
    with pytest.raises(ConfigError, match=message):
        config(override)


def test_the_ends_of_the_ranges_are_allowed():
    config(
        "optim.beta1=0", "evaluation.temperature=0", "rollout.top_k=-1", "rollout.temperature=0.01"
    )


LENGTHS = (
    "rollout.max_prompt_tokens=512",
    "rollout.max_response_tokens=512",
    "rollout.tensor=2",
)


@pytest.fixture
def checked(tmp_path: Path):
    return partial(problems_in(tmp_path, MODEL, *LENGTHS), 2)


def test_a_lowest_rate_above_the_rate_is_refused(checked):
    (problem,) = checked("optim.min_learning_rate=1")
    assert "optim.min_learning_rate = 1.0: is above optim.learning_rate = 1e-06" in problem
    assert checked("optim.min_learning_rate=1e-6") == []


def test_a_warm_up_that_never_ends_is_said(checked, caplog):
    overrides = ("optim.warmup_steps=1000", "trainer.num_steps=10", "optim.learning_rate=1e-3")
    assert num_optimizer_steps(config(*overrides)) == 10
    with caplog.at_level(logging.WARNING, "megatron_rl"):
        assert checked(*overrides) == []
    assert (
        "optim.warmup_steps = 1000: the run has 10 optimizer steps, so the learning rate ends at"
        " 1e-05" in caplog.text
    )
    caplog.clear()
    assert checked("optim.warmup_steps=10", "trainer.num_steps=10") == [] and not caplog.text


def test_the_length_is_given_once(checked):
    epochs = ("trainer.num_steps=null", "trainer.num_epochs=2")
    assert checked(*epochs) == []
    for wrong in (epochs[:1], epochs[1:]):
        (problem,) = checked(*wrong)
        assert "give exactly one of them, and set the other to null" in problem
    (problem,) = checked(*epochs, "data.train_weights=[1]")
    assert "trainer.num_epochs = 2: with data.train_weights sources are passed through" in problem


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_least_value(checked):
    # 65 blocks of 16 tokens, keys and values, 28 layers, 2 heads of 128 on this rank, 2 bytes each
    least = 65 * 16 * 2 * 28 * 2 * 128 * 2
    assert least_cache_bytes(config(*LENGTHS).rollout, MODEL, 16) == least
    (problem,) = checked("rollout.kv_cache_gib=1e-5")
    assert (
        "rollout.kv_cache_gib = 1e-05: one sequence of" in problem
        and "takes 28.4 MiB; set at least 0.027771" in problem
    )
    assert checked("rollout.kv_cache_gib=0.027771") == []
    assert len(checked("rollout.kv_cache_gib=0.02777")) == 1
    assert checked("rollout.kv_cache_gib=null") == []


def test_blocks_are_larger_on_processors(checked):
    cpu = Machine(None, None, "torch")
    found = checked("rollout.kv_cache_gib=0.027771", machine=cpu)
    assert ["rollout.kv_cache_gib" in problem for problem in found] == [True]
    assert checked("rollout.kv_cache_gib=0.0308", machine=cpu) == []


def test_sizes_that_are_not_told_are_not_judged(checked, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"num_attention_heads": 8, "num_hidden_layers": 28})
    )
    assert checked("rollout.kv_cache_gib=1e-5") == []


@pytest.mark.parametrize(("override", "message"), ROWS["data_that_is_not_there_is_named"])
def test_data_that_is_not_there_is_named(checked, override, message):
    (problem,) = checked(override)
    assert message in problem


def test_names_that_are_no_files_are_left_to_their_libraries(checked):
    generated = "data.eval='reasoning_gym:gcd?size=1&seed=1'"
    assert checked("data.train=hf:openai/gsm8k:main:train", generated) == []
