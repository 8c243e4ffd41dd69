"""Rendering of a row's prompt, a text or a conversation, into the text that the model reads."""

import logging
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.multimodal.images import PLACE, num_places, parts_of
from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.rows import Draft, Problems, not_utf8
from megatron_rl.errors import first_line

_ROLES = ("system", "user", "assistant", "tool")
logger = logging.getLogger(__name__)


def render(
    draft: Draft,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    problems: Problems,
    vision: VisionProcessor | None = None,
) -> str:
    """The text of a prompt, with one image token for each of its images; what is wrong with it
    goes to ``problems``.

    With a chat template: system prompt, messages with ``data.prompt_prefix`` and ``_suffix`` around
    the last, and the header of the answer. Without: the text alone.
    """
    row = draft.row
    prompt = draft.prompt
    messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if vision is not None:
        messages = _with_places(messages, draft, problems, config.images_first)
    problem = _wrong_form(messages, sees=vision is not None)
    if problem is not None:
        problems.add(row, problem[0], prompt, problem[1])
        return ""
    messages = [dict(message) for message in messages]  # those of the row stay as they are
    is_empty = not f"{config.prompt_prefix}{_text(messages[-1])}{config.prompt_suffix}".strip()
    if is_empty and not draft.images:
        problems.add(row, "empty prompt", prompt, "drop the row")
    around = (config.prompt_prefix, config.prompt_suffix)
    messages[-1]["content"] = between(*around, messages[-1]["content"])
    parts = [part for message in messages for part in parts_of(message["content"]) or ()]
    if vision is not None and draft.images and not num_places(parts):
        places = [{"type": "image"} for _ in draft.images]
        messages[-1]["content"] = [*places, *(parts_of(messages[-1]["content"]) or ())]
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            what = "the row has a system message and data.system_prompt is set"
            problems.add(row, what, prompt, "set data.system_prompt=null")
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    if any(not_utf8(_text(message)) is not None for message in messages):
        what = "half of a surrogate pair in the prompt"
        problems.add(row, what, prompt, "write the character whole, or drop the row")
        return ""
    if config.apply_chat_template:
        return _templated(draft, messages, config, tokenizer, problems)
    if len(messages) > 1:
        remedy = "set data.apply_chat_template=true, or give a text and no system prompt"
        problems.add(row, "several messages need a chat template", prompt, remedy)
    # A template writes the place of an image; without one it is written here, as the text of its
    # special tokens, which the tokenizer makes those tokens again.
    place = "" if vision is None else str(tokenizer.decode(list(vision.place_ids)))
    return _text(messages[-1], place)


def _with_places(messages: Any, draft: Draft, problems: Problems, images_first: bool) -> Any:
    """``messages`` with parts where they have places of images, whose number must be that of the
    images, or none with ``images_first``; as they are where they are no messages."""
    if not isinstance(messages, list) or not all(isinstance(turn, Mapping) for turn in messages):
        return messages
    split = [parts_of(message.get("content")) for message in messages]
    places = sum(num_places(parts) for parts in split if parts is not None)
    if draft.images is None and places:
        remedy = "name the column of the images by data.columns.images"
        problems.add(draft.row, f"{PLACE} in the prompt, and no images", draft.prompt, remedy)
    elif draft.images is not None and places != len(draft.images) and (places or not images_first):
        what = f"{places} places of images ({PLACE}) in the prompt for {len(draft.images)} images"
        remedy = "make them equal, or drop the row"
        if not places and None not in split:
            remedy = f"data.images_first=true puts them before the prompt; else {remedy}"
        problems.add(draft.row, what, draft.prompt, remedy)
    with_places = []
    for message, parts in zip(messages, split, strict=True):
        # A text without a place stays a text, which every template takes.
        if parts and (num_places(parts) or not isinstance(message["content"], str)):
            message = {**message, "content": parts}
        with_places.append(message)
    return with_places


def between(prefix: str, suffix: str, content: Any) -> Any:
    if isinstance(content, str):
        return prefix + content + suffix
    before, after = ([{"type": "text", "text": text}] if text else [] for text in (prefix, suffix))
    return [*before, *content, *after]


def _text(message: Mapping[str, Any], place: str = "") -> str:
    """The words of a message, and ``place`` for each image."""
    content = message["content"]
    if isinstance(content, str):
        return content
    # A parquet file has the key in every part, null in an image's.
    return "".join(place if part.get("text") is None else part["text"] for part in content)


def _templated(
    draft: Draft,
    messages: list[dict[str, Any]],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    problems: Problems,
) -> str:
    day = datetime.fromisoformat(config.template_date or str(date.today()))
    try:
        # Templates ask for the date by this function, which the library defines as the time of now.
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, strftime_now=day.strftime
        )
    except Exception as error:  # noqa: BLE001 (a template is a program: it raises anything)
        what = f"the chat template of the model fails ({type(error).__name__}: {first_line(error)})"
        remedy = "correct chat_template in the tokenizer's files, or the row"
        problems.add(draft.row, what, messages, remedy)
        return ""
    return str(text)


def warn_of_template(
    source: str, drafts: Sequence[Draft], texts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Logs what a model reads otherwise than its author may think: a template that leaves the turn
    of the answer out, and control tokens that stand in the text of a prompt."""
    words = [words_of(draft.prompt) for draft in drafts]
    if texts and words[0].strip() and texts[0].rstrip().endswith(words[0].strip()):
        logger.warning(
            "%s: the chat template ends with the prompt itself, without a header of the answer"
            " (it does not read add_generation_prompt): a chat model may continue the user's turn;"
            " add one to chat_template if the model has one",
            source,
        )
    control = sorted(map(re.escape, filter(None, tokenizer.all_special_tokens)))
    pattern = re.compile("|".join(control) or "(?!)")
    found = [(draft.row, pattern.search(text)) for draft, text in zip(drafts, words, strict=True)]
    with_control = [(row, match.group()) for row, match in found if match]
    if with_control:
        row, token = with_control[0]
        logger.warning(
            "%s: the text of %d prompts holds control tokens of the model (row %s: %s), which it"
            " reads as such; take them out of the data unless that is wanted",
            source,
            len(with_control),
            row,
            token,
        )


def words_of(prompt: Any) -> str:
    """The text of a prompt, a text or messages, before any template."""
    if isinstance(prompt, str):
        return prompt
    return "".join(_text(message) for message in prompt)


def refuse_constant_template(source: str, prompts: Sequence[str], texts: Sequence[str]) -> None:
    """Raises ValueError when prompts differ and their rendered texts do not."""
    if len(set(prompts)) > 1 and len(set(texts)) == 1:
        raise ValueError(
            f"{source}: the chat template makes the same text of all {len(texts)} prompts "
            f"({texts[0][:60]!r}): it leaves the prompt out; correct chat_template in the model's "
            "tokenizer_config.json, or set data.apply_chat_template=false"
        )


def _wrong_form(messages: Any, *, sees: bool) -> tuple[str, str] | None:
    """(what is wrong, remedy); None for messages that end with the user's turn."""
    form = (
        "the prompt is neither a text nor a list of {role, content}",
        "correct the row or data.columns.prompt",
    )
    if not isinstance(messages, list) or not messages:
        return form
    if not all(isinstance(turn, Mapping) and turn.get("role") in _ROLES for turn in messages):
        return form
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) or (sees and parts_of(content)):
            continue
        parts = content if isinstance(content, list) else []
        kinds = [part.get("type", "text") for part in parts if isinstance(part, Mapping)]
        if set(kinds) <= {"text"}:
            return form
        return (
            "a message has parts other than text",
            "video and audio are not supported; images of a vision-language model stand in the"
            ' column data.columns.images, and in the prompt as <image> or {"type": "image"}',
        )
    return None if messages[-1]["role"] in ("user", "tool") else form
