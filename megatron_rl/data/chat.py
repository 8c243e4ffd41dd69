"""From the prompt of a row, a text or a conversation, to the text that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.rows import Problems
from megatron_rl.errors import first_line

_ROLES = ("system", "user", "assistant", "tool")


def render(
    row: int,
    prompt: Any,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    problems: Problems,
) -> str:
    """The text of a prompt; what is wrong with it goes to ``problems``.

    With a chat template: system prompt, messages with ``data.prompt_suffix`` on the last, and the
    header of the answer. Without: the text alone.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    problem = _wrong_form(messages)
    if problem is not None:
        problems.add(row, problem[0], prompt, problem[1])
        return ""
    messages = [dict(message) for message in messages]
    if not messages[-1]["content"].strip():
        problems.add(row, "empty prompt", prompt, "drop the row")
    messages[-1]["content"] += config.prompt_suffix
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            what = "the row has a system message and data.system_prompt is set"
            problems.add(row, what, prompt, "set data.system_prompt=null")
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    if not all(is_unicode(message["content"]) for message in messages):
        what = "half of a surrogate pair in the prompt"
        problems.add(row, what, prompt, "write the character whole, or drop the row")
        return ""
    if config.apply_chat_template:
        return _templated(row, messages, tokenizer, problems)
    if len(messages) > 1:
        remedy = "set data.apply_chat_template=true, or give a text and no system prompt"
        problems.add(row, "several messages need a chat template", prompt, remedy)
    return messages[-1]["content"]


def _templated(
    row: int, messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, problems: Problems
) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # noqa: BLE001 (a template is a program: it raises anything)
        what = f"the chat template of the model fails ({type(error).__name__}: {first_line(error)})"
        remedy = "correct chat_template in the tokenizer's files, or the row"
        problems.add(row, what, messages, remedy)
        return ""
    return str(text)


def refuse_constant_template(source: str, prompts: Sequence[str], texts: Sequence[str]) -> None:
    """Raises ValueError when prompts differ and their rendered texts do not."""
    if len(set(prompts)) > 1 and len(set(texts)) == 1:
        raise ValueError(
            f"{source}: the chat template makes the same text of all {len(texts)} prompts "
            f"({texts[0][:60]!r}): it leaves the prompt out; correct chat_template in the model's "
            "tokenizer_config.json, or set data.apply_chat_template=false"
        )


def is_unicode(text: str) -> bool:
    """False where a text has half of a surrogate pair, which JSON can write and no encoding can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _wrong_form(messages: Any) -> tuple[str, str] | None:
    """(what is wrong, remedy); None for messages of text that end with the user's turn."""
    if _has_images(messages):
        return (
            "a message has parts other than text",
            "images, video and audio are not supported; give text",
        )
    if not _are_messages(messages):
        return (
            "the prompt is neither a text nor a list of {role, content}",
            "correct the row or data.columns.prompt",
        )
    return None


def _has_images(messages: Any) -> bool:
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    segments = [segment for content in contents if isinstance(content, list) for segment in content]
    return any(
        isinstance(segment, Mapping) and segment.get("type", "text") != "text"
        for segment in segments
    )


def _are_messages(messages: Any) -> bool:
    if not isinstance(messages, list) or not messages:
        return False
    return all(map(_is_message, messages)) and messages[-1]["role"] in ("user", "tool")


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, Mapping)
        and message.get("role") in _ROLES
        and isinstance(message.get("content"), str)
    )
