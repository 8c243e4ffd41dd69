"""Re-run a claim of a paper with paired seeds, and write its page.

    python tools/claims.py run nsr_keeps_coverage      # the runs, then the page
    python tools/claims.py page nsr_keeps_coverage     # the page again, from the committed data
    python tools/claims.py plan exact/mapo             # seeds that claims need, by its spread

A claim is a folder of examples/claims: ``claim.yaml`` says what is compared. ``run`` makes tasks
and model of examples/claims/lab, trains every cell with every seed by the sweep (runs that are
finished, by this claim or another, are not done again), and writes ``data.jsonl``, ``curves.png``
and ``README.md`` beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.claims.lab.exact import measured
from megatron_rl.config.cli.parser import parser_of
from megatron_rl.reporting.metrics_file import is_held_out, read_metrics, series
from megatron_rl.run.start import EXPORTS
from megatron_rl.sweeping.running import CONSOLE
from tools.claim_checks import (
    Claim,
    Outcome,
    Runs,
    needed,
    outcomes,
    overall,
    read_claim,
    spreads,
    tally,
)
from tools.claim_page import draw, page, told

REPO = Path(__file__).resolve().parents[1]
CLAIMS = REPO / "examples" / "claims"
LAB = CLAIMS / "lab"
# Steps whose mean is one value of a training metric in data.jsonl; evaluations are kept whole.
BLOCK = 5
DIGITS = 6
# Kept of every run that has them: pass@64 of 64 responses begins near 1, these have room above.
ALWAYS = ("eval/pass_at_8", "eval/pass_at_16")
HEAD = "| claim | lab | comparisons | the first two decided, with intervals; else the first |"
PLANNED = (80, 120)  # steps whose evaluations are averaged in the exact lab
PAGE = CLAIMS / "README.md"  # with the table of claims
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def lab(work: Path, options: Sequence[str] = ()) -> Path:
    """Tasks and model, made once for what makes them; ``options``: of make.py."""
    makers = [LAB / "make.py", LAB / "tasks.py", REPO / "tools" / "make_toy_model.py"]
    read = [*(file.read_bytes() for file in makers), *map(str.encode, options)]
    digest = hashlib.sha256(b"\0".join(read)).hexdigest()[:12]
    folder = work / f"claims_lab-{digest}"
    if not folder.is_dir():
        # Renamed when it is whole: a call that was killed on the way leaves no half of a lab.
        aside = work / f"claims_lab.{os.getpid()}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        make = [str(makers[0]), "--out", str(aside), *options]
        _run([*torchrun, "--nproc-per-node", "1", *make])
        aside.rename(folder)
    return folder


def train_file(made: Path, kinds: Sequence[str]) -> Path:
    """The prompts to train on: those of ``kinds`` alone, or all."""
    everything = made / "train.jsonl"
    if not kinds:
        return everything
    file = made / f"train-{'-'.join(kinds)}.jsonl"
    rows = everything.read_text("ascii").splitlines(keepends=True)
    chosen = [row for row in rows if json.loads(row)["data_source"] in kinds]
    file.write_text("".join(chosen), encoding="ascii")
    return file


def cell_folder(out: Path, claim: Claim, overrides: Sequence[str]) -> Path:
    """Where the runs of a cell lie: cells of two claims that are set alike share them."""
    after = ["after", *claim.branch_from] if claim.branch_from else []
    names = [*sorted([*claim.overrides, *overrides]), *claim.train_on, *claim.lab, *after]
    return out / (re.sub(r"[^A-Za-z0-9._+-]+", "_", "_".join(names)) or "defaults")


def train(claim: Claim, out: Path, made: Path, parallel: int, more: Sequence[str]) -> None:
    """Every cell with every seed, ``parallel`` runs at a time; continues where a call stopped.
    First the runs that the cells branch from, where there are such."""
    model = str(made / "model")
    if claim.branch_from:
        trunk = claim.model_copy(
            update={"branch_from": (), "overrides": (), "cells": {"": claim.branch_from}}
        )
        train(trunk, out, made, parallel, more)
        folder = cell_folder(out, trunk, claim.branch_from)
        last = max(path.name for path in (folder / "seed-1" / EXPORTS).iterdir())
        model = f"{folder}/seed-${{seed}}/{EXPORTS}/{last}"
    files = {"train": train_file(made, claim.train_on), "eval": made / "eval.jsonl"}
    seeds = ",".join(str(seed) for seed in range(1, claim.num_seeds + 1))
    for overrides in claim.cells.values():
        own = [*claim.overrides, *overrides]
        folder = cell_folder(out, claim, overrides)
        command = [sys.executable, "-m", "megatron_rl.sweep", "--nproc", "1"]
        command += ["--parallel", str(parallel)]
        command += ["--plugin", str(claim.plugin)] if claim.plugin else []
        command += ["--out", str(folder), "--config-dir", str(LAB / "conf")]
        command += [f"experiment={claim.experiment}", f"model.path={model}"]
        command += [f"data.{name}={file}" for name, file in files.items()]
        command += [f"reward.function={LAB / 'tasks.py'}:score", *own, f"seed={seeds}", *more]
        _run(command)


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT}, cwd=REPO)


def collect(claim: Claim, out: Path) -> list[dict[str, Any]]:
    """One row a run: its cell, its seed, and the metrics of the claim."""
    rows = []
    for cell, overrides in claim.cells.items():
        folder = cell_folder(out, claim, overrides)
        for seed in range(1, claim.num_seeds + 1):
            of_run = _of_run(folder / f"seed-{seed}", claim)
            rows.append({"cell": cell, "seed": seed, **of_run})
    return rows


def _of_run(run: Path, claim: Claim) -> dict[str, Any]:
    rows = read_metrics(run / "metrics.jsonl")
    held_out = measured(run) if claim.is_exact else rows
    metrics = claim.metrics
    saved = json.loads((run / "config.json").read_text("utf-8"))
    kept = {}
    for metric in dict.fromkeys([*metrics, *ALWAYS]):
        steps, values = series(held_out if is_held_out(metric) else rows, metric)
        if not steps and metric in metrics:
            raise ValueError(f"{run}: has no {metric}; correct `checks` and `curves`")
        if not steps:
            continue
        if not is_held_out(metric):
            steps, values = block_means(steps, values)
        kept[metric] = {
            step: round(value, DIGITS) for step, value in zip(steps, values, strict=True)
        }
    _, seconds = series(rows, "time/step_s")
    about = {"seconds": round(sum(seconds)), "commit": saved["git_commit"]}
    wall = wall_seconds(run / CONSOLE)
    return {**about, **({} if wall is None else {"wall_seconds": wall}), "metrics": kept}


def wall_seconds(console: Path) -> int | None:
    """From the start of a run, which the sweep notes in its output, to the last of its output.

    None where the sweep wrote no file (one run at a time), or where the run was started more than
    once: how long it stood still is not known.
    """
    if not console.is_file():
        return None
    starts = re.findall(r"^--- (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) UTC$", console.read_text(), re.M)
    if len(starts) != 1:
        return None
    started = datetime.fromisoformat(f"{starts[0]}+00:00").timestamp()
    return round(console.stat().st_mtime - started)


def block_means(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Of steps 1 to ``BLOCK`` their mean, at the last of them; and so on."""
    blocks: dict[int, list[float]] = {}
    for step, value in zip(steps, values, strict=True):
        last = -(-step // BLOCK) * BLOCK
        blocks.setdefault(last, []).append(value)
    return list(blocks), [fmean(block) for block in blocks.values()]


def read_data(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "data.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def by_cell(rows: Sequence[dict[str, Any]]) -> Runs:
    """The rows as the checks want them, with steps as numbers again."""
    runs: dict[str, dict[int, dict[str, dict[int, float]]]] = {}
    for row in rows:
        metrics = {}
        for metric, steps in row["metrics"].items():
            # JSON has texts alone for keys.
            metrics[metric] = {int(step): value for step, value in steps.items()}
        runs.setdefault(row["cell"], {})[row["seed"]] = metrics
    return runs


def write_page(folder: Path) -> str:
    """The page and the figure of the data; returns the verdict."""
    claim = read_claim(folder)
    rows = read_data(folder)
    runs = by_cell(rows)
    found = outcomes(claim.checks, runs)
    draw(claim, runs, folder / "curves.png")
    text = page(claim, name_of(folder), rows, runs, found)
    (folder / "README.md").write_text(text, encoding="utf-8")
    return overall(found)


def name_of(folder: Path) -> str:
    """What the commands call a claim: its folder below ``CLAIMS``."""
    return str(folder.relative_to(CLAIMS)) if folder.is_relative_to(CLAIMS) else folder.name


def tried() -> dict[str, tuple[Claim, list[Outcome]]]:
    """Every claim that has been run, by its name."""
    found = {}
    for file in sorted(CLAIMS.rglob("data.jsonl")):
        claim = read_claim(file.parent)
        runs = by_cell(read_data(file.parent))
        found[name_of(file.parent)] = (claim, outcomes(claim.checks, runs))
    return found


def plan(folder: Path) -> str:
    """Seeds that the checks of every claim of the exact lab need, by the standard deviations of
    the paired differences in the data of a pilot; beside them those of its sampled namesake."""
    pilot = spreads(by_cell(read_data(folder)), PLANNED)
    namesake = CLAIMS / folder.name
    sampled = (
        spreads(by_cell(read_data(namesake)), None) if (namesake / "data.jsonl").is_file() else {}
    )
    lines = [
        f"{metric}: standard deviation {spread:.4f}, sampled {sampled.get(metric, nan):.4f}"
        for metric, spread in pilot.items()
    ]
    for file in sorted(CLAIMS.glob("exact/*/claim.yaml")):
        checks = read_claim(file.parent).checks
        seeds = [needed(one, pilot[one.metric]) for one in checks if one.metric in pilot]
        known = [number for number in seeds if number]
        most = max(known, default="not known")
        lines.append(f"{file.parent.name}: {most} seeds for {len(known)} of {len(checks)} checks")
    return "\n".join(lines)


def table() -> str:
    """The claims with their verdicts, in Markdown."""
    rows = []
    by_lab: dict[str, list[Outcome]] = {"exact": [], "sampled": []}
    for name, (claim, found) in sorted(tried().items(), key=lambda item: not item[1][0].is_exact):
        link = f"[{claim.title}]({name}/README.md)"
        lab_of = "exact" if claim.is_exact else "sampled"
        rows.append(f"| {link} | {lab_of} | {overall(found)} | {told(found)} |")
        by_lab[lab_of] += found
    for lab_of, found in by_lab.items():
        rows.append(f"| all of this lab | {lab_of} | {tally(found)} | |")
    rows.append(f"| all of them | | {tally([*by_lab['exact'], *by_lab['sampled']])} | |")
    return "\n".join([HEAD, "|---|---|---|---|", *rows])


def write_table() -> None:
    """Puts the table in place of the one in ``PAGE``."""
    # The table goes from its head to the first blank line.
    before, _, rest = PAGE.read_text("utf-8").partition(HEAD)
    _, _, after = rest.partition("\n\n")
    PAGE.write_text(f"{before}{table()}\n\n{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("run", "page", "plan"))
    parser.add_argument("claim", type=Path, help="its folder, or the folder's name")
    parser.add_argument("--out", type=Path, default=REPO / "runs" / "claims", help="of the runs")
    parser.add_argument("--parallel", type=int, default=2, metavar="N", help="runs at a time")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for a short trial")
    options = parser.parse_intermixed_args(argv)
    folder = options.claim if options.claim.is_dir() else CLAIMS / options.claim
    if not (folder / "claim.yaml").is_file():
        names = sorted(name_of(file.parent) for file in CLAIMS.rglob("claim.yaml"))
        parser.error(f"{options.claim}: no such claim; there are {', '.join(names)}")
    if options.what == "plan":
        if not (folder / "data.jsonl").is_file():
            parser.error(f"{options.claim}: has no data to plan by; run it first")
        print(plan(folder))
        return
    claim = read_claim(folder)
    if options.what == "run":
        (REPO / ".work").mkdir(exist_ok=True)
        made = lab(REPO / ".work", claim.lab)
        train(claim, options.out, made, options.parallel, options.overrides)
        rows = collect(claim, options.out)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "data.jsonl").write_text(text, encoding="ascii")
    print(f"{name_of(folder)}: {write_page(folder)}")
    write_table()
    every_outcome = [one for _, outcomes in tried().values() for one in outcomes]
    print(f"all claims: {tally(every_outcome)}")


if __name__ == "__main__":
    main()
