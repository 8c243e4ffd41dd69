"""The page and the figure of a claim, made of its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_rl.reporting.figure import Curve
from megatron_rl.reporting.intervals import Interval, student
from megatron_rl.reporting.metrics_file import PASS_AT, is_held_out
from megatron_rl.reporting.panels import PANELS, SOURCES, Panel
from tools.claim_checks import Claim, Outcome, Runs, Steps, overall
from tools.reporting.figures import (
    MAX_BANDS,
    MAX_SINGLES,
    Band,
    band_of,
    draw_bands,
    write_figure,
)

EXACT = "the lab that decides: exact probabilities, evaluations of steps 80 to 120."
BRANCH = (
    "the lab that decides: exact probabilities. Each seed begins with the last weights of its run"
    " of `{}`, whose steps are not counted."
)
SAMPLED = (
    "the first lab, of sampled answers. One evaluation of 96 prompts decides, too few for what"
    " papers report, and settings may lie outside the paper's regime: these are no data of"
    " the lab that decides ([which claims have some](../README.md)). What came out was written by"
    " single intervals, before verdicts were corrected for their number."
)
# Those of the pages of reports, and of metrics that they do not show.
UNITS = {
    **{panel.key: panel.label for panel in PANELS},
    "credit/advantage_positive_sum": "advantage, sum of a step",
    "credit/extreme_advantage_abs_mean": "advantage",
    "credit/extreme_group_share": "share of groups",
    "credit/extreme_zscore_abs_mean": "advantage",
    "credit/length_gap_tokens": "tokens",
}
_SHARES = {SOURCES: "share of responses", PASS_AT: "share of prompts"}


def draw(claim: Claim, runs: Runs, file: Path) -> None:
    """A set of axes a metric: the median over the seeds, and what ``spread`` says."""
    draws = {}
    for metric in claim.curves:
        bands = [band_of_seeds(of_seeds, metric) for of_seeds in runs.values()]
        panel = Panel(metric, metric, unit(metric))
        draws[panel] = partial(draw_bands, bands=bands, held_out=is_held_out(metric))
    write_figure(draws, list(runs), file)


def unit(metric: str) -> str:
    shares = [of for start, of in _SHARES.items() if metric.startswith(start)]
    found = UNITS.get(metric) or next(iter(shares), None)
    if found is None:
        raise ValueError(f"{metric}: has no unit; add it to UNITS of tools/claim_page.py")
    return found


def band_of_seeds(of_seeds: Mapping[int, Mapping[str, Steps]], metric: str) -> Band:
    curves = []
    for metrics in of_seeds.values():
        steps, values = np.array(sorted(metrics[metric].items()), dtype=float).T
        curves.append(Curve(steps, values))
    return band_of(curves)


def page(
    claim: Claim, name: str, rows: Sequence[dict[str, Any]], runs: Runs, outcomes: Sequence[Outcome]
) -> str:
    """Markdown; ``name``: of the claim's folder."""
    seeds = sorted({row["seed"] for row in rows})
    minutes = sum(row["seconds"] for row in rows) / 60
    commits = ", ".join(sorted({str(row["commit"])[:8] for row in rows}))
    return "\n".join(
        [
            f"# {claim.title}",
            "",
            f"**{overall(outcomes)}** ({len(seeds)} paired seeds)",
            "",
            f"Design: {_design(claim)}",
            "",
            f"Source: {claim.source}.",
            "",
            f"What the paper says: {claim.says}",
            "",
            f"What was expected here: {claim.expected}",
            "",
            *([f"What came out: {claim.found}", ""] if claim.found else []),
            "```bash",
            f"python tools/claims.py run {name}",
            "```",
            "",
            *_checks(outcomes),
            "",
            "![curves](curves.png)",
            "",
            *_cells(claim, runs),
            "",
            f"Curves: {spread(runs)}. Cells: mean and half of Student's 95 % interval of the last"
            f" value. Cells that are compared differ in {_keys(claim.differ)} alone. {len(rows)}"
            f" runs, {minutes:.0f} minutes of training in all{_wall(rows)}, at commit {commits};"
            " the numbers are in [data.jsonl](data.jsonl), the settings in"
            " [claim.yaml](claim.yaml).",
            "",
        ]
    )


def _design(claim: Claim) -> str:
    if claim.branch_from:
        return BRANCH.format(" ".join(claim.branch_from))
    return EXACT if claim.is_exact else SAMPLED


def spread(runs: Runs) -> str:
    """What ``draw_bands`` draws of the seeds."""
    words = "median over the seeds"
    words += " and their range as a band" if len(runs) <= MAX_BANDS else ""
    single = sum(len(of_seeds) for of_seeds in runs.values()) <= MAX_SINGLES
    return words + (", each run as a thin line" if single else "")


def _keys(keys: Sequence[str]) -> str:
    return " and ".join(f"`{key}`" for key in keys)


def _wall(rows: Sequence[dict[str, Any]]) -> str:
    """Minutes that the runs took from start to end, where all of them have it."""
    if not all("wall_seconds" in row for row in rows):
        return ""
    minutes = sum(row["wall_seconds"] for row in rows) / 60
    return f" ({minutes:.0f} from start to end of each run, evaluations among it)"


def _checks(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        "| check | difference | 95 % | decides, at 80 % power | verdict |",
        "|---|---|---|---|---|",
    ]
    for one in outcomes:
        mean = f"{one.student.mean:+.4f}"
        told = f"{mean} | {bounds(one.student)} | {one.smallest:.4f} | {one.verdict}"
        lines.append(f"| {one.check.text} | {told} |")
    return lines


def told(outcomes: Sequence[Outcome]) -> str:
    """The first two checks that are decided, each with its verdict; where there are none, the first
    of all."""
    decided = [one for one in outcomes if one.verdict != "undecided"][:2]
    return "; ".join(_told(one) for one in decided or outcomes[:1])


def _told(one: Outcome) -> str:
    shown = f"{one.student.mean:+.4f} ({bounds(one.student)})"
    return f"{one.check.text}: {shown}, {one.verdict}"


def bounds(interval: Interval) -> str:
    return f"{interval.low:+.4f} to {interval.high:+.4f}"


def _cells(claim: Claim, runs: Runs) -> list[str]:
    """The last value of each metric: mean and half of Student's interval."""
    lines = [
        f"| cell | settings | {' | '.join(claim.metrics)} |",
        f"|---|---|{'---|' * len(claim.metrics)}",
    ]
    for cell, of_seeds in runs.items():
        cells = []
        for metric in claim.metrics:
            last = []
            for metrics in of_seeds.values():
                steps = metrics[metric]
                last.append(steps[max(steps)])
            interval = student(last)
            cells.append(f"{fmean(last):.3f} +- {interval.high - interval.mean:.3f}")
        settings = " ".join(f"`{text}`" for text in claim.cells[cell])
        lines.append(f"| {cell} | {settings} | {' | '.join(cells)} |")
    return lines
