"""The page and its twin: what stands in them, and writing both."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

import jinja2

from megatron_rl.reporting.comparison.cells import Cell, all_runs
from megatron_rl.reporting.comparison.curves import SMOOTHING, smoothing_width
from megatron_rl.reporting.comparison.figures import (
    MANY,
    InlineFigure,
    Picture,
    as_svg,
    legend_svg,
    pictures_of,
    write_png,
)
from megatron_rl.reporting.comparison.panels import HEADINGS
from megatron_rl.reporting.comparison.samples import Sample, samples_of
from megatron_rl.reporting.comparison.scores import LAST_ROWS, last_value
from megatron_rl.reporting.comparison.tables import (
    Link,
    Table,
    cost_table,
    differing_versions,
    evaluation_table,
    method_table,
    runs_table,
    settings_table,
    versions_table,
)

HTML = "index.html"
MARKDOWN = "report.md"
FIGURES = "figures"
_TEMPLATES = Path(__file__).parent
_HOW_TO_READ = (
    "Values are those of the last evaluation; of a metric of training the mean of its last "
    f"{LAST_ROWS} steps. Only finished runs count, where a cell has any. A difference is the mean "
    "over common seeds of cell minus baseline; where no seed is common, means are compared "
    "unpaired (Welch). Student's interval decides the word: with a handful of seeds the bootstrap "
    "is too narrow. The best mean is the largest over all evaluations, and as such too good."
)


@dataclass(frozen=True)
class Report:
    """All that both forms show but the figures."""

    title: str
    summary: str
    metrics: tuple[tuple[str, Table], ...]  # (key, its table)
    evaluation: Table | None
    cost: Table
    runs: Table
    settings: Table
    versions: Table
    samples: tuple[tuple[str, tuple[Sample, ...]], ...]  # (cell and run, samples)
    notes: tuple[str, ...]


def report_of(
    cells: Sequence[Cell],
    metrics: Sequence[str],
    title: str,
    problems: Sequence[str],
    *,
    with_links: bool = True,
) -> Report:
    """The content of a report.

    Args:
        cells: the baseline first.
        metrics: keys of the tables of methods.
        problems: what could not be read, one sentence each.
        with_links: to the files of the runs, where they lie now.
    """
    samples = []
    damaged = []
    for cell in cells:
        run = cell.counted[0]
        found, wrong = samples_of(run)
        damaged += [f"{run.name}: {problem}" for problem in wrong]
        if found:
            samples.append((f"{cell.label} ({run.name})", tuple(found)))
    return Report(
        title=title,
        summary=_summary(cells),
        metrics=tuple((metric, method_table(cells, metric)) for metric in metrics),
        evaluation=evaluation_table(cells),
        cost=cost_table(cells),
        runs=runs_table(cells, metrics[0], with_links),
        settings=settings_table(cells),
        versions=versions_table(cells),
        samples=tuple(samples),
        notes=(*problems, *damaged, *_notes(cells, metrics)),
    )


def write_report(report: Report, cells: Sequence[Cell], out: Path) -> list[Path]:
    """``index.html``, ``report.md`` and ``figures/*.png`` in ``out``; returns what was written.

    The same runs give the same bytes. Figures of an earlier report there are replaced or removed.
    """
    out.mkdir(parents=True, exist_ok=True)
    pictures = pictures_of(cells)
    written = [out / HTML, out / MARKDOWN]
    svgs = {}
    files = {}
    for heading in HEADINGS:
        path = out / FIGURES / _png_name(heading)
        path.unlink(missing_ok=True)
        of_heading = [picture for picture in pictures if picture.heading == heading]
        if of_heading:
            write_png(of_heading, cells, path)
            written.append(path)
            svgs[heading] = _svgs(of_heading, heading)
            files[heading] = f"{FIGURES}/{path.name}"
    environment = _environment()
    common = {
        "report": report,
        "many": len(cells) > MANY,
        "labels": [cell.label for cell in cells],
        "how_to_read": _HOW_TO_READ,
        "curves": _curves_text(cells),
        "relative": lambda link: relative(link, out),
    }
    legend = [legend_svg(order) for order in range(len(cells))]
    page = environment.get_template("report.html.jinja")
    (out / HTML).write_text(page.render(**common, figures=svgs, legend=legend), encoding="utf-8")
    twin = environment.get_template("report.md.jinja")
    (out / MARKDOWN).write_text(twin.render(**common, figures=files), encoding="utf-8")
    return written


def _environment() -> jinja2.Environment:
    """Templates of this folder. Whatever is put into a page of HTML is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "anchor": anchor,
        "plain": plain_markdown,
        "fenced": fenced,
        "numeric": _is_numeric,
    }
    return environment


def anchor(text: str) -> str:
    """A name for a link within the page."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def relative(link: Link, out: Path) -> str:
    """The address of a file as seen from the report."""
    return quote(Path(os.path.relpath(link.path, out)).as_posix())


def plain_markdown(text: str) -> str:
    """Text as itself in a table or a line of Markdown, whatever is in it.

    HTML is escaped too: Markdown hands tags on. ``$`` begins a formula on GitHub.
    """
    one_line = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", escape(one_line, quote=False))


def fenced(text: str) -> str:
    """Text as a block of Markdown that nothing in it can end: the fence has a backtick more than
    the longest row of them in the text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _is_numeric(text: str) -> bool:
    """Whether a cell is set as a number: ``0.5``, ``+1,234``, ``0.1 to 0.3``, ``-`` for none."""
    return re.match(r"^[+-]?[\d,.]+(e[+-]?\d+)?( |$)|^-$", text) is not None


def _png_name(heading: str) -> str:
    return f"{anchor(heading)}.png"


def _svgs(pictures: Sequence[Picture], heading: str) -> list[tuple[Picture, InlineFigure]]:
    """Pictures of one heading, each with its figure; headings make the ids of a page unique."""
    drawn = []
    for number, picture in enumerate(pictures):
        drawn.append((picture, as_svg(picture, f"{anchor(heading)}{number}")))
    return drawn


def _summary(cells: Sequence[Cell]) -> str:
    runs = all_runs(cells)
    finished = sum(run.finished for run in runs)
    steps = sorted({run.steps_wanted for run in runs})
    return (
        f"{_counted(len(runs), 'run')} in {_counted(len(cells), 'cell')} of equal settings, "
        f"{finished} finished; steps of a run: {' or '.join(map(str, steps))}. "
        f"Baseline: {cells[0].label}."
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _curves_text(cells: Sequence[Cell]) -> str:
    """How the curves are to be read."""
    width = smoothing_width(cells)
    smoothing = ""
    if width > 1:
        smoothing = (
            f" Curves of training are moving means over {width} steps (1/{SMOOTHING} of the "
            "longest run); of a cell with one run the unsmoothed values stand behind."
        )
    return (
        "Strong: median over the runs of a cell that have a value at the step. Band: smallest to "
        "largest, where at most four cells share the axes. Faint: single runs, where few."
        f"{smoothing} A value that is missing or not finite is a gap."
    )


def _notes(cells: Sequence[Cell], metrics: Sequence[str]) -> list[str]:
    """What a reader of the tables must know of the runs, one sentence each."""
    notes: list[str] = []
    for cell in cells:
        notes += _notes_on_runs(cell)
    for metric in metrics:
        for cell in cells:
            names = [run.name for run in cell.counted if last_value(run, metric) is None]
            if names:
                notes.append(f"{metric}: no last value in {', '.join(names)}; not counted")
    if differing := differing_versions(cells):
        keys = ", ".join(key.removeprefix("versions.") for key in differing)
        notes.append(f"not the same in all runs: {keys}; see the versions")
    if len(cells) > 2:
        notes.append(
            f"{len(cells) - 1} cells are compared with the baseline and the intervals are not"
            " widened for that: of cells that do not differ, about one comparison in twenty says"
            " higher or lower by chance"
        )
    return notes


def _notes_on_runs(cell: Cell) -> list[str]:
    """Runs that are not finished, and seeds of several runs."""
    notes = []
    for run in cell.runs:
        if run.finished:
            continue
        note = f"{run.name}: unfinished, {run.steps_done} of {run.steps_wanted} steps"
        if cell.has_finished:
            note += "; not counted in the tables"
        notes.append(note)
    if cell.repeated_seeds:
        seeds = ", ".join(map(str, cell.repeated_seeds))
        notes.append(f"{cell.label}: several runs of seed {seeds}; their mean counts once")
    return notes
