"""Overrides that cannot be read: what is said is what the user typed, and what to type instead
works."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_rl.config.cli.foreign_keys import NAMES_HERE, NOT_SUPPORTED, not_supported
from megatron_rl.config.cli.overrides import typed
from megatron_rl.config.load import check_given, compose, known_keys, validate
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError
from megatron_rl.train import main
from tests.unit.config.made_configs import ROWS, config


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    (text,) = caught.value.problems
    assert "++" not in text
    return text


TEXTS = [
    ("data.prompt_suffix", "Think, then answer"),
    ("data.prompt_suffix", "It's fine"),
    ("data.prompt_suffix", 'Say "x"'),
    ("data.prompt_suffix", 'It\'s "both" (1, 2) = $3'),
    ("data.train", "reasoning_gym:chain_sum?size=10"),
    ("data.train", "data/[ab].jsonl"),
    ("data.train", "hf:openai/gsm8k:main:train[:10]"),
    ("run_dir", "runs/seed=1"),
    ("data.answer_after", "####"),
    ("reward.answer_pattern", "^(.)"),
]


@pytest.mark.parametrize(("key", "value"), TEXTS)
def test_the_form_that_is_named_can_be_typed(key, value):
    said = problem(f"{key}={value}")
    assert said.startswith(f"{key}={value}: ")
    assert f"type {typed(key, value)}" in said
    words = subprocess.run(
        ["bash", "-c", f"printf %s {typed(key, value)}"], capture_output=True, text=True, check=True
    )
    composed = compose("config", [words.stdout])
    for part in key.split("."):
        composed = composed[part]
    assert composed == value


@pytest.mark.parametrize(("override", "expected"), ROWS["each_mistake_is_named_in_the_users_words"])
def test_each_mistake_is_named_in_the_users_words(override, expected):
    assert re.search(expected, problem(override))


def test_every_override_that_cannot_be_read_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        compose("config", ["seed=1,2", "run_dir=~/x", "optim=5", "method=nothing"])
    assert len(caught.value.problems) == 4


def test_keys_of_other_systems_lead_to_keys_that_exist():
    assert set(NAMES_HERE.values()) <= set(known_keys(Config))


def test_no_key_of_this_project_is_called_unsupported():
    assert not [key for key in known_keys(Config) if not_supported(key)]


def test_the_page_of_limits_lists_what_is_not_supported():
    page = Path(__file__).parents[3] / "tools/docs/pages/limits.md"
    section = " ".join(page.read_text(encoding="utf-8").partition("\n## ")[0].split())
    for _, sentence in NOT_SUPPORTED:
        subject = (
            re.split(r" (is|are) not supported", sentence)[0]
            .removeprefix("a ")
            .removeprefix("the ")
        )
        assert subject.lower() in section.lower(), subject


def test_a_folder_of_groups_must_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"--config-dir .*nowhere: no such folder"):
        compose("config", [], tmp_path / "nowhere")


def test_many_problems_fit_on_a_screen():
    with pytest.raises(ConfigError) as caught:
        validate(
            Config, compose("config", [f"x{number}=1" for number in range(40)]), "the configuration"
        )
    assert len(str(caught.value).splitlines()) <= 15 and "... and 31 more" in str(caught.value)


def shown(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["--cfg", "job", *words])
    captured = capsys.readouterr()
    return left.value.code, captured.out, captured.err


def test_looking_at_a_configuration_needs_no_data(capsys):
    code, out, err = shown(capsys, "seed=7")
    assert (code, err) == (0, "") and "seed: 7" in out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=3", "optim.lr: unknown key"),
        ("+source.give_up_factor=4", "here it is source.request_timeout_factor"),
        ("seed=true", "seed = True"),
        ("seed=1,2", "several runs"),
    ],
)
def test_looking_at_a_configuration_finds_its_mistakes(capsys, override, message):
    code, _, err = shown(capsys, override)
    assert code == 1 and message in err and "Traceback" not in err


def test_what_is_missing_is_no_mistake_of_a_look():
    check_given(Config, compose("config", []), "the configuration")


def test_the_typed_form_is_one_word_of_a_shell():
    assert shlex.split(typed("data.answer_after", "####")) == ['data.answer_after="####"']
    assert typed("seed", "a") == "seed=a"
