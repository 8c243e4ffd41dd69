"""Composition and validation: what users type, and what they are told when it is wrong."""

import pickle
from pathlib import Path

import pytest

from megatron_rl.config.load import change_values, compose, known_keys, validate
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError
from tests.unit.config.made_configs import config as load


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return caught.value.problems


def test_an_override_reaches_its_key_and_nothing_else():
    base = load()
    changed = load("batch.prompts_per_step=64")
    assert changed.batch.prompts_per_step == 64
    assert base.batch.prompts_per_step == 128
    assert changed.model_copy(update={"batch": base.batch}) == base


def test_groups_numbers_and_lists():
    assert load("parallel=tp2").parallel.tensor == 2
    assert load("parallel=tp2").parallel.pipeline == 1
    assert load("parallel=tp2", "parallel.tensor=4").parallel.tensor == 4
    assert load("optim.learning_rate=1e-3").optim.learning_rate == 1e-3
    assert load("evaluation.pass_at=[1,4]").evaluation.pass_at == (1, 4)


@pytest.mark.parametrize(
    "text",
    [
        "resume=never",
        "+resume=never",
        "++resume=never",
        "resume.checkpoint=never",
        "resume={checkpoint: never}",
    ],
)
def test_resume_alone_is_short_for_its_checkpoint(text):
    assert load(text).resume.checkpoint == "never" and load(text).resume.changed == "refuse"
    assert load(text, "resume.changed=allow").resume.changed == "allow"


def test_a_path_with_an_equals_sign_survives_the_short_form():
    assert (
        load("resume='runs/seed=1,x/checkpoints/step_000002'").resume.checkpoint
        == "runs/seed=1,x/checkpoints/step_000002"
    )


@pytest.mark.parametrize("seed", ["-1", "4294967296", "9223372036854775807"])
def test_a_seed_has_32_bits(seed):
    assert f"seed = {seed}" in problems(f"seed={seed}")[0]
    assert load("seed=4294967295").seed == 2**32 - 1


def test_all_problems_come_at_once_each_with_key_value_and_remedy():
    found = problems(
        "batch.prompt_per_step=3",
        "trainer.prompts_per_step=3",
        "seed=true",
        "batch.responses_per_prompt=0",
        "trainer.num_steps='8'",
        "run_dir=''",
        "optimm.learning_rate=1e-6",
    )
    assert len(found) == 7
    text = "\n".join(found)
    assert "batch.prompt_per_step: unknown key; did you mean batch.prompts_per_step" in text
    assert "trainer.prompts_per_step: unknown key; did you mean batch.prompts_per_step" in text
    assert "seed = True" in text
    assert "batch.responses_per_prompt = 0" in text
    assert "trainer.num_steps = '8'" in text and "run_dir = ''" in text
    assert "optimm.learning_rate: unknown key; did you mean optim.learning_rate?" in text


def test_missing_values_are_named():
    with pytest.raises(ConfigError) as caught:
        validate(Config, compose("config", []), "the configuration")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "model.path",
        "data.train",
        "data.eval",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("method=gpro", "did you mean .*grpo"),
        ("experiment=nothing_like_it", "experiment=nothing_like_it: no such option"),
        ("parallel=tp3", "there are"),
        ("batch.prompts_per_step", "write key=value"),
    ],
)
def test_overrides_that_cannot_be_composed(override, expected):
    with pytest.raises(ConfigError, match=expected):
        compose("config", [override])


def test_a_users_folder_adds_options(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 77\n")
    assert compose("config", ["experiment=mine"], tmp_path)["seed"] == 77


def test_a_group_file_composes_without_its_group_key():
    assert compose("method/grpo")["name"] == "grpo"


def test_the_schema_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load().seed = 3  # ty: ignore


def test_known_keys_reach_nested_sections():
    keys = set(known_keys(Config))
    assert {"seed", "batch.prompts_per_step", "data.columns.prompt", "method.kl.coef"} <= keys


def test_an_error_travels_between_ranks():
    error = ConfigError(["a = 1: wrong; set it to 2"], "the test")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.problems == error.problems


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"name: [1\n", r"not YAML: .*method/mine\.yaml\", line 1, column 7"),
        (b"\xff\xfe\x00", r"method/mine\.yaml: not YAML: "),
        (b"defaults:\n  - mine\n", r"method/mine\.yaml: a file names itself"),
    ],
)
def test_a_file_of_the_user_that_is_no_yaml_is_named(tmp_path, content, words):
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        compose("config", ["method=mine"], tmp_path)


def test_a_composed_value_is_changed_and_a_key_below_a_value_is_refused():
    values = {"seed": 1, "rollout": {"top_p": 1.0}}
    change_values(values, ["rollout.top_p=0.5"])
    assert values["rollout"] == {"top_p": 0.5}
    with pytest.raises(ConfigError, match=r"seed\.x=2: seed is a value here, without keys"):
        change_values(values, ["seed.x=2"])
    with pytest.raises(ConfigError, match="rollout is a section here"):
        change_values(values, ["rollout=2"])


def test_an_option_takes_the_place_of_its_section_before_any_key():
    values = compose("config", ["evaluation.num_prompts=5", "evaluation.pass_at=[1,2]"])
    change_values(values, ["evaluation.temperature=1.0", "evaluation=avg_at_16"])
    assert values["evaluation"] == compose("config", ["evaluation=avg_at_16"])["evaluation"] | {
        "temperature": 1.0
    }
    change_values(values, ["data.eval=e.parquet", "data=mathvista"])
    assert values["data"]["columns"]["prompt"] == "query" and values["data"]["eval"] == "e.parquet"
    with pytest.raises(ConfigError, match="evaluation=avg: no such option"):
        change_values(values, ["evaluation=avg"])
