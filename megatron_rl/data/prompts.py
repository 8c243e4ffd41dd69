"""Tasks from files, data sets and generators as tokenised prompts.

Everything wrong with a source is found here, before any work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.data_names import GENERATED, HF
from megatron_rl.config.schema import DataConfig
from megatron_rl.data import hf_sets, reasoning_gym_tasks
from megatron_rl.data.columns import column_roles
from megatron_rl.data.labels import labels, parts_of
from megatron_rl.data.rows import Problems, Rows, lookup, read_rows
from megatron_rl.errors import first_line
from megatron_rl.types import Prompt

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Source:
    """What one entry of ``data.train`` or ``data.eval`` gave.

    ``prompts`` in the order of the source, how many rows were read, and how many were left out, by
    the reason. Example: ``Source("train.jsonl", prompts, 2000, {"longer than 1024 tokens": 12})``.
    """

    name: str
    prompts: tuple[Prompt, ...]
    num_rows: int
    dropped: Mapping[str, int]

    def summary(self) -> str:
        """``2000 rows of train.jsonl, 12 longer than 1024 tokens dropped, 1988 prompts kept``."""
        dropped = "".join(
            f", {count} {reason} dropped" for reason, count in self.dropped.items() if count
        )
        return f"{self.num_rows} rows of {self.name}{dropped}, {len(self.prompts)} prompts kept"


def load_prompts(
    names: str | Sequence[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
) -> list[Prompt]:
    """All prompts of ``load_sources``, one source after the other."""
    sources = load_sources(names, config, tokenizer, max_prompt_tokens)
    return [prompt for source in sources for prompt in source.prompts]


def load_sources(
    names: str | Sequence[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
) -> list[Source]:
    """The prompts of each entry, in the order of the source.

    Args:
        names: one entry of ``data.train`` or ``data.eval``, or a list of them: a .jsonl or .parquet
            file whose columns ``config.columns`` names, a pattern of files, ``hf:...``
            (``data.hf_sets``) or ``reasoning_gym:...`` (``data.reasoning_gym_tasks``).
        config: columns, system prompt, suffix of the last user message, template and length policy.
        tokenizer: renders the chat template and encodes; nothing is added around the rendered text.
        max_prompt_tokens: longest prompt, template included.

    A prompt column holds a text or a list of ``{"role", "content"}`` messages. An answer is a text
    or a number; with ``config.answer_after`` it is what follows the last occurrence of that marker
    (GSM8K: ``####``). ``data_source`` is the file's stem, or the name of the data set, where no
    column gives it. A prompt's uid is ``<label>:<row>``, see ``data.labels``.

    Raises:
        ValueError: one error with source, row numbers, value and remedy for: rows without prompt or
            answer, unknown columns, prompts longer than the limit (unless ``config.on_long_prompt``
            is ``drop``), an empty source, an unknown task, a file that is named twice.
    """
    if config.apply_chat_template and tokenizer.chat_template is None:
        raise ValueError(
            "the tokenizer has no chat template; set chat_template in its tokenizer_config.json, or "
            "data.apply_chat_template=false"
        )
    names = [names] if isinstance(names, str) else names
    parts = {name: parts_of(name) for name in names}
    label_of = labels([part for name in names for part in parts[name]])
    sources = []
    for name in names:
        read = [
            _load_part(part, label_of[part], config, tokenizer, max_prompt_tokens)
            for part in parts[name]
        ]
        prompts = tuple(prompt for part, _ in read for prompt in part)
        num_rows = sum(rows for _, rows in read)
        shown = name if len(read) == 1 else f"{name} ({len(read)} files)"
        sources.append(
            Source(
                shown,
                prompts,
                num_rows,
                {f"longer than {max_prompt_tokens} tokens": num_rows - len(prompts)},
            )
        )
    return sources


def _load_part(
    part: str,
    label: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
) -> tuple[list[Prompt], int]:
    """(prompts, number of rows) of one file, data set or generated source."""
    problems = Problems(part)
    drafts = _drafts(part, config, problems)
    problems.raise_if_any()
    texts = [_render(row, prompt, config, tokenizer, problems) for row, prompt, *_ in drafts]
    problems.raise_if_any()
    _refuse_deaf_template(part, [repr(prompt) for _, prompt, *_ in drafts], texts)
    encoded = tokenizer(texts, add_special_tokens=not config.apply_chat_template)["input_ids"]
    prompts = []
    for (row, _, answer, data_source, extra), text, token_ids in zip(
        drafts, texts, encoded, strict=True
    ):
        if len(token_ids) > max_prompt_tokens:
            problems.add(
                row,
                f"prompt longer than rollout.max_prompt_tokens = {max_prompt_tokens}",
                (len(token_ids), text),
                _LONG_REMEDY,
            )
        elif not token_ids:
            problems.add(row, "empty prompt", text, "drop the row")
        else:
            prompts.append(Prompt(f"{label}:{row}", tuple(token_ids), answer, data_source, extra, text))
    if config.on_long_prompt == "error" or not prompts:
        problems.raise_if_any()
    return prompts, len(drafts)


def text_prompts(
    texts: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
) -> list[Prompt]:
    """Prompts that somebody typed, rendered as those of a file; without an answer.

    Raises:
        ValueError: an empty text, or one that is longer than ``max_prompt_tokens``.
    """
    problems = Problems("--prompt")
    rendered = [_render(number, text, config, tokenizer, problems) for number, text in enumerate(texts, start=1)]
    problems.raise_if_any()
    prompts = []
    for number, text in enumerate(rendered, start=1):
        token_ids = tokenizer(text, add_special_tokens=not config.apply_chat_template)["input_ids"]
        if len(token_ids) > max_prompt_tokens:
            problems.add(number, f"longer than rollout.max_prompt_tokens = {max_prompt_tokens}", (len(token_ids), text), "raise the limit")
        prompts.append(Prompt(f"prompt:{number}", tuple(token_ids), "", "prompt", text=text))
    problems.raise_if_any()
    return prompts


def _refuse_deaf_template(part: str, prompts: Sequence[str], texts: Sequence[str]) -> None:
    """Raises ValueError when prompts differ and what the template makes of them does not."""
    if len(set(prompts)) > 1 and len(set(texts)) == 1:
        raise ValueError(
            f"{part}: the chat template makes the same text of all {len(texts)} prompts "
            f"({texts[0][:60]!r}): it leaves the prompt out; correct chat_template in the model's "
            "tokenizer_config.json, or set data.apply_chat_template=false"
        )


_LONG_REMEDY = "raise the limit, shorten the row, or set data.on_long_prompt=drop"


def _drafts(part: str, config: DataConfig, problems: Problems) -> list[reasoning_gym_tasks.Draft]:
    if part.startswith(GENERATED):
        return reasoning_gym_tasks.load_tasks(part, problems)
    if part.startswith(HF):
        return _from_rows(
            hf_sets.read_rows(part), hf_sets.parse(part).data_source, config, problems
        )
    return _from_rows(read_rows(Path(part)), Path(part).stem, config, problems)


def without_overlap(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[Prompt]:
    """``train`` without the prompts whose tokens are also a held-out prompt.

    A held-out score then measures unseen prompts.
    """
    seen = {prompt.token_ids for prompt in held_out}
    return [prompt for prompt in train if prompt.token_ids not in seen]


def _from_rows(
    rows: Rows, name: str, config: DataConfig, problems: Problems
) -> list[reasoning_gym_tasks.Draft]:
    """``name``: the data source of rows that name none."""
    roles = column_roles(rows, config.columns, problems)
    drafts = []
    for number, row in rows:
        prompt = lookup(row, roles.prompt)[1]
        answer = _answer(number, lookup(row, roles.answer)[1], config.answer_after, problems)
        source = lookup(row, roles.data_source)[1] if roles.data_source else name
        extra = lookup(row, roles.extra)[1] if roles.extra else None
        if not isinstance(source, str):
            problems.add(
                number,
                f"{roles.data_source} is not a text",
                source,
                "name the row's data source, or set data.columns.data_source=null",
            )
        if extra is not None and not isinstance(extra, Mapping):
            problems.add(
                number,
                f"{roles.extra} is not an object",
                extra,
                "write an object, or set data.columns.extra=null",
            )
        drafts.append(
            (number, prompt, answer, str(source), dict(extra) if isinstance(extra, Mapping) else {})
        )
    return drafts


def _answer(row: int, value: Any, after: str | None, problems: Problems) -> str:
    if (
        isinstance(value, bool)
        or not isinstance(value, str | int | float)
        or not str(value).strip()
    ):
        problems.add(
            row,
            "no answer (a text or a number)",
            value,
            "give the row an answer, drop it, or set data.columns.answer",
        )
        return ""
    if not is_unicode(str(value)):
        problems.add(
            row,
            "half of a surrogate pair in the answer",
            value,
            "write the character whole, or drop the row",
        )
        return ""
    text = str(value)
    if after is None:
        return text.strip()
    _, found, tail = text.rpartition(after)
    if not found or not tail.strip():
        problems.add(
            row,
            f"nothing after data.answer_after = {after!r} in the answer",
            text,
            "correct the row or set data.answer_after=null",
        )
    return tail.strip()


def _render(
    row: int,
    prompt: Any,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    problems: Problems,
) -> str:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if _has_images(messages):
        problems.add(
            row,
            "a message has parts other than text",
            prompt,
            "images, video and audio are not supported; give text",
        )
        return ""
    if not _are_messages(messages):
        problems.add(
            row,
            "the prompt is neither a text nor a list of {role, content}",
            prompt,
            "correct the row or data.columns.prompt",
        )
        return ""
    messages = [dict(message) for message in messages]
    if not messages[-1]["content"].strip():
        problems.add(row, "empty prompt", prompt, "drop the row")
    messages[-1]["content"] += config.prompt_suffix
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            problems.add(
                row,
                "the row has a system message and data.system_prompt is set",
                prompt,
                "set data.system_prompt=null",
            )
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    if not all(is_unicode(message["content"]) for message in messages):
        problems.add(
            row,
            "half of a surrogate pair in the prompt",
            prompt,
            "write the character whole, or drop the row",
        )
        return ""
    if config.apply_chat_template:
        return _templated(row, messages, tokenizer, problems)
    if len(messages) > 1:
        problems.add(
            row,
            "several messages need a chat template",
            prompt,
            "set data.apply_chat_template=true, or give a text and no system prompt",
        )
    return messages[-1]["content"]


def _templated(
    row: int, messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, problems: Problems
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )
    except Exception as error:  # noqa: BLE001 (a template is a program: it raises anything)
        what = f"the chat template of the model fails ({type(error).__name__}: {first_line(error)})"
        problems.add(
            row, what, messages, "correct chat_template in the tokenizer's files, or the row"
        )
        return ""


def is_unicode(text: str) -> bool:
    """False where a text has half of a surrogate pair, as JSON can write it and no encoding can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _has_images(messages: Any) -> bool:
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type", "text") != "text" for part in parts)


def _are_messages(messages: Any) -> bool:
    """The form of a conversation that a user's turn ends: texts only, known roles."""
    if not isinstance(messages, list) or not messages:
        return False
    well_formed = all(
        isinstance(m, Mapping) and m.get("role") in ROLES and isinstance(m.get("content"), str)
        for m in messages
    )
    return well_formed and messages[-1]["role"] in ("user", "tool")
