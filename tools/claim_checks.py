"""A claim of a paper as data: what is compared, in which cells, and what the runs say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_rl.reporting.intervals import Interval, student

Verdict = Literal["reproduced", "not reproduced", "inconclusive"]
Steps = Mapping[int, float]  # of one metric of a run
Runs = Mapping[str, Mapping[int, Mapping[str, Steps]]]  # cell, seed, metric
START = "start"  # stands for a cell: the other one's run before its first step


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Check(Strict):
    """``more`` has a larger value of ``metric`` than ``less``; or ``same`` differ by less than
    ``within``. ``steps``: the mean over the values in this range, first and last included; without
    it, the last value. A training metric has one value for every five steps, their mean. In place
    of a cell, ``start`` is the other one's value at step 0, which held-out metrics have."""

    metric: str
    more: str | None = None
    less: str | None = None
    same: tuple[str, str] | None = None
    within: Annotated[float, Field(gt=0)] | None = None
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
    plugin: Path | None = None  # what the runs load; a file of the claim's folder
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
    """What the runs say of a check."""

    check: Check
    seeds: tuple[int, ...]
    student: Interval
    verdict: Verdict


def read_claim(folder: Path) -> Claim:
    values = yaml.safe_load((folder / "claim.yaml").read_text("utf-8"))
    if "plugin" in values:
        values["plugin"] = folder.resolve() / values["plugin"]
    return Claim.model_validate(values)


def outcome(check: Check, runs: Runs) -> Outcome:
    """The paired differences over the seeds that both cells have, and the verdict.

    An ordered check is reproduced where the interval lies above 0, not reproduced where it lies
    below. ``same`` is reproduced where it lies within the margin, not where it lies outside.
    """
    seeds = tuple(sorted(set.intersection(*(set(runs[cell]) for cell in check.cells))))
    differences = []
    for seed in seeds:
        of_first, of_second = [_of_seed(cell, seed, check, runs) for cell in check.pair]
        differences.append(of_first - of_second)
    interval = student(differences)
    return Outcome(check, seeds, interval, verdict(check, interval))


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


def verdict(check: Check, interval: Interval) -> Verdict:
    margin = check.within or 0.0
    if check.same:
        if -margin <= interval.low and interval.high <= margin:
            return "reproduced"
        outside = interval.low > margin or interval.high < -margin
    else:
        if interval.low > 0:
            return "reproduced"
        outside = interval.high < 0
    return "not reproduced" if outside else "inconclusive"


def overall(outcomes: Sequence[Outcome]) -> str:
    """One word, or how many of the checks had which outcome."""
    verdicts = {one.verdict for one in outcomes}
    return verdicts.pop() if len(verdicts) == 1 else _counts(outcomes)


def tally(outcomes: Sequence[Outcome]) -> str:
    """How many checks there are, and how many of them had which outcome."""
    return f"{len(outcomes)} checks: {_counts(outcomes)}"


def _counts(outcomes: Sequence[Outcome]) -> str:
    verdicts = [one.verdict for one in outcomes]
    kinds: tuple[Verdict, ...] = ("reproduced", "not reproduced", "inconclusive")
    return ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds if kind in verdicts)
