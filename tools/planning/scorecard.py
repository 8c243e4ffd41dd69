"""What others have measured on GPUs, beside what the planner predicts for it.

    python tools/planning/scorecard.py

published.yaml has the published steps, trainings and weight syncs as runs of this project. The
planner's seconds are least ones: here every phase reaches a share of the hardware's speed, the same
one in all rows of a hardware, fitted to those rows.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.planning.published_runs import KINDS, Row, Shares, read_rows

PUBLISHED = Path(__file__).with_name("published.yaml")
FITTED = ("H100", "GB200")  # other hardware, with too few rows, gets the shares of the first
GRID = np.geomspace(0.05, 1.0, 300)  # shares that are tried


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    rows = read_rows(yaml.safe_load(PUBLISHED.read_text()))
    print("\n".join(lines(rows)))


def fit(rows: Sequence[Row]) -> Shares:
    """The shares by which the logarithms of predicted / published have the least squares.

    For weight syncs that is the geometric mean. Steps and trainings are tried on a grid, steps
    beside servers as the slower of the two sides.
    """
    syncs = [math.log(row.least[2] / row.published) for row in rows if row.kind == "syncs"]
    sync = math.exp(math.fsum(syncs) / len(syncs))
    error = np.zeros((len(GRID), len(GRID)))
    for row in rows:
        if row.kind == "syncs":
            continue
        generation = row.least[0] / GRID[:, None]
        update = row.least[1] / GRID + row.least[2] / sync
        seconds = generation + update if row.run.in_turns else np.maximum(generation, update)
        error += np.log(seconds / row.published) ** 2
    best = np.unravel_index(np.argmin(error), error.shape)
    return Shares(float(GRID[best[0]]), float(GRID[best[1]]), sync)


def fitted_rows(rows: Sequence[Row], hardware: str) -> list[Row]:
    """From which the shares of ``hardware`` come. Weight syncs are those of the first hardware."""
    return [
        row for row in rows if row.run.hardware == (FITTED[0] if row.kind == "syncs" else hardware)
    ]


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The shares of each hardware; a line for each row; what the errors are together."""
    known = {hardware: fitted_rows(rows, hardware) for hardware in FITTED}
    shares = {hardware: fit(known[hardware]) for hardware in FITTED}
    for hardware, found in shares.items():
        yield (
            f"{hardware:6}shares of full speed: generation {found.generation:.2f}, training"
            f" {found.training:.2f}, weight sync {found.sync:.2f}"
        )
    ratios = []
    for kind in KINDS:
        yield ""
        yield f"{kind:33}{'behind':8}published   least  predicted  ratio  left out"
        for row in rows:
            if row.kind != kind:
                continue
            hardware = row.run.hardware if row.run.hardware in FITTED else FITTED[0]
            ratio = row.seconds(shares[hardware]) / row.published
            left_out = None
            if any(each is row for each in known[hardware]):
                rest = [each for each in known[hardware] if each is not row]
                left_out = row.seconds(fit(rest)) / row.published
                ratios.append((ratio, left_out))
            yield line(row, ratio, left_out)
    yield ""
    yield from errors(np.array(ratios))
    pages = [row.page for row in rows if row.page is not None]
    fits = sum(not page.too_large for page in pages)
    yield f"memory    {fits} of {len(pages)} steps fit by the plan; all of them ran"


def line(row: Row, ratio: float, left_out: float | None) -> str:
    """``ratio``: of predicted to published; ``left_out``: with shares from the other rows alone,
    None where the row is not among those that are fitted."""
    run = row.run
    name = f"{run.hardware:6}{run.model:18}{run.gpus:9}{run.config.source.staleness or '-':<8}"
    # What cannot overlap is one after the other.
    least = sum(row.least) if run.in_turns else max(row.least)
    seconds = f"{row.published:9.2f}{least:8.2f}{ratio * row.published:11.2f}"
    rest = "not fitted" if left_out is None else f"{left_out:8.2f}"
    return f"{name}{seconds}{ratio:7.2f}  {rest}"


def errors(ratios: np.ndarray) -> Iterator[str]:
    """``ratios``: of predicted to published, ``[rows, with the row in the fit and without]``."""
    off = np.exp(np.abs(np.log(ratios)))
    for name, factors in zip(("fitted", "left out"), off.T, strict=True):
        yield (
            f"{name:9} {len(factors)} rows: off by a factor of {np.median(factors):.2f} in the"
            f" median, {factors.max():.2f} at most, {(factors > 1.5).sum()} by more than 1.5"
        )


if __name__ == "__main__":
    main()
