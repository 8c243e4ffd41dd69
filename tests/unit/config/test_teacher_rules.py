"""Teachers that do not go with a run are refused before anything is read."""

import json

import pytest

from tests.unit.config.made_configs import problems_in
from tests.unit.config.test_checks import MODEL, SMALL

OWN = MODEL | {"vocab_size": 100}
CASES = {
    "smaller": (OWN | {"vocab_size": 99}, "its vocab_size is 99, that of model.path 100; give one"),
    "heads": (OWN | {"num_attention_heads": 3, "num_key_value_heads": 1}, "3 attention heads"),
    "seeing": (OWN | {"vision_config": {}}, "teachers are of models without images"),
    "quantized": (OWN | {"quantization_config": {"quant_method": "gptq"}}, "before quantization"),
}


@pytest.fixture
def run(tmp_path):
    return problems_in(tmp_path, OWN, *SMALL, "parallel=tp2", "rollout.tensor=2")


@pytest.mark.parametrize("name", CASES)
def test_a_teacher_that_does_not_fit_is_named(run, tmp_path, name):
    sizes, words = CASES[name]
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes))
    found = run(2, "method=opd", f"model.teacher={folder}")
    assert any(line.startswith(f"model.teacher = {folder}: ") and words in line for line in found)


def test_method_and_teacher_want_each_other(run, tmp_path):
    (found,) = run(2, "method=opd")
    assert found.startswith("model.teacher = null: method opd learns from one")
    (found,) = run(2, f"model.teacher={tmp_path}")
    assert "method grpo learns from none; choose method=opd, add" in found
    for words in ("method=opd", "method=opd_top_k", "method.token_shaping.teacher.coef=0.5"):
        assert run(2, words, f"model.teacher={tmp_path}") == []
    (found,) = run(2, "method=opd", f"model.teacher={{sums: {tmp_path}, words: /nowhere}}")
    assert found.startswith("model.teacher = /nowhere: no config.json in it")
