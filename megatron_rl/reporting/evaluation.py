"""Metrics of an evaluation: accuracy, pass@k, maj@n, lengths, and their intervals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import comb, isfinite
from statistics import fmean

import numpy as np
from jaxtyping import Bool, Float, Int

from megatron_rl.reporting.intervals import student
from megatron_rl.reporting.report import table

Metrics = dict[str, float]
Values = Mapping[str, float | int | None]  # a row as it is, or as it was read
# In place of eval/: the bounds of a value.
LOW = "eval_low/"
HIGH = "eval_high/"

_TOKENS = "eval/response_tokens_mean"
_SPREAD = r"eval/accuracy_std_of_(\d+)_runs"


@dataclass(frozen=True)
class ScoredResponses:
    """Scored responses to held-out prompts, one row each, in canonical (prompt, response) order.

    Example, two responses to one prompt: ``ScoredResponses(np.array([0, 0]), ["gsm8k", "gsm8k"],
    np.array([True, False]), np.array([1.0, 0.0]), np.array([5, 7]), np.array([False, False]),
    ["12", "13"], np.array([True, True]), [["level=1"], ["level=1"]])``.
    """

    group_ids: Int[np.ndarray, " rows"]  # the number of the prompt, from 0 on
    data_sources: Sequence[str]
    correct: Bool[np.ndarray, " rows"]
    rewards: Float[np.ndarray, " rows"]
    lengths: Int[np.ndarray, " rows"]  # tokens
    truncated: Bool[np.ndarray, " rows"]
    extracted: Sequence[str | None]  # see ``rewards.base.Verdict``
    # False where the verifier failed: such a row counts in lengths alone.
    has_verdict: Bool[np.ndarray, " rows"]
    categories: Sequence[Sequence[str]]  # those of the prompt, ``data.columns.categories``

    def parts(self) -> dict[str, ScoredResponses]:
        """The rows of each data source, where there are several, and of each category, by name.

        A prompt of several categories is in each of them. Those of several sources are apart:
        ``mathvista/skills=statistical reasoning``.
        """
        has_several = len(set(self.data_sources)) > 1
        rows: dict[str, list[int]] = {}
        of_rows = zip(self.data_sources, self.categories, strict=True)
        for row, (source, categories) in enumerate(of_rows):
            names = dict.fromkeys(categories)  # each once, in their order
            if has_several:
                names = dict.fromkeys([source, *(f"{source}/{name}" for name in names)])
            for name in names:
                rows.setdefault(name, []).append(row)
        return {name: self._take(rows[name]) for name in sorted(rows)}

    @property
    def with_verdict(self) -> ScoredResponses:
        """The rows that have one."""
        return self._take(np.flatnonzero(self.has_verdict).tolist())

    def _take(self, rows: list[int]) -> ScoredResponses:
        # Numbered anew without gaps, since ``bincount`` would count a missing number as a prompt
        # without responses: 1, 1, 4, 4 become 0, 0, 1, 1.
        _, group_ids = np.unique(self.group_ids[rows], return_inverse=True)
        columns = (self.correct, self.rewards, self.lengths, self.truncated)
        return ScoredResponses(
            group_ids,
            [self.data_sources[row] for row in rows],
            *(column[rows] for column in columns),
            [self.extracted[row] for row in rows],
            self.has_verdict[rows],
            [self.categories[row] for row in rows],
        )


def evaluation_metrics(scored: ScoredResponses, pass_at: Sequence[int]) -> Metrics:
    """The ``eval/`` row of a run: ``_overall_metrics``, and the accuracy of each of the parts."""
    metrics = _overall_metrics(scored, pass_at)
    for name, part in scored.parts().items():
        correct = part.with_verdict.correct.tolist()
        if correct:
            metrics[f"eval/accuracy/{name}"] = fmean(correct)
    return metrics


def _overall_metrics(scored: ScoredResponses, pass_at: Sequence[int]) -> Metrics:
    """Accuracy (mean over responses: avg@n), mean reward, length in tokens, truncated share, pass@k
    (unbiased, mean over prompts) and, of several responses a prompt, maj@n where answers were
    extracted (``majority_is_right``, mean over prompts). Responses without a verdict count in
    lengths alone, and in their share; a prompt that has fewer than k others is not in pass@k.

    Raises:
        ValueError: a k is above the number of responses.
    """
    metrics = {}
    if not scored.has_verdict.all():
        metrics["eval/excluded_share"] = fmean((~scored.has_verdict).tolist())
    if scored.has_verdict.any():
        metrics["eval/accuracy"] = fmean(scored.with_verdict.correct.tolist())
        metrics["eval/reward_mean"] = fmean(scored.with_verdict.rewards.tolist())
    metrics["eval/response_tokens_mean"] = fmean(scored.lengths.tolist())
    metrics["eval/truncated_share"] = fmean(scored.truncated.tolist())
    for key, values in _of_prompts(scored, pass_at).items():
        # Accuracy is the mean over responses, as above; that of the means over prompts may differ
        # in its last bit, and is another number where prompts have unequal numbers of responses.
        if key != "eval/accuracy":
            metrics[key] = fmean(values)
    return metrics


def detailed_metrics(scored: ScoredResponses, pass_at: Sequence[int]) -> Metrics:
    """``evaluation_metrics``, all of it also of each of the parts (``eval/pass_at_8/gsm8k``), the
    spread over runs (``_spread_of_runs``), and the bounds of accuracy, pass@k and maj@n:
    ``eval_low/accuracy`` and ``eval_high/accuracy`` hold it with 95 % (Student's t, of prompts)."""
    metrics = evaluation_metrics(scored, pass_at) | _only_alone(scored, pass_at)
    for name, part in scored.parts().items():
        values = _overall_metrics(part, pass_at) | _only_alone(part, pass_at)
        metrics |= {f"{key}/{name}": value for key, value in values.items()}
    return metrics


def _only_alone(scored: ScoredResponses, pass_at: Sequence[int]) -> Metrics:
    """What ``detailed_metrics`` adds."""
    return _spread_of_runs(scored) | _bounds(scored, pass_at)


def _spread_of_runs(scored: ScoredResponses) -> Metrics:
    """``eval/accuracy_std_of_N_runs``: the sample standard deviation of the accuracies of N runs.

    The first responses to all prompts are one run, the second ones the next: of N responses to a
    prompt each the accuracy over all of them is the mean of N runs, avg@N. Nothing where a prompt
    has a number of responses of its own, or a response no verdict.
    """
    sizes = np.bincount(scored.group_ids)
    num_runs = int(sizes.max())
    if num_runs == 1 or (sizes != num_runs).any() or not scored.has_verdict.all():
        return {}
    # Rows are in order of (prompt, response): [p0 r0, p0 r1, p1 r0, p1 r1] to a row a prompt.
    runs = scored.correct.reshape(-1, num_runs).mean(axis=0)
    return {f"eval/accuracy_std_of_{num_runs}_runs": float(runs.std(ddof=1))}


def _bounds(scored: ScoredResponses, pass_at: Sequence[int]) -> Metrics:
    bounds = {}
    for key, values in _of_prompts(scored, pass_at).items():
        interval = student(values)  # of shares: it may leave 0 to 1, which they do not
        bounds[key.replace("eval/", LOW, 1)] = max(interval.low, 0.0)
        bounds[key.replace("eval/", HIGH, 1)] = min(interval.high, 1.0)
    return bounds


def _of_prompts(scored: ScoredResponses, pass_at: Sequence[int]) -> dict[str, list[float]]:
    """The values of which a metric is the mean over prompts, one a prompt that has it."""
    sampled = np.bincount(scored.group_ids).tolist()
    # With weights bincount sums floats; small counts are exact in them.
    sizes = np.bincount(scored.group_ids, scored.has_verdict).astype(int).tolist()
    is_right = scored.correct & scored.has_verdict
    num_correct = np.bincount(scored.group_ids, is_right).astype(int).tolist()
    counts = list(zip(sampled, sizes, num_correct, strict=True))
    values = {"eval/accuracy": [right / size for _, size, right in counts if size]}
    for k in pass_at:
        values[f"eval/pass_at_{k}"] = [
            pass_at_k(size, right, k)
            for asked, size, right in counts
            if size >= min(k, asked)  # k above what was asked is refused there
        ]
    if max(sampled) > 1:
        values[f"eval/maj_at_{max(sampled)}"] = _majorities(scored.with_verdict)
    return {key: of_prompts for key, of_prompts in values.items() if of_prompts}


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """pass@k = 1 - C(num_samples - num_correct, k) / C(num_samples, k) of one prompt.

    It is the unbiased estimate: the share of the k-subsets of the samples that contain a correct
    one. Exact integers, one division.

    Example: of 4 samples 1 is correct. Of the 6 pairs 3 are of wrong ones alone, so pass@2 is 0.5.

    Raises:
        ValueError: k is not within 1 .. num_samples.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"evaluation.pass_at = {k}: must lie within 1 and the {num_samples} responses of a"
            " prompt"
        )
    assert 0 <= num_correct <= num_samples
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def _majorities(scored: ScoredResponses) -> list[float]:
    """1 or 0 of each prompt whose responses have votes."""
    groups: dict[int, list[tuple[str | None, bool]]] = {}
    responses = zip(scored.extracted, scored.correct.tolist(), strict=True)
    for group, response in zip(scored.group_ids.tolist(), responses, strict=True):
        groups.setdefault(group, []).append(response)
    found = [majority_is_right(*zip(*rows, strict=True)) for rows in groups.values()]
    return [float(is_right) for is_right in found if is_right is not None]


def majority_is_right(extracted: Sequence[str | None], correct: Sequence[bool]) -> bool | None:
    """Whether the answer that most responses to a prompt give is right; of answers that are given
    equally often the one that came first counts.

    Responses without an answer ("" or None) do not vote. Where none votes the prompt is wrong; but
    None is returned where the verifier of some response names no answer.

    Source: Wang et al. 2022, arXiv 2203.11171, section 2 (unweighted vote).
    """
    votes = Counter(answer for answer in extracted if answer)
    if not votes:
        return None if None in extracted else False
    winner = max(votes, key=votes.__getitem__)  # of equals the first, as they were counted
    # Equal texts are equal answers (``rewards.base.Verdict``) and scored alike: the first of them
    # stands for all.
    return correct[extracted.index(winner)]


def evaluation_table(rows: Sequence[Values]) -> str:
    """Rows of ``detailed_metrics`` with their ``step``: a line for each checkpoint, and for each of
    its parts. Shares are in percent, bounds in brackets."""
    keys = _shared_keys(rows)
    lines = [("step", "source", *map(_title, keys))]
    for row in rows:
        step = str(row["step"])
        lines.append((step, "all", *(_cell(row, key) for key in keys)))
        # Any key that every part has would do. Not split at the last "/", which may stand in the
        # name of a part: "openai/gsm8k".
        for found in [key for key in row if key.startswith("eval/truncated_share/")]:
            part = found.removeprefix("eval/truncated_share/")
            lines.append((step, part, *(_cell(row, f"{key}/{part}") for key in keys)))
    return table(lines)


def _shared_keys(rows: Sequence[Values]) -> list[str]:
    """The columns: accuracy, its spread over runs, pass@k, maj@n, tokens, truncated, and excluded
    where any row has responses without a verdict."""
    every = dict.fromkeys(chain.from_iterable(rows))  # in order of appearance, each once
    # Those with a second "/" are of one part.
    spread = [key for key in every if re.fullmatch(_SPREAD, key)]
    several = spread + [key for key in every if re.fullmatch(r"eval/(pass|maj)_at_\d+", key)]
    excluded = [key for key in ("eval/excluded_share",) if key in every]
    return ["eval/accuracy", *several, _TOKENS, "eval/truncated_share", *excluded]


def _title(key: str) -> str:
    if spread := re.fullmatch(_SPREAD, key):
        return f"std of {spread[1]} runs %"
    name = key.removeprefix("eval/").replace("_at_", "@").removesuffix("_share")
    return "tokens" if key == _TOKENS else f"{name} %"


def _cell(row: Values, key: str) -> str:
    value = row.get(key)
    if value is None:
        return "-"
    if key.startswith(_TOKENS):
        return f"{value:.1f}"
    bounds = [row.get(key.replace("eval/", prefix, 1)) for prefix in (LOW, HIGH)]
    # Both are missing (None in a file, infinite before) where one prompt is all there is.
    shown = [f"{100 * bound:.1f}" for bound in bounds if bound is not None and isfinite(bound)]
    return f"{100 * value:.1f}" + (f" [{', '.join(shown)}]" if shown else "")
