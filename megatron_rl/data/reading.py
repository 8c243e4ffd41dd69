"""All data of a run, and what a person should know about it before the run starts."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.data_names import entries
from megatron_rl.config.overrides import typed
from megatron_rl.config.schema import Config
from megatron_rl.data.loader import PromptLoader, WeightedLoader
from megatron_rl.data.prompts import Source, load_sources, without_overlap
from megatron_rl.types import Prompt

LOGGER = logging.getLogger(__name__)
MARKER = "####"
OVERLAP = "also in data.eval"
SHOWN = 3


@dataclass(frozen=True)
class Data:
    """The prompts of a run, by source.

    Example: ``data.train[0].summary()`` says what was read, dropped and kept.
    """

    train: tuple[Source, ...]
    held_out: tuple[Source, ...]

    @property
    def train_prompts(self) -> list[Prompt]:
        return _prompts(self.train)

    @property
    def held_out_prompts(self) -> list[Prompt]:
        """Sources take turns, so that any first part (evaluation.num_prompts) holds all of them."""
        turns = zip_longest(*(source.prompts for source in self.held_out))
        return [prompt for turn in turns for prompt in turn if prompt is not None]


def read_data(config: Config, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Reads ``data.train`` and ``data.eval``, with a notice for each source.

    What is likely a mistake gets a warning.

    Raises:
        ValueError: as ``load_sources``; no prompt is left without the held-out ones.
    """
    data, longest = config.data, config.rollout.max_prompt_tokens
    train, held_out = (
        tuple(load_sources(entries(names), data, tokenizer, longest))
        for names in (data.train, data.eval)
    )
    if data.drop_eval_overlap:
        train = tuple(_without(source, _prompts(held_out)) for source in train)
        if not _prompts(train):
            read = sum(source.num_rows for source in train)
            raise ValueError(
                f"data.train: every one of its {read} prompts is also in data.eval; "
                "give other data, or data.drop_eval_overlap=false"
            )
    for key, sources in (("data.train", train), ("data.eval", held_out)):
        for source in sources:
            LOGGER.info("%s: %s", key, source.summary())
        for warning in doubts(_prompts(sources), config):
            LOGGER.warning("%s: %s", key, warning)
    asked, there = config.batch.prompts_per_step, len(_prompts(train))
    if there < asked:
        LOGGER.warning(
            "data.train: its %d prompts are fewer than batch.prompts_per_step = %d: every step asks "
            "some of them more than once; give more data or lower batch.prompts_per_step",
            there,
            asked,
        )
    return Data(train, held_out)


def training_stream(data: Data, config: Config) -> PromptLoader | WeightedLoader:
    """The endless stream of training prompts: all rows alike, or each source by its weight."""
    weights, seed, shuffle = config.data.train_weights, config.seed, config.data.shuffle
    if weights is None:
        return PromptLoader(data.train_prompts, seed=seed, shuffle=shuffle)
    return WeightedLoader(
        [source.prompts for source in data.train], weights, seed=seed, shuffle=shuffle
    )


def _without(source: Source, held_out: Sequence[Prompt]) -> Source:
    kept = tuple(without_overlap(source.prompts, held_out))
    dropped = {**source.dropped, OVERLAP: len(source.prompts) - len(kept)}
    return replace(source, prompts=kept, dropped=dropped)


def doubts(prompts: Sequence[Prompt], config: Config) -> Iterator[str]:
    """One sentence (with a remedy) for each thing that is allowed and likely a mistake."""
    yield from _repeats(prompts)
    marked = [prompt for prompt in prompts if MARKER in prompt.answer]
    if config.data.answer_after is None and 2 * len(marked) > len(prompts):
        yield (
            f"{len(marked)} of {len(prompts)} answers hold {MARKER!r} ({_uids(marked)}) and "
            "data.answer_after is null, so the whole text is the expected answer; if it is what "
            f"follows the marker, type {typed('data.answer_after', MARKER)}"
        )
    boxed = [prompt for prompt in prompts if r"\boxed" in prompt.answer]
    if config.reward.verifier in ("number", "exact") and 2 * len(boxed) > len(prompts):
        yield (
            rf"{len(boxed)} of {len(prompts)} answers hold \boxed ({_uids(boxed)}), which "
            f"reward.verifier={config.reward.verifier} does not read: the whole text is the "
            "expected answer; reward.verifier=math reads what is in the box"
        )


def _repeats(prompts: Sequence[Prompt]) -> Iterator[str]:
    groups: dict[tuple[int, ...], list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.token_ids].append(prompt)
    repeated = [group for group in groups.values() if len(group) > 1]
    clashing = [group for group in repeated if len({prompt.answer for prompt in group}) > 1]
    alike = [group for group in repeated if len({prompt.answer for prompt in group}) == 1]
    if clashing:
        answers = list(Counter(prompt.answer for prompt in clashing[0]))
        yield (
            f"{len(clashing)} prompts come with different answers ({_uids(clashing[0])}: "
            f"{_short(answers[0])} and {_short(answers[1])}): what is right for one row is wrong "
            "for another; correct the rows"
        )
    if alike:
        more = sum(len(group) - 1 for group in alike)
        yield (
            f"{more} rows repeat a prompt and its answer (such as {_uids(alike[0])}): such prompts "
            "weigh more; drop them if that is not meant"
        )


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _uids(prompts: Iterable[Prompt]) -> str:
    names = [prompt.uid for prompt in prompts]
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _prompts(sources: Iterable[Source]) -> list[Prompt]:
    return [prompt for source in sources for prompt in source.prompts]
