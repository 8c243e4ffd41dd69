"""All data of a run, and what a person should know about it before the run starts."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.cli.overrides import typed
from megatron_rl.config.data_names import GENERATED, entries
from megatron_rl.config.schema import Config
from megatron_rl.data.loader import PromptLoader, WeightedLoader
from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.prompts import PromptSource, load_sources, without_overlap
from megatron_rl.data.rows import interleaved
from megatron_rl.errors import first_few, shortened
from megatron_rl.types import Prompt

logger = logging.getLogger(__name__)

Doubt = tuple[str, str]  # key of the configuration, a sentence with a remedy
_MARKER = "####"  # stands before the final answer in GSM8K
_OVERLAP = "also in data.eval"
_SHOWN_UIDS = 3


@dataclass(frozen=True)
class Data:
    """The prompts of a run, by source.

    Example: ``data.train[0].summary()`` says what was read, dropped and kept.
    """

    train: tuple[PromptSource, ...]
    held_out: tuple[PromptSource, ...]
    train_prompts: Sequence[Prompt]  # of all sources

    @property
    def held_out_prompts(self) -> list[Prompt]:
        """Interleaved: every prefix (evaluation.num_prompts) mixes all sources."""
        return interleaved([source.prompts for source in self.held_out])


def read_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, vision: VisionProcessor | None = None
) -> Data:
    """``read_sources``; logs a summary of each source, and likely mistakes."""
    data = read_sources(config, tokenizer, vision)
    log(data, examined(data, config), config)
    return data


def read_sources(
    config: Config, tokenizer: PreTrainedTokenizerBase, vision: VisionProcessor | None = None
) -> Data:
    """Reads ``data.train``, which is empty for an evaluation, and ``data.eval``. ``vision``: of a
    vision-language model.

    Raises:
        ValueError: as ``load_sources``; no prompt is left without the held-out ones.
    """
    data = config.data
    max_tokens = config.rollout.max_prompt_tokens
    train = tuple(
        load_sources(entries(data.train), data, tokenizer, max_tokens, vision, is_training=True)
    )
    held_out = tuple(load_sources(entries(data.eval), data, tokenizer, max_tokens, vision))
    if train and data.drop_eval_overlap:
        train = tuple(_without(source, all_prompts(held_out)) for source in train)
        if not all_prompts(train):
            read = sum(source.num_rows for source in train)
            raise ValueError(
                f"data.train: every one of its {read} prompts is also in data.eval; "
                "give other data, or data.drop_eval_overlap=false"
            )
    return Data(train, held_out, all_prompts(train))


def examined(data: Data, config: Config) -> list[Doubt]:
    """Everything about the data that is allowed and probably a mistake."""
    return [
        (key, doubt)
        for key, sources in {"data.train": data.train, "data.eval": data.held_out}.items()
        for doubt in _doubts(all_prompts(sources), config)
    ]


def log(data: Data, doubts: Sequence[Doubt], config: Config) -> None:
    """A summary of each source, and the doubts; warns where there are few training prompts."""
    for key, sources in (("data.train", data.train), ("data.eval", data.held_out)):
        for source in sources:
            logger.info("%s: %s", key, source.summary())
        for of, doubt in doubts:
            if of == key:
                logger.warning("%s: %s", key, doubt)
    num_prompts = len(data.train_prompts)
    if data.train and num_prompts < config.batch.prompts_per_step:
        logger.warning(
            "data.train: its %d prompts are fewer than batch.prompts_per_step = %d: every step asks"
            " some of them more than once; give more data or lower batch.prompts_per_step",
            num_prompts,
            config.batch.prompts_per_step,
        )


def training_stream(data: Data, config: Config) -> PromptLoader | WeightedLoader:
    """The endless stream of training prompts: all rows alike, or each source by its weight."""
    weights = config.data.train_weights
    shuffle = config.data.shuffle
    if weights is None:
        return PromptLoader(data.train_prompts, seed=config.seed, shuffle=shuffle)
    sources = [source.prompts for source in data.train]
    return WeightedLoader(sources, weights, seed=config.seed, shuffle=shuffle)


def with_steps(config: Config, data: Data) -> Config:
    """``config`` with the ``trainer.num_steps`` of its ``trainer.num_epochs``.

    An epoch has as many steps as its prompts fill; those of a warm start come before. The stream of
    prompts leaves none out: what fills no step at the end of an epoch begins the next step.

    Raises:
        ValueError: the prompts do not fill one step.
    """
    epochs = config.trainer.num_epochs
    if epochs is None:
        return config
    num_prompts = len(data.train_prompts)
    of_epoch = num_prompts // config.batch.prompts_per_step
    if not of_epoch:
        raise ValueError(
            f"trainer.num_epochs = {epochs}: the {num_prompts} prompts of data.train do not fill a"
            f" step of batch.prompts_per_step = {config.batch.prompts_per_step}; give"
            " trainer.num_steps and trainer.num_epochs=null, more data, or smaller steps"
        )
    return config.with_values(trainer={"num_steps": config.warm_start.steps + epochs * of_epoch})


def _without(source: PromptSource, held_out: Sequence[Prompt]) -> PromptSource:
    kept = tuple(without_overlap(source.prompts, held_out))
    dropped = {**source.dropped, _OVERLAP: len(source.prompts) - len(kept)}
    return replace(source, prompts=kept, dropped=dropped)


def _doubts(prompts: Sequence[Prompt], config: Config) -> Iterator[str]:
    """One sentence, with a remedy, for everything that is allowed and probably a mistake."""
    yield from _repeats(prompts, config.reward.verifier)
    marked = [prompt for prompt in prompts if _MARKER in prompt.answer]
    if config.data.answer_after is None and 2 * len(marked) > len(prompts):
        yield (
            f"{len(marked)} of {len(prompts)} answers hold {_MARKER!r} ({_uids(marked)}) and "
            "data.answer_after is null, so the whole text is the expected answer; if it is what "
            f"follows the marker, type {typed('data.answer_after', _MARKER)}"
        )
    boxed = [prompt for prompt in prompts if r"\boxed" in prompt.answer]
    if config.reward.verifier in ("number", "exact") and 2 * len(boxed) > len(prompts):
        yield (
            rf"{len(boxed)} of {len(prompts)} answers hold \boxed ({_uids(boxed)}), which "
            f"reward.verifier={config.reward.verifier} does not read: the whole text is the "
            "expected answer; reward.verifier=math reads what is in the box"
        )


def _repeats(prompts: Sequence[Prompt], verifier: str) -> Iterator[str]:
    groups: dict[Any, list[Prompt]] = defaultdict(list)  # rows that ask the same
    for prompt in prompts:
        groups[prompt.content].append(prompt)
    contradictory = []
    redundant = []
    # A generated task is judged by the task: its answer is one that is right.
    by_task = verifier in ("auto", "reasoning_gym")
    for group in groups.values():
        is_generated = all(prompt.data_source.startswith(GENERATED) for prompt in group)
        if len(_answers(group)) > 1:
            if not (by_task and is_generated):
                contradictory.append(group)
        elif len(group) > 1:
            redundant.append(group)
    if contradictory:
        first, second = (repr(shortened(text, 40)) for text in _answers(contradictory[0])[:2])
        yield (
            f"{len(contradictory)} prompts come with different answers"
            f" ({_uids(contradictory[0])}: {first} and {second}): what is right for one row is"
            " wrong for another; correct the rows"
        )
    if redundant:
        num_repeats = sum(len(group) - 1 for group in redundant)
        yield (
            f"{num_repeats} rows repeat a prompt and its answer (such as {_uids(redundant[0])}):"
            " such prompts weigh more; drop them if that is not meant"
        )


def _answers(prompts: Sequence[Prompt]) -> list[str]:
    """The different answers, in order."""
    return list(dict.fromkeys(prompt.answer for prompt in prompts))


def _uids(prompts: Sequence[Prompt]) -> str:
    return ", ".join(first_few([prompt.uid for prompt in prompts], _SHOWN_UIDS, "..."))


def all_prompts(sources: Iterable[PromptSource]) -> list[Prompt]:
    return [prompt for source in sources for prompt in source.prompts]
