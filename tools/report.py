"""A comparison of runs: one page with tables, curves and samples.

    python tools/report.py runs/ablation
    python tools/report.py runs/a runs/b --out DIR --baseline method=grpo

Every run below the folders is found. Runs that differ in their seed alone form a variant, and
variants are compared with the baseline over common seeds. The folder of the report, DIR/report
without --out, gets report.md, its figures, and index.html: the same page as one file.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of

DEFAULT_METRIC = "eval/accuracy"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="DIR", help="holds runs, at any depth")
    out = "is made; gets the report (default: report in the first DIR)"
    add("--out", type=Path, metavar="FOLDER", help=out)
    baseline = "what the others are compared with (default: method grpo, else the first variant)"
    add("--baseline", metavar="LABEL", help=baseline)
    metric = f"keys of metrics.jsonl to compare by, a table each (default {DEFAULT_METRIC})"
    add("--metric", nargs="+", action="extend", default=[], metavar="KEY", help=metric)
    add("--title", help="default: the names of the folders")
    no_links = "without links to the files of the runs: a report to be passed on without them"
    add("--no-links", action="store_true", help=no_links)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 when the report was written, 1 on wrong input."""
    options = arguments(argv)
    try:
        print(run(options))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(options: argparse.Namespace) -> str:
    """Writes the report; returns what to say of it.

    Raises:
        ValueError: no run, an unknown baseline or metric, or a folder that cannot be written.
    """
    # Deferred: matplotlib and scipy take seconds to import, which --help does not need.
    from tools.reporting.page import HTML, MARKDOWN, write_report
    from tools.reporting.runs import find_runs
    from tools.reporting.variants import choose_baseline, variants_of

    found = find_runs(options.folders)
    variants = variants_of(found.runs)
    baseline = choose_baseline(variants, options.baseline)
    variants = [baseline, *(variant for variant in variants if variant is not baseline)]
    keys = {key for run in found.runs for row in (*run.rows, *run.evaluation) for key in row}
    metrics = _metrics(options.metric, keys)
    links = not options.no_links
    out = options.out or options.folders[0] / "report"
    title = options.title or " + ".join(folder.resolve().name for folder in options.folders)
    try:
        summary, notes = write_report(
            variants, metrics, out, title=title, problems=found.problems, with_links=links
        )
    except OSError as error:
        raise ValueError(
            f"--out {out}: cannot be written ({error.strerror}: {error.filename}); give a "
            "folder that can be"
        ) from None
    lines = [summary, *(f"note: {note}" for note in notes)]
    return "\n".join([*lines, f"wrote {out / HTML} and {out / MARKDOWN}"])


def _metrics(wanted: Sequence[str], present: set[str]) -> list[str]:
    """The keys asked for; without any the held-out accuracy, of runs without one the reward."""
    missing = [key for key in wanted if key not in present]
    if missing:
        known = ", ".join(sorted(key for key in present if key.startswith(("eval/", "reward/"))))
        raise ValueError(f"--metric {missing[0]}: no run has it; of these kinds there are {known}")
    if wanted:
        return list(dict.fromkeys(wanted))
    return [DEFAULT_METRIC if DEFAULT_METRIC in present else "reward/mean"]


if __name__ == "__main__":
    sys.exit(main())
