"""Calls in the formats of other models become those that the tools read."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_rl.engine.call_formats import CallFormat
from megatron_rl.rollouts.environments.tools import Call, read_calls
from megatron_rl.rollouts.environments.turns import turns_of_run
from tests.unit.config.made_configs import config
from tests.unit.data.toy import character_tokenizer
from tests.unit.rollouts.test_turns import TEMPLATE

SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string"}, "number": {"type": "integer"}},
        },
    },
}
# How each model says the same call, and its control tokens; written by hand from their templates.
SAID: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes": (
        'So: <tool_call>{"name": "add", "arguments": {"what": "6", "number": 7}}</tool_call>',
        ("<tool_call>", "</tool_call>"),
    ),
    "llama3_json": (
        '{"name": "add", "parameters": {"what": "6", "number": 7}}',
        ("<|python_tag|>",),
    ),
    "qwen3_coder": (
        "So:\n<tool_call>\n<function=add>\n<parameter=what>\n6\n</parameter>\n<parameter=number>\n7"
        "\n</parameter>\n</function>\n</tool_call>",
        ("<tool_call>", "</tool_call>"),
    ),
    "glm45": (
        "<tool_call>add\n<arg_key>what</arg_key>\n<arg_value>6</arg_value>\n<arg_key>number</arg_key>"
        "\n<arg_value>7</arg_value>\n</tool_call>",
        ("<tool_call>", "</tool_call>"),
    ),
    "pythonic": ('[add(what="6", number=7)]', ()),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"what": "6", "number": 7}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        (
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
        ),
    ),
}


def tokenizer_with(*control: str) -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": list(control)})
    return tokenizer


@pytest.mark.parametrize("name", SAID)
def test_a_call_is_read_whoever_says_it(name: str) -> None:
    text, control = SAID[name]
    say = CallFormat(name, tokenizer_with(*control), [SCHEMA])
    for _ in range(2):  # it keeps nothing of a turn
        said = say(text)
        assert said is not None and said.startswith("So:") == text.startswith("So:")
        assert read_calls(said) == [Call("add", {"what": "6", "number": 7})]
        assert say("It is 42.") is None and say("") is None


def test_turns_are_given_to_tools_in_their_format() -> None:
    words = ("precision=fp32", "rollout=vllm_cpu", "env=tools", "env.tool_parser=llama3_json")
    tokenizer = tokenizer_with("<|python_tag|>")
    turns = turns_of_run(config(*words), tokenizer)
    assert turns is not None
    call = '{"name": "calculator", "parameters": {"expression": "6*7"}}'
    for text in (call, f"<|python_tag|>{call}"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for end in ([], [tokenizer.eos_token_id]):
            (found,) = read_calls(turns._text([*ids, *end]))
            assert found == Call("calculator", {"expression": "6*7"})
    ids = tokenizer("<|python_tag|>no call", add_special_tokens=False)["input_ids"]
    assert turns._text(ids) == "no call"


def test_what_will_not_do_is_told_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"tool_parser = lama: vLLM has .*llama3_json"):
        CallFormat("lama", tokenizer_with(), [SCHEMA])
    with pytest.raises(ValueError, match="llama3_json: does not go with the tok"):
        CallFormat("llama3_json", tokenizer_with(), [SCHEMA])
    say = CallFormat("pythonic", tokenizer_with(), [SCHEMA])
    assert say("[add(what=") is None and say("[1, 2]") is None
