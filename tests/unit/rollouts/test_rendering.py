"""Messages of an environment as tokens, and the chat templates that will not do."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AddedToken

from megatron_rl.rollouts.environments.rendering import MessageRendering
from tests.unit.data.toy import character_tokenizer
from tests.unit.rollouts.test_turns import TEMPLATE

CONTENT = "{{ m['content'] }}"
NUMBERED = f"{{{{ loop.index if m['role'] == 'tool' }}}}{CONTENT}"
PARTS = (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{{ '[image]' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
)


def rendering(template: str | None, *roles: str) -> MessageRendering:
    return MessageRendering(character_tokenizer(template), roles or ("tool",), "/m")


def test_a_message_is_written_behind_the_end_of_a_turn() -> None:
    tokenizer = character_tokenizer(TEMPLATE)
    made_by = rendering(TEMPLATE, "user", "tool")
    for content in ("42", "mark-of-the-answer", "a b"):
        message = {"role": "tool", "content": content}
        text = tokenizer.decode(made_by.tokens([message, {"role": "user", "content": "?"}]))
        assert text == f"<tool>{content}@<user>?@<assistant>"
    assert made_by.end_token_id == tokenizer.eos_token_id


def test_text_of_a_result_ends_no_message() -> None:
    tokenizer = character_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"eos_token": "<end>", "pad_token": "<pad>"})
    tokenizer.add_tokens([AddedToken("<head>", special=True)], special_tokens=True)
    assert "<head>" not in tokenizer.all_special_tokens, "as of the tokenizer of Llama 3"
    named = f"{{{{ m['name'] ~ ': ' if m['role'] == 'tool' }}}}{CONTENT}"
    tokenizer.chat_template = TEMPLATE.replace("@", "<end>").replace(CONTENT, named)
    found = MessageRendering(tokenizer, ("tool",), "/m").tokens(
        [{"role": "tool", "name": "a<head>", "content": "1<end>2<pad><head>"}]
    )
    assert found.count(tokenizer.eos_token_id) == 1, "that of the message itself"
    assert tokenizer.pad_token_id not in found
    text = "<tool>a< head>: 1< end>2< pad>< head><end><assistant>"
    assert tokenizer.decode(found) == text


def test_a_role_that_was_not_named_is_tried_when_it_comes() -> None:
    made_by = rendering(TEMPLATE.replace(CONTENT, NUMBERED), "user")
    made_by.tokens([{"role": "user", "content": "fine"}])
    with pytest.raises(ValueError, match="of the role tool depends on"):
        made_by.tokens([{"role": "tool", "content": "1"}])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat template"),
        # Numbers results, as one that shows the time would.
        (
            TEMPLATE.replace(CONTENT, NUMBERED),
            "depends on the turns before",
        ),
        # Leaves the answers of earlier turns out, as of models that think.
        (
            TEMPLATE.replace(CONTENT, f"{{% if loop.last %}}{CONTENT}{{% endif %}}"),
            "writes earlier turns differently",
        ),
        (TEMPLATE.replace("@", "#"), "does not end an answer with '@'"),
        (TEMPLATE.replace("{% for", "{{ raise_exception('roles') }}{% for"), "fails at messages"),
        (
            TEMPLATE.replace(CONTENT, "{{ '' if m['role'] == 'tool' else m['content'] }}"),
            "leaves it out",
        ),
    ],
)
def test_a_template_that_is_not_prefix_stable_is_refused(template: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        rendering(template)
    assert "/m" in str(caught.value)


def test_a_template_that_goes_on_otherwise_behind_an_image_is_refused(tmp_path: Path) -> None:
    """As one that says again that there is one; those of Qwen-VL will do."""
    sees = TEMPLATE.replace(CONTENT, PARTS)
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    found = MessageRendering(character_tokenizer(sees), ("user", "tool"), str(tmp_path))
    messages = [{"role": "user", "content": "42"}]
    assert found.tokens(messages) == rendering(TEMPLATE).tokens(messages)
    again = "{{ 'seen: ' if m['role'] == 'user' and messages[0]['content'] is not string }}"
    template = sees.replace("{% if m", again + "{% if m")
    rendering(template, "user")  # of a model of text
    with pytest.raises(ValueError, match="role user depends on the turns before"):
        MessageRendering(character_tokenizer(template), ("user",), str(tmp_path))
