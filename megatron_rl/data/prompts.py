"""Tasks from files and generators as tokenised prompts. Everything wrong with a source is found here, before any work."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.schema import DataConfig
from megatron_rl.data import reasoning_gym_tasks
from megatron_rl.data.rows import Problems, lookup, read_rows
from megatron_rl.types import Prompt

ROLES = ("system", "user", "assistant", "tool")


def load_prompts(spec: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> list[Prompt]:
    """The prompts of ``spec``, in the order of the source.

    Args:
        spec: a .jsonl or .parquet file whose columns ``config.columns`` names, or ``reasoning_gym:...`` (``data.reasoning_gym_tasks``).
        config: columns, system prompt, suffix of the last user message, template and length policy.
        tokenizer: renders the chat template and encodes; nothing is added around the rendered text.
        max_prompt_tokens: longest prompt, template included.

    A prompt column holds a text or a list of ``{"role", "content"}`` messages. An answer is a text or a number; with
    ``config.answer_after`` it is what follows the last occurrence of that marker (GSM8K: ``####``). ``data_source`` is the file's
    stem where no column gives it.

    Raises:
        ValueError: one error with source, row numbers, value and remedy for: rows without prompt or answer, unknown columns,
            prompts longer than the limit (unless ``config.on_long_prompt`` is ``drop``), an empty source, an unknown task.
    """
    if config.apply_chat_template and tokenizer.chat_template is None:
        raise ValueError(
            "the tokenizer has no chat template; set chat_template in its tokenizer_config.json, or data.apply_chat_template=false"
        )
    problems = Problems(spec)
    if spec.startswith(reasoning_gym_tasks.PREFIX):
        drafts = reasoning_gym_tasks.load_tasks(spec, problems)
    else:
        drafts = _from_file(Path(spec), config, problems)
    problems.raise_if_any()
    texts = [_render(row, prompt, config, tokenizer, problems) for row, prompt, *_ in drafts]
    problems.raise_if_any()
    encoded = tokenizer(texts, add_special_tokens=not config.apply_chat_template)["input_ids"]
    prompts = []
    for (row, _, answer, data_source, extra), text, token_ids in zip(drafts, texts, encoded, strict=True):
        if len(token_ids) > max_prompt_tokens:
            problems.add(row, f"prompt longer than rollout.max_prompt_tokens = {max_prompt_tokens}", (len(token_ids), text), _LONG_REMEDY)
        elif not token_ids:
            problems.add(row, "empty prompt", text, "drop the row")
        else:
            prompts.append(Prompt(f"{_stem(spec)}:{row}", tuple(token_ids), answer, data_source, extra, text))
    if config.on_long_prompt == "error" or not prompts:
        problems.raise_if_any()
    return prompts


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


_LONG_REMEDY = "raise the limit, shorten the row, or set data.on_long_prompt=drop"


def without_overlap(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[Prompt]:
    """``train`` without the prompts whose tokens are also a held-out prompt, so that a held-out score measures unseen prompts.

    Raises:
        ValueError: nothing is left.
    """
    seen = {prompt.token_ids for prompt in held_out}
    kept = [prompt for prompt in train if prompt.token_ids not in seen]
    if not kept:
        raise ValueError(
            f"data.train: every one of its {len(train)} prompts is also in data.eval; give other data, or data.drop_eval_overlap=false"
        )
    return kept


def _stem(spec: str) -> str:
    return reasoning_gym_tasks.PREFIX.rstrip(":") if spec.startswith(reasoning_gym_tasks.PREFIX) else Path(spec).stem


def _from_file(path: Path, config: DataConfig, problems: Problems) -> list[reasoning_gym_tasks.Draft]:
    rows = read_rows(path)
    columns = config.columns
    wanted = {
        "data.columns.prompt": columns.prompt, "data.columns.answer": columns.answer,
        "data.columns.data_source": columns.data_source, "data.columns.extra": columns.extra,
    }  # fmt: skip
    present = {name for _, row in rows for name in row}
    for key, column in wanted.items():
        if column is not None and not any(lookup(row, column)[0] for _, row in rows):
            close = difflib.get_close_matches(column, present, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            problems.add(key, "no row has this column", column, f"{hint}there are {', '.join(sorted(present))}")
    problems.raise_if_any()
    drafts = []
    for number, row in rows:
        prompt = lookup(row, columns.prompt)[1]
        answer = _answer(number, lookup(row, columns.answer)[1], config.answer_after, problems)
        source = lookup(row, columns.data_source)[1] if columns.data_source else path.stem
        extra = lookup(row, columns.extra)[1] if columns.extra else None
        if not isinstance(source, str):
            problems.add(
                number, f"{columns.data_source} is not a text", source, "name the row's data source, or set data.columns.data_source=null"
            )
        if extra is not None and not isinstance(extra, Mapping):
            problems.add(number, f"{columns.extra} is not an object", extra, "write an object, or set data.columns.extra=null")
        drafts.append((number, prompt, answer, str(source), dict(extra) if isinstance(extra, Mapping) else {}))
    return drafts


def _answer(row: int, value: Any, after: str | None, problems: Problems) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        problems.add(row, "no answer (a text or a number)", value, "give the row an answer, drop it, or set data.columns.answer")
        return ""
    text = str(value)
    if after is None:
        return text.strip()
    _, found, tail = text.rpartition(after)
    if not found or not tail.strip():
        problems.add(
            row, f"nothing after data.answer_after = {after!r} in the answer", text, "correct the row or set data.answer_after=null"
        )
    return tail.strip()


def _render(row: int, prompt: Any, config: DataConfig, tokenizer: PreTrainedTokenizerBase, problems: Problems) -> str:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not _are_messages(messages):
        problems.add(row, "the prompt is neither a text nor a list of {role, content}", prompt, "correct the row or data.columns.prompt")
        return ""
    messages = [dict(message) for message in messages]
    if not messages[-1]["content"].strip():
        problems.add(row, "empty prompt", prompt, "drop the row")
    messages[-1]["content"] += config.prompt_suffix
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            problems.add(row, "the row has a system message and data.system_prompt is set", prompt, "set data.system_prompt=null")
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    if config.apply_chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if len(messages) > 1:
        problems.add(
            row, "several messages need a chat template", prompt, "set data.apply_chat_template=true, or give a text and no system prompt"
        )
    return messages[-1]["content"]


def _are_messages(messages: Any) -> bool:
    """The form of a conversation that a user's turn ends: texts only, known roles."""
    if not isinstance(messages, list) or not messages:
        return False
    well_formed = all(isinstance(m, Mapping) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in messages)
    return well_formed and messages[-1]["role"] in ("user", "tool")
