"""A claim of a paper as data: what is compared, in which cells, and what the runs say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from scipy import stats

from megatron_rl.reporting.intervals import Interval, student

Verdict = Literal["superior", "inferior", "equivalent", "undecided"]
VERDICTS: tuple[Verdict, ...] = ("superior", "inferior", "equivalent", "undecided")
LEVEL = 0.05
POWER = 0.8
FEWEST = 12  # seeds of a claim that is to be decided
Steps = Mapping[int, float]  # of one metric of a run
Runs = Mapping[str, Mapping[int, Mapping[str, Steps]]]  # cell, seed, metric
START = "start"  # stands for a cell: the other one's run before its first step


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Check(Strict):
    """``more`` has a larger value of ``metric`` than ``less``, in the paper by ``effect``; or
    ``same`` differ by less than ``within``. ``steps``: the mean over the values in this range,
    first and last included; without it, the last value. A training metric has one value for every
    five steps, their mean. In place of a cell, ``start`` is the other one's value at step 0, which
    held-out metrics have."""

    metric: str
    more: str | None = None
    less: str | None = None
    same: tuple[str, str] | None = None
    within: Annotated[float, Field(gt=0)] | None = None
    effect: Annotated[float, Field(gt=0)] | None = None
    steps: tuple[int, int] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Check:
        ordered = self.more is not None and self.less is not None
        close = self.same is not None and self.within is not None
        if ordered == close:  # both, or neither
            raise ValueError("a check has `more` and `less`, or `same` and `within`")
        if self.pair == (START, START):
            raise ValueError(f"{self.metric}: a check has a cell beside `{START}`")
        return self

    @property
    def pair(self) -> tuple[str, str]:
        """The difference is the first cell's value minus the second's."""
        return self.same or (str(self.more), str(self.less))

    @property
    def margin(self) -> float | None:
        """Differences below it count as none."""
        return self.effect / 2 if self.effect else self.within

    @property
    def text(self) -> str:
        first, second = [self._shown(cell) for cell in self.pair]
        when = f", steps {self.steps[0]} to {self.steps[1]}" if self.steps else ""
        if self.same:
            return f"{self.metric}{when}: {first} within {self.within:g} of {second}"
        return f"{self.metric}{when}: {first} above {second}"

    @property
    def cells(self) -> list[str]:
        """Those of the pair that are cells: one of them, where the other is the start."""
        return [cell for cell in self.pair if cell != START]

    def _shown(self, cell: str) -> str:
        return f"the start of {self.cells[0]}" if cell == START else cell


class Claim(Strict):
    """``claim.yaml``."""

    title: str
    source: str
    says: str  # the paper
    expected: str  # at this scale, and why
    about: tuple[str, ...] = ()  # methods whose cards name it, beside those of its cells
    experiment: Literal["lab", "lab_exact"] = "lab"
    lab: tuple[str, ...] = ()  # options of its make.py
    train_on: tuple[str, ...] = ()  # kinds of prompts; the others are only held out; () = all
    plugin: Path | None = None  # what the runs load, from the claim's folder
    branch_from: tuple[str, ...] = ()  # overrides of the run whose last export a seed begins with
    overrides: tuple[str, ...] = ()  # of every cell
    cells: dict[str, tuple[str, ...]]  # label -> overrides
    differ: tuple[str, ...]  # keys in which cells of a check differ, each with all below it
    num_seeds: Annotated[int, Field(ge=2)] = 5
    checks: tuple[Check, ...]
    curves: tuple[str, ...]
    found: str = ""  # in words, after the runs

    @model_validator(mode="after")
    def _known_cells(self) -> Claim:
        if START in self.cells:
            raise ValueError(f"cells: {START} stands for the state before training; rename it")
        for check in self.checks:
            for cell in check.cells:
                if cell not in self.cells:
                    raise ValueError(f"{check.metric}: no cell {cell}; there are {[*self.cells]}")
        return self

    @property
    def is_exact(self) -> bool:
        """Whether held-out accuracy is computed from the weights, not sampled."""
        return self.experiment == "lab_exact"

    @property
    def metrics(self) -> list[str]:
        """What is kept of a run."""
        of_checks = [check.metric for check in self.checks]
        return list(dict.fromkeys([*of_checks, *self.curves]))


@dataclass(frozen=True)
class Outcome:
    """What the runs say of a check. ``smallest``: the difference that so many seeds decide four
    times in five."""

    check: Check
    seeds: tuple[int, ...]
    student: Interval
    smallest: float
    verdict: Verdict


def read_claim(folder: Path) -> Claim:
    values = yaml.safe_load((folder / "claim.yaml").read_text("utf-8"))
    if "plugin" in values:
        values["plugin"] = folder.resolve() / values["plugin"]
    return Claim.model_validate(values)


def outcomes(checks: Sequence[Check], runs: Runs) -> list[Outcome]:
    """The paired differences over the seeds that both cells have, and the verdicts of a claim.

    The first cell is superior or inferior where a t test finds a difference, and the two are
    equivalent where two one-sided ones find it within the margin, half of the paper's effect
    (TOST, Schuirmann 1987), at 5 % after Holm's correction over the tests of either kind. Where
    both hold, the one that the paper speaks of counts.
    """
    paired = [_differences(check, runs) for check in checks]
    values = [list(of_seeds.values()) for of_seeds in paired]
    different = holm([p_different(some) for some in values])
    with_margin = [place for place, check in enumerate(checks) if check.margin]
    close = [p_within(values[place], checks[place].margin or 0.0) for place in with_margin]
    p_close = dict(zip(with_margin, holm(close), strict=True))
    found = []
    for place, (check, of_seeds) in enumerate(zip(checks, paired, strict=True)):
        interval = student(values[place])
        words: list[Verdict] = []
        if different[place] <= LEVEL:
            words.append("superior" if interval.mean > 0 else "inferior")
        if p_close.get(place, 1.0) <= LEVEL:
            words.insert(0 if check.same else len(words), "equivalent")
        smallest = smallest_decided(_spread(values[place]), len(of_seeds))
        words.append("undecided")
        found.append(Outcome(check, tuple(of_seeds), interval, smallest, words[0]))
    return found


def _differences(check: Check, runs: Runs) -> dict[int, float]:
    """By seed."""
    seeds = sorted(set.intersection(*(set(runs[cell]) for cell in check.cells)))
    first, second = check.pair
    return {
        seed: _of_seed(first, seed, check, runs) - _of_seed(second, seed, check, runs)
        for seed in seeds
    }


def spreads(runs: Runs, steps: tuple[int, int] | None) -> dict[str, float]:
    """By metric the standard deviation of the paired difference, as the root of the mean variance
    over all pairs of cells; ``steps``: as a check has them."""
    found = {}
    metrics = {metric for seeds in runs.values() for of_run in seeds.values() for metric in of_run}
    for metric in sorted(metrics):
        pairs = [
            Check(metric=metric, more=first, less=second, steps=steps)
            for first, second in combinations(runs, 2)
        ]
        variances = [_spread([*_differences(pair, runs).values()]) ** 2 for pair in pairs]
        found[metric] = float(np.sqrt(fmean(variances)))
    return found


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else np.inf


def p_different(values: Sequence[float]) -> float:
    """Of Student's two-sided test that the mean is 0; 1 of values that do not decide it."""
    return _p(values, 0.0, "two-sided")


def p_within(values: Sequence[float], margin: float) -> float:
    """Of the two one-sided tests that the mean lies ``margin`` or more from 0."""
    return max(_p(values, -margin, "greater"), _p(values, margin, "less"))


def _p(values: Sequence[float], mean: float, side: str) -> float:
    if len(values) < 2:
        return 1.0
    if not np.ptp(values):  # no spread: decided, but where it is the mean itself
        above = values[0] - mean
        return float(not {"two-sided": above != 0, "greater": above > 0, "less": above < 0}[side])
    return float(stats.ttest_1samp(values, mean, alternative=side).pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """The p values after Holm's correction (1979) for their number."""
    order = np.argsort(values)
    adjusted = np.empty(len(values))
    scaled = np.asarray(values)[order] * np.arange(len(values), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted.tolist()


def smallest_decided(spread: float, num_seeds: int) -> float:
    """The true difference that one test of ``num_seeds`` differences with this standard deviation
    finds with ``POWER``: (t(0.975) + t(0.8)) spread / sqrt(num_seeds), nearly."""
    if num_seeds < 2:
        return np.inf
    quantiles = stats.t.ppf([1 - LEVEL / 2, POWER], num_seeds - 1)
    return float(quantiles.sum() * spread / np.sqrt(num_seeds))


def needed(check: Check, spread: float) -> int | None:
    """Seeds, at least ``FEWEST``, that find the paper's effect if it is there and equivalence if
    the cells do not differ, each with ``POWER``; None: a check without a margin."""
    if check.margin is None:
        return None
    num_seeds = FEWEST
    while True:
        # Both one-sided tests have to reject: each with 1 - (1 - POWER) / 2.
        quantiles = stats.t.ppf([1 - LEVEL, (1 + POWER) / 2], num_seeds - 1)
        equivalent = quantiles.sum() * spread / np.sqrt(num_seeds) <= check.margin
        if equivalent and smallest_decided(spread, num_seeds) <= (check.effect or np.inf):
            return num_seeds
        num_seeds += 1


def _of_seed(cell: str, seed: int, check: Check, runs: Runs) -> float:
    if cell != START:
        return value(runs[cell][seed][check.metric], check)
    steps = runs[check.cells[0]][seed][check.metric]
    if 0 not in steps:
        raise ValueError(f"{check.metric}: no value at step 0, from which `{START}` is taken")
    return steps[0]


def value(steps: Steps, check: Check) -> float:
    """The number of a run that a check compares."""
    if check.steps is None:
        return steps[max(steps)]
    first, last = check.steps
    chosen = [number for step, number in steps.items() if first <= step <= last]
    if not chosen:
        there = f"there are {min(steps)} to {max(steps)}"
        raise ValueError(f"{check.metric}: no value at steps {first} to {last}, {there}")
    return fmean(chosen)


def overall(outcomes: Sequence[Outcome]) -> str:
    """One word, or how many of the checks had which outcome."""
    verdicts = {one.verdict for one in outcomes}
    return verdicts.pop() if len(verdicts) == 1 else _counts(outcomes)


def tally(outcomes: Sequence[Outcome]) -> str:
    """How many checks there are, and how many of them had which outcome."""
    return f"{len(outcomes)} checks: {_counts(outcomes)}"


def _counts(outcomes: Sequence[Outcome]) -> str:
    verdicts = [one.verdict for one in outcomes]
    return ", ".join(f"{verdicts.count(kind)} {kind}" for kind in VERDICTS if kind in verdicts)
