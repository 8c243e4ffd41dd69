"""Runs that differ in their seed alone form a variant; its label says what sets it apart."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from megatron_rl.config.keys import within
from megatron_rl.run.run_record import differences
from tools.reporting.runs import Run

# What decides how long is trained and what is measured: it does not train, but its values cannot
# stand for each other.
_MEASURED = (
    "trainer.num_steps",
    "data.eval",
    "evaluation.num_prompts",
    "evaluation.responses_per_prompt",
    "evaluation.temperature",
    "evaluation.top_p",
)
# Of each run alone, or about its files.
_OF_A_RUN = ("run_dir", "seed", "resume", "logging", "checkpoint")
_NO_SETTING = ("versions", "git_commit", "model_fingerprint", "data_fingerprint", "plugins")
_MAX_VALUE = 28  # characters of a value in a label


@dataclass(frozen=True)
class Variant:
    """Runs of equal settings, one a seed, or several where nothing else tells them apart."""

    label: str  # short, and different from that of every other variant
    runs: tuple[Run, ...]

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs that tables count: those that are finished, all where none is."""
        return tuple(run for run in self.runs if run.finished) or self.runs

    @property
    def has_finished(self) -> bool:
        return any(run.finished for run in self.runs)

    @property
    def repeated_seeds(self) -> tuple[int, ...]:
        """Seeds of more than one run."""
        counts = Counter(run.seed for run in self.runs)
        return tuple(sorted(seed for seed, count in counts.items() if count > 1))

    def values(self, key: str) -> list[Any]:
        """The distinct values of a setting, in the order of the runs."""
        return distinct([run.setting(key) for run in self.runs])


def variants_of(runs: Sequence[Run]) -> list[Variant]:
    """The variants in the order of their first run.

    Where a variant would hold a seed twice, it is split by the other settings that differ, such as
    the layout: these train the same, and were run to be compared.
    """
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if _alike(group[0], run):
                group.append(run)
                break
        else:
            groups.append([run])
    split = [part for group in groups for part in _split(group)]
    by_seed = [tuple(sorted(group, key=lambda run: run.seed)) for group in split]
    return list(map(Variant, _labels(split), by_seed))


def choose_baseline(variants: Sequence[Variant], label: str | None) -> Variant:
    """The variant of this label, or the only one that has all words of it; without a label that of
    method grpo, else the first.

    Raises:
        ValueError: no variant has the label, or the words of it are those of several.
    """
    if label is None:
        plain = [variant for variant in variants if variant.runs[0].method == "grpo"]
        return plain[0] if plain else variants[0]
    fitting = [variant for variant in variants if variant.label == label]
    if not fitting and (words := set(label.split())):
        fitting = [variant for variant in variants if words <= set(variant.label.split())]
    if len(fitting) == 1:
        return fitting[0]
    labels = "".join(f"\n  - {variant.label}" for variant in variants)
    which = "several variants have these words" if fitting else "no variant has this label"
    raise ValueError(f"--baseline {label!r}: {which}; choose one of:{labels}")


def all_runs(variants: Sequence[Variant]) -> list[Run]:
    """The runs of all variants, one by one."""
    return [run for variant in variants for run in variant.runs]


def distinct(values: Sequence[Any]) -> list[Any]:
    """Without repetitions, in order of appearance; values may be lists, which no set takes."""
    kept: list[Any] = []
    for value in values:
        if value not in kept:
            kept.append(value)
    return kept


def shown(value: Any) -> str:
    """A setting as text; an empty one as ``""``."""
    if isinstance(value, str) and value:
        return value
    return json.dumps(value, sort_keys=True)


def varying_keys(runs: Sequence[Run]) -> list[str]:
    """Settings that are not the same in all runs, in the order of ``config.json``; without what
    belongs to one run alone, and without versions."""
    keys = [key for key in setting_keys(runs) if not within(key, (*_OF_A_RUN, *_NO_SETTING))]
    return [key for key in keys if len(distinct([run.setting(key) for run in runs])) > 1]


def setting_keys(runs: Sequence[Run]) -> list[str]:
    """Dotted keys that some run has, each once, in the order of ``config.json``."""
    return list(dict.fromkeys(key for run in runs for key in run.settings))


def _alike(first: Run, other: Run) -> bool:
    """Whether two runs train and measure the same but for the seed."""
    measured_alike = all(first.settings.get(key) == other.settings.get(key) for key in _MEASURED)
    changes = differences(first.record, other.record) if measured_alike else ()
    return measured_alike and all(change.key == "seed" for change in changes)


def _split(group: list[Run]) -> Iterator[list[Run]]:
    """Parts of a group with equal settings, where a seed is in it twice; else the group."""
    if len({run.seed for run in group}) == len(group):
        yield group
        return
    # A path that differs for the same content says nothing, and ``differences`` has seen that
    # model and data have the same content.
    keys = [key for key in varying_keys(group) if not within(key, ("model.path", "data"))]
    parts: dict[str, list[Run]] = {}
    for run in group:
        parts.setdefault(_values_text(run, keys), []).append(run)
    yield from parts.values()


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """The fewest settings that tell the groups apart, method first."""
    firsts = [group[0] for group in groups]
    if len(groups) == 1:
        return [f"method={firsts[0].method}"]
    chosen = _telling_keys(groups)
    names = _short_names(chosen)
    labels = []
    for run in firsts:
        own = [key for key in chosen if key in run.settings]
        words = [f"{names[key]}={_short(run.settings[key])}" for key in own]
        labels.append(" ".join(words) or run.name)
    # Variants may differ in what no label names, such as the code of a plug-in.
    numbered = [f"{each} ({labels[:place].count(each) + 1})" for place, each in enumerate(labels)]
    pairs = zip(labels, numbered, strict=True)
    return [label if labels.count(label) == 1 else new for label, new in pairs]


def _telling_keys(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Keys, each of which separates groups that those before it do not.

    Example: of three groups with methods grpo, grpo, psr and learning rates 1, 2, 2 the method
    makes two parts, and both together three. Both keys are kept; a third would not be.
    """
    firsts = [group[0] for group in groups]
    # What varies within a group cannot stand in its label.
    varying = [set(varying_keys(group)) for group in groups]
    constant = [key for key in varying_keys(firsts) if not any(key in each for each in varying)]
    # The method first: it is what one looks for. Fingerprints last: they say that something
    # differs, not what.
    constant.sort(key=lambda key: key != "method.name")
    chosen: list[str] = []
    num_parts = 1
    for key in (*constant, "model_fingerprint", "data_fingerprint"):
        keys = [*chosen, key]
        parts = {_values_text(run, keys) for run in firsts}
        if len(parts) > num_parts:
            chosen = keys
            num_parts = len(parts)
    return chosen


def _values_text(run: Run, keys: Sequence[str]) -> str:
    """The values of some keys as one text: those that are lists could not be told apart by a set or
    be the key of a mapping."""
    return shown([run.settings.get(key) for key in keys])


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of a key where it is the only one of that name; ``method`` for its name."""
    names = {key: key.rpartition(".")[2] for key in keys}
    if "method.name" in names:
        names["method.name"] = "method"
    counts = Counter(names.values())
    return {key: name if counts[name] == 1 else key for key, name in names.items()}


def _short(value: Any) -> str:
    """A value in a label: one word, long ones cut, with a digest that keeps them apart."""
    text = "_".join(shown(value).split())
    if len(text) <= _MAX_VALUE:
        return text
    digest = sha256(text.encode()).hexdigest()[:4]
    return f"{text[: _MAX_VALUE - len('...') - len(digest)]}...{digest}"
