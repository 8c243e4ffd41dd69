"""Tasks from files, data sets and generators as tokenized prompts.

Everything wrong with a source is found here, before any work.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.data_names import GENERATED, HF
from megatron_rl.config.schema import DataColumns, DataConfig
from megatron_rl.data import hf_sets, reasoning_gym_tasks
from megatron_rl.data.chat import between, refuse_constant_template, render, warn_of_template
from megatron_rl.data.columns import (
    LETTERS,
    categories_of,
    choices_of,
    column_roles,
    letter_of,
    numbered_images,
)
from megatron_rl.data.labels import files_of, labels
from megatron_rl.data.multimodal.images import ImageColumn
from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.rows import Draft, Problems, Rows, lookup, not_utf8, read_rows
from megatron_rl.types import HINTS, Prompt

_ENCODED_AT_ONCE = 4096  # texts
CATEGORIES = "categories"  # of a prompt's extra, see data.columns.categories
_LONG_REMEDY = "raise the limit, shorten the row, or set data.on_long_prompt=drop"


@dataclass(frozen=True)
class PromptSource:
    """The prompts of one entry of ``data.train`` or ``data.eval``, in the order of the source.

    ``num_rows`` were read, and ``dropped`` counts those that were left out by their reason.
    Example: ``PromptSource("train.jsonl", prompts, 2000, {"longer than 1024 tokens": 12})``.
    """

    name: str
    prompts: Sequence[Prompt]
    num_rows: int
    dropped: Mapping[str, int]

    def summary(self) -> str:
        """``2000 rows of train.jsonl, 12 longer than 1024 tokens dropped, 1988 prompts kept``."""
        reasons = [f"{count} {reason} dropped" for reason, count in self.dropped.items() if count]
        kept = f"{len(self.prompts)} prompts kept"
        return ", ".join([f"{self.num_rows} rows of {self.name}", *reasons, kept])


def load_prompts(
    names: str | Sequence[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    vision: VisionProcessor | None = None,
) -> list[Prompt]:
    """All prompts of ``load_sources``, one source after the other."""
    sources = load_sources(names, config, tokenizer, max_prompt_tokens, vision)
    return [prompt for source in sources for prompt in source.prompts]


def load_sources(
    names: str | Sequence[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    vision: VisionProcessor | None = None,
    *,
    is_training: bool = False,
) -> list[PromptSource]:
    """The prompts of each entry, in the order of the source.

    Args:
        names: one entry of ``data.train`` or ``data.eval``, or a list of them: a .jsonl or .parquet
            file whose columns ``config.columns`` names, a pattern of files, ``hf:...``
            (``data.hf_sets``) or ``reasoning_gym:...`` (``data.reasoning_gym_tasks``).
        config: columns, system prompt, suffix of the last user message, template and length policy.
        tokenizer: renders the chat template and encodes; nothing is added around the rendered text.
        max_prompt_tokens: longest prompt, template and image tokens included.
        vision: of a vision-language model.
        is_training: ``config.columns.solution`` is read, and prompts have ``hints``.

    A prompt column holds a text or a list of ``{"role", "content"}`` messages. The n-th ``<image>``
    of its texts, or part ``{"type": "image"}``, is the place of the n-th image. An answer is a text
    or a number; with ``config.answer_after`` it is what follows the last occurrence of that marker
    (GSM8K: ``####``). ``data_source`` is the file's stem, or the name of the data set, where no
    column gives it. A prompt's uid is ``<label>:<row>``, see ``data.labels``.

    Raises:
        ValueError: one error with source, row numbers, value and remedy for: rows without prompt or
            answer, unknown columns, images that are missing, unreadable, more or fewer than their
            places, prompts longer than the limit (unless ``config.on_long_prompt``
            is ``drop``), an empty source, an unknown task, a file that is named twice.
    """
    if config.apply_chat_template and tokenizer.chat_template is None:
        raise ValueError(
            "the tokenizer has no chat template; set chat_template in its tokenizer_config.json, or"
            " data.apply_chat_template=false"
        )
    if not is_training:
        config = config.with_values(columns={"solution": None})
    names = [names] if isinstance(names, str) else names
    files = {name: files_of(name) for name in names}
    label_of = labels(list(itertools.chain.from_iterable(files[name] for name in names)))
    maker = _PromptMaker(config, tokenizer, max_prompt_tokens, vision)
    sources = []
    for name in names:
        read = [maker.read(file, label_of[file]) for file in files[name]]
        prompts = tuple(itertools.chain.from_iterable(prompts for prompts, _ in read))
        num_rows = sum(num_rows for _, num_rows in read)
        shown = name if len(read) == 1 else f"{name} ({len(read)} files)"
        dropped = {f"longer than {max_prompt_tokens} tokens": num_rows - len(prompts)}
        sources.append(PromptSource(shown, prompts, num_rows, dropped))
    return sources


def text_prompts(
    texts: Sequence[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
) -> list[Prompt]:
    """Prompts given as text, rendered as those of a file; without an answer.

    Raises:
        ValueError: an empty text, or one that is longer than ``max_prompt_tokens``.
    """
    all_of_them = config.model_copy(update={"on_long_prompt": "error"})
    drafts = [Draft(row, text, "", "prompt", {}) for row, text in enumerate(texts, start=1)]
    maker = _PromptMaker(all_of_them, tokenizer, max_prompt_tokens, None)
    return maker.made(drafts, "prompt", Problems("--prompt"))


@dataclass(frozen=True)
class _PromptMaker:
    """Reads, renders and tokenizes what a source has."""

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    max_prompt_tokens: int
    vision: VisionProcessor | None

    def read(self, name: str, label: str) -> tuple[list[Prompt], int]:
        """(prompts, number of rows) of one file, data set or generated source."""
        problems = Problems(name)
        # Each stage lists all that is wrong in it, so that the next can rely on what it is given.
        drafts = read_drafts(name, self.config, problems, self.vision)
        problems.raise_if_any()
        prompts = self.made(drafts, label, problems)
        if self.config.columns.solution is not None:
            prompts = self._with_hints(prompts, drafts, label, problems)
        return prompts, len(drafts)

    def _with_hints(
        self, prompts: Sequence[Prompt], drafts: Sequence[Draft], label: str, problems: Problems
    ) -> list[Prompt]:
        """``prompts`` with the forms that show more and more of their solutions, in the order of
        ``data.hint_ratios``, in ``extra``; one that is too long, where such are dropped, is not
        there."""
        for row, solution in ((draft.row, draft.solution) for draft in drafts):
            if not isinstance(solution, str) or not solution.strip():
                what = f"no text in {self.config.columns.solution}"
                remedy = "write it, drop the row, or set data.columns.solution=null"
                problems.add(row, what, solution, remedy)
        problems.raise_if_any()
        hints: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for ratio in self.config.hint_ratios:
            forms = [with_hint(draft, self.config.hint_text, ratio) for draft in drafts]
            of_form = Problems(f"{problems.source}, with a hint of {ratio:g}")
            for form in self.made(forms, label, of_form):
                shown = {"ratio": ratio, "token_ids": form.token_ids, "text": form.text}
                hints[form.uid].append(shown)
        return [replace(one, extra={**one.extra, HINTS: hints[one.uid]}) for one in prompts]

    def made(self, drafts: Sequence[Draft], label: str, problems: Problems) -> list[Prompt]:
        config = self.config
        texts = [render(draft, config, self.tokenizer, problems, self.vision) for draft in drafts]
        problems.raise_if_any()
        refuse_constant_template(problems.source, [repr(draft.prompt) for draft in drafts], texts)
        if config.apply_chat_template:
            warn_of_template(problems.source, drafts, texts, self.tokenizer)
        encoded = self._encoded(texts)
        if self.vision is not None:
            rows = zip(drafts, encoded, texts, strict=True)
            encoded = [self._expanded(*row, problems) for row in rows]
            problems.raise_if_any()
        for draft, text, token_ids in zip(drafts, texts, encoded, strict=True):
            if not token_ids:
                what = "empty prompt: the tokenizer makes no token of it"
                problems.add(draft.row, what, text, "drop the row")
        problems.raise_if_any()
        too_long = f"prompt longer than rollout.max_prompt_tokens = {self.max_prompt_tokens}"
        prompts = []
        for draft, text, token_ids in zip(drafts, texts, encoded, strict=True):
            if len(token_ids) > self.max_prompt_tokens:
                remedy = f"lower data.max_pixels, {_LONG_REMEDY}" if draft.images else _LONG_REMEDY
                problems.add(draft.row, too_long, (len(token_ids), text), remedy)
                continue
            prompt = Prompt(
                uid=f"{label}:{draft.row}",
                token_ids=tuple(token_ids),
                answer=draft.answer,
                data_source=draft.data_source,
                extra=draft.extra,
                text=text,
                images=draft.images or (),
            )
            prompts.append(prompt)
        # Long prompts are all that may be left out; a source of nothing else is still a mistake.
        if config.on_long_prompt == "error" or not prompts:
            problems.raise_if_any()
        return prompts

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text."""
        encoded: list[list[int]] = []
        # A template writes its own special tokens; the tokenizer must not add them once more.
        special = not self.config.apply_chat_template
        # Some at a time: what the tokenizer knows of each token besides its id takes much memory.
        for start in range(0, len(texts), _ENCODED_AT_ONCE):
            some = list(texts[start : start + _ENCODED_AT_ONCE])
            encoded += self.tokenizer(some, add_special_tokens=special)["input_ids"]
        return encoded

    def _expanded(
        self, draft: Draft, token_ids: Sequence[int], text: str, problems: Problems
    ) -> list[int]:
        """With as many image tokens as the images have features."""
        assert self.vision is not None
        try:
            return self.vision.expanded(token_ids, draft.images or ())
        except ValueError as error:
            what = f"after the chat template there are {error}"
            remedy = (
                "take the model's special tokens out of the prompt, or correct its chat_template"
            )
            problems.add(draft.row, what, text, remedy)
            return []


def read_drafts(
    name: str, config: DataConfig, problems: Problems, vision: VisionProcessor | None
) -> list[Draft]:
    if name.startswith(GENERATED):
        return reasoning_gym_tasks.load_tasks(name, problems)
    if name.startswith(HF):
        hf_set = hf_sets.parse(name)
        rows = hf_sets.read_rows(name)
        data_source = hf_set.data_source
        folder = Path(hf_set.name)
    else:
        rows = read_rows(Path(name))
        data_source = Path(name).stem
        folder = Path(name).parent
    columns = column_roles(rows, config.columns, problems)
    drafts = _from_rows(rows, data_source, columns, config, problems)
    if columns.images is None:
        return drafts
    named = columns.images if isinstance(columns.images, str) else ", ".join(columns.images)
    images = ImageColumn(named, folder, vision, problems)
    with_images = []
    for draft, (number, row) in zip(drafts, rows, strict=True):
        value: Any = None
        if isinstance(columns.images, str):
            _, value = lookup(row, columns.images)
        elif not isinstance(draft.prompt, str):
            what = "a list of image columns needs a prompt that is a text"
            problems.add(number, what, draft.prompt, "give the messages' images as one column")
        else:
            text, value = numbered_images(draft.prompt, row, columns.images)
            draft = draft._replace(prompt=text)
        with_images.append(draft._replace(images=images.read(number, value)))
    return with_images


def with_hint(draft: Draft, text: str, ratio: float) -> Draft:
    """The task with ``text`` and the first ``ratio`` of the characters of its solution behind the
    last message. Source: GHPO (arXiv 2507.10628), its released code.

    Example: of the solution "5 + 7 = 12" and 0.25 "5 " (2.5 characters are rounded to even).
    """
    hint = text + draft.solution[: round(ratio * len(draft.solution))]
    if isinstance(draft.prompt, str):
        return draft._replace(prompt=draft.prompt + hint)
    *before, last = draft.prompt
    return draft._replace(prompt=[*before, {**last, "content": between("", hint, last["content"])}])


def without_overlap(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[Prompt]:
    """``train`` without the prompts whose tokens and images are also a held-out prompt.

    A held-out score then measures unseen prompts.
    """
    seen = {prompt.content for prompt in held_out}
    return [prompt for prompt in train if prompt.content not in seen]


def _from_rows(
    rows: Rows, name: str, roles: DataColumns, config: DataConfig, problems: Problems
) -> list[Draft]:
    """``name``: the data source of rows that name none."""
    drafts = []
    for number, row in rows:
        prompt: Any = ""
        if isinstance(roles.prompt, tuple):
            texts = [lookup(row, column)[1] for column in roles.prompt]
            prompt = "\n".join(str(text) for text in texts if text)
        elif roles.prompt is not None:
            _, prompt = lookup(row, roles.prompt)
        _, answer = lookup(row, roles.answer)
        expected = _answer(number, answer, config.answer_after, problems)
        data_source: Any = lookup(row, roles.data_source)[1] if roles.data_source else name
        extra: Any = lookup(row, roles.extra)[1] if roles.extra else None
        if not isinstance(data_source, str) or not_utf8(data_source) is not None:
            remedy = "name the row's data source, or set data.columns.data_source=null"
            problems.add(number, f"{roles.data_source} is not a text", data_source, remedy)
        if extra is None:
            extra = {}
        elif not isinstance(extra, Mapping):
            remedy = "write an object, or set data.columns.extra=null"
            problems.add(number, f"{roles.extra} is not an object", extra, remedy)
            extra = {}
        draft = Draft(number, prompt, expected, str(data_source), dict(extra))
        if roles.categories:
            draft.extra[CATEGORIES] = categories_of(row, roles.categories)
        if roles.solution is not None:
            draft = draft._replace(solution=lookup(row, roles.solution)[1])
        if roles.choices is not None:
            draft = _of_choices(draft, row, roles.choices, config, problems)
        drafts.append(draft)
    return drafts


def _of_choices(
    draft: Draft, row: Mapping[str, Any], column: str, config: DataConfig, problems: Problems
) -> Draft:
    """A question with options; ``draft`` itself where its row has none."""
    _, value = lookup(row, column)
    try:
        choices = choices_of(value)
    except ValueError as error:
        remedy = "correct the row, or set data.columns.choices=null"
        problems.add(draft.row, f"{column}: {error}", value, remedy)
        return draft
    if not choices:
        return draft
    letter = letter_of(draft.answer, choices, config.answer_is_index)
    if letter is None:
        what = f"the answer is neither a letter nor one of the {len(choices)} choices of {column}"
        if config.answer_is_index:
            what = f"the answer is no number of one of the {len(choices)} choices of {column}"
        problems.add(draft.row, what, draft.answer, "correct the row, or drop it")
        return draft
    draft.extra["choices"] = choices
    prompt = draft.prompt
    if config.show_choices and isinstance(prompt, str):
        lines = [f"({name}) {choice}" for name, choice in zip(LETTERS, choices, strict=False)]
        prompt = "\n".join([prompt, *lines])
    return draft._replace(prompt=prompt, answer=letter)


def _answer(row: int, value: Any, after: str | None, problems: Problems) -> str:
    """The expected answer of a row; what is wrong with it goes to ``problems``."""
    # To Python a bool is a number.
    is_answer = isinstance(value, str | int | float) and not isinstance(value, bool)
    if not is_answer or not str(value).strip():
        remedy = "give the row an answer, drop it, or set data.columns.answer"
        problems.add(row, "no answer (a text or a number)", value, remedy)
        return ""
    text = str(value)
    if not_utf8(text) is not None:
        what = "half of a surrogate pair in the answer"
        problems.add(row, what, value, "write the character whole, or drop the row")
        return ""
    if after is None:
        return text.strip()
    _, marker, tail = text.rpartition(after)
    if not marker or not tail.strip():
        what = f"nothing after data.answer_after = {after!r} in the answer"
        problems.add(row, what, text, "correct the row or set data.answer_after=null")
    return tail.strip()
