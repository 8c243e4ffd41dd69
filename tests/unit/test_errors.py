"""What messages are made of: shortened texts, suggestions, lists of problems."""

from __future__ import annotations

import pickle

from megatron_rl.errors import ConfigError, close_names, did_you_mean, first_line, shortened


def test_a_long_text_is_cut_to_the_characters_it_may_have():
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abc..."


def test_the_first_line_says_something():
    assert first_line(ValueError("\n  a file is missing\nsecond")) == "a file is missing"
    assert first_line(KeyError("x")) == "KeyError: 'x'"
    assert first_line(MemoryError()) == "MemoryError"
    assert len(first_line(ValueError("x" * 1000))) == 300


def test_suggestions_come_best_first_and_only_when_similar():
    known = ["grpo", "dr_grpo", "dapo"]
    assert close_names("dr_gpo", known, count=2) == ["dr_grpo", "grpo"]
    assert close_names("dr_gpo", known) == ["dr_grpo"]
    assert close_names("dr_gpo", known, cutoff=0.95) == []
    assert did_you_mean(["grpo", "dr_grpo"]) == "did you mean grpo or dr_grpo?"
    assert did_you_mean([]) == ""


def test_a_config_error_lists_twelve_problems_and_survives_pickling():
    problems = [f"key{number} = 1: wrong; remove it" for number in range(14)]
    error = pickle.loads(pickle.dumps(ConfigError(problems, "the configuration")))
    assert error.problems == problems
    lines = str(error).splitlines()
    assert lines[0] == "14 problems in the configuration:"
    assert lines[1] == "  - key0 = 1: wrong; remove it"
    assert lines[-1] == "  - ... and 2 more"
    assert len(lines) == 14
    assert str(ConfigError(problems[:1], "x")).startswith("1 problem in x:")
