"""The page of a comparison: ``report.md``, and ``index.html``, the same text as one file."""

import os
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from markdown_it import MarkdownIt

from megatron_rl.reporting.figure import SMOOTHING, smoothing_width
from megatron_rl.reporting.metrics_file import is_held_out
from megatron_rl.reporting.panels import HEADINGS
from megatron_rl.reporting.scores import LAST_ROWS
from tools.reporting.figures import draws_of, write_figure
from tools.reporting.samples import passages_of, samples_of, shortened_text
from tools.reporting.tables import (
    Entry,
    Table,
    cost_table,
    course_table,
    differing_versions,
    method_table,
    runs_table,
    settings_table,
    versions_table,
)
from tools.reporting.variants import Variant, all_runs

HTML = "index.html"
MARKDOWN = "report.md"
_FIGURES = "figures"
_HOW_TO_READ = (
    "Values are those of the last evaluation; of a metric of training the mean of its last "
    f"{LAST_ROWS} steps. Only finished runs count, where a variant has any. A difference is the "
    "mean over common seeds of variant minus baseline; where no seed is common, means are compared "
    "unpaired (Welch). The interval of the difference decides the word."
)
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title><link rel="icon" href="data:,">
<style>
body { margin: 0 auto; max-width: 90rem; padding: 0 1rem 4rem; font: 15px/1.5 sans-serif;
  background: #fff; color: #1b1e23; overflow-wrap: anywhere; }
h2 { margin-top: 2.4rem; border-top: 1px solid #d5dae0; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.55rem; border-bottom: 1px solid #d5dae0; text-align: left;
  vertical-align: top; overflow-wrap: normal; }
p:has(> img) { overflow-x: auto; }
img { max-width: 100%; min-width: 640px; }
pre { margin: 0.3rem 0; padding: 0.5rem; background: #f4f6f8; white-space: pre-wrap;
  border-left: 4px solid #d5dae0; }
pre:has(.language-sampled) { border-color: #2f6fb0; }
pre:has(.language-appended) { border-color: #c98a1b; margin-left: 2rem; }
</style></head><body>
BODY</body></html>
"""


def write_report(
    variants: Sequence[Variant],
    metrics: Sequence[str],
    out: Path,
    *,
    title: str,
    problems: Sequence[str] = (),
    with_links: bool = True,
) -> tuple[str, list[str]]:
    """Writes ``index.html``, ``report.md`` and ``figures/*.png`` into ``out``.

    The same runs give the same bytes. Figures of an earlier report there are replaced or removed.

    Args:
        variants: the baseline first.
        metrics: keys of the tables of methods.
        problems: what could not be read, one sentence each.
        with_links: to the files of the runs, where they lie now.

    Returns:
        One sentence on what was compared, and notes on single runs.
    """
    out.mkdir(parents=True, exist_ok=True)
    summary = _summary(variants)
    notes = [*problems, *_notes(variants, metrics)]
    lines = [*_heading(1, title), _plain_markdown(summary), ""]
    lines += [*_heading(2, "Methods"), _plain_markdown(_HOW_TO_READ), ""]
    for metric in metrics:
        lines += [*_heading(3, metric), *_table_lines(method_table(variants, metric), out)]
        if is_held_out(metric) and (over_training := course_table(variants, metric)):
            lines += _table_lines(over_training, out)
    lines += [*_heading(2, "Cost"), *_table_lines(cost_table(variants), out)]
    lines += [*_heading(2, "Curves"), _plain_markdown(_curves_text(variants)), ""]
    for heading, file in _write_figures(variants, out):
        lines += [*_heading(3, heading), f"![{heading}]({file})", ""]
    runs = runs_table(variants, metrics[0], with_links)
    lines += [*_heading(2, "Runs"), *_table_lines(runs, out)]
    lines += [*_heading(2, "Settings that differ"), *_table_lines(settings_table(variants), out)]
    lines += [*_heading(2, "Versions"), *_table_lines(versions_table(variants), out)]
    shown, damaged = _sample_lines(variants)
    notes += damaged
    if shown:
        lines += [*_heading(2, "Samples"), *shown]
    if notes:
        lines += [*_heading(2, "Notes"), *(f"- {_plain_markdown(note)}" for note in notes), ""]
    markdown = "\n".join(lines)
    (out / MARKDOWN).write_text(markdown, encoding="utf-8")
    (out / HTML).write_text(_html_of(markdown, out), encoding="utf-8")
    return summary, notes


def _html_of(markdown: str, folder: Path) -> str:
    """``report.md`` as one page that needs no other file: figures of ``folder`` are inside it."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)

    # Text of a run cannot look like this: its quotes are escaped.
    def inline(match: re.Match[str]) -> str:
        return f'src="data:image/png;base64,{b64encode((folder / match[1]).read_bytes()).decode()}"'

    body = re.sub(rf'src="({_FIGURES}/[a-z0-9-]+\.png)"', inline, body)
    _, title = re.split("</?h1>", body)[:2]
    # One pass: a title that holds the word BODY stays as it is.
    return re.sub("TITLE|BODY", lambda match: title if match[0] == "TITLE" else body, _PAGE)


def _plain_markdown(text: str) -> str:
    """Text as itself in a table or a line of Markdown, whatever is in it.

    HTML is escaped too: Markdown hands tags on. ``$`` begins a formula on GitHub.
    """
    return re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", escape(" ".join(text.split()), quote=False))


def _fenced(text: str, kind: str) -> str:
    """Text as a block of Markdown that nothing in it can end: the fence has a backtick more than
    the longest row of them in the text. ``kind``: the class of the block, for its color."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{kind}\n{text}\n{fence}"


def _heading(level: int, text: str) -> list[str]:
    return [f"{'#' * level} {_plain_markdown(text)}", ""]


def _table_lines(table: Table, out: Path) -> Iterator[str]:
    """A table with its caption above; links are relative to the report."""
    if table.caption:
        yield from (_plain_markdown(table.caption), "")
    columns = list(table.rows[0]) if table.rows else []
    yield f"| {' | '.join(map(_plain_markdown, columns))} |"
    yield f"|{'---|' * len(columns)}"
    for row in table.rows:
        yield f"| {' | '.join(_entry(row[column], out) for column in columns)} |"
    yield ""


def _entry(entry: Entry, out: Path) -> str:
    if isinstance(entry, str):
        return _plain_markdown(entry)
    addresses = [quote(Path(os.path.relpath(path, out)).as_posix()) for path in entry]
    links = zip(entry, addresses, strict=True)
    return " ".join(f"[{_plain_markdown(path.name)}](<{address}>)" for path, address in links)


def _write_figures(variants: Sequence[Variant], out: Path) -> Iterator[tuple[str, str]]:
    """Writes one PNG a heading that has a metric; yields heading and path from ``out``."""
    all_draws = draws_of(variants, _width(variants))
    for heading in HEADINGS:
        name = re.sub(r"[^a-z0-9]+", "-", heading.lower())
        path = out / _FIGURES / f"{name}.png"
        path.unlink(missing_ok=True)
        draws = {panel: draw for panel, draw in all_draws.items() if panel.heading == heading}
        if draws:
            write_figure(draws, [variant.label for variant in variants], path)
            yield heading, f"{_FIGURES}/{path.name}"


def _width(variants: Sequence[Variant]) -> int:
    """Steps of the moving mean of curves of training."""
    return smoothing_width(max(run.steps_done for run in all_runs(variants)))


def _sample_lines(variants: Sequence[Variant]) -> tuple[list[str], list[str]]:
    """Samples of one run of each variant, and what is wrong with the files."""
    lines = []
    damaged = []
    for variant in variants:
        run = variant.counted[0]
        samples, wrong = samples_of(run)
        damaged += [f"{run.name}: {problem}" for problem in wrong]
        if samples:
            lines += _heading(3, f"{variant.label} ({run.name})")
        for sample in samples:
            verdict = "right" if sample["correct"] else "wrong"
            cut = ", cut by the length limit" if sample.get("truncated") else ""
            reward = shortened_text(sample.get("reward"))
            ended = f", ended by: {sample['ended_by']}" if sample.get("ended_by") else ""
            about = f"Step {sample['step']}, {verdict}, reward {reward}{cut}{ended}."
            lines += [_plain_markdown(about), ""]
            for passage, kind, text in passages_of(sample):
                lines += [f"{passage}:", "", _fenced(text, kind), ""]
    return lines, damaged


def _summary(variants: Sequence[Variant]) -> str:
    runs = all_runs(variants)
    finished = sum(run.finished for run in runs)
    steps = sorted({run.steps_wanted for run in runs})
    return (
        f"{_counted(len(runs), 'run')} of {_counted(len(variants), 'variant')}, {finished}"
        f" finished; steps of a run: {' or '.join(map(str, steps))}. Baseline: {variants[0].label}."
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _curves_text(variants: Sequence[Variant]) -> str:
    """The explanation of the curves."""
    width = _width(variants)
    smoothing = ""
    if width > 1:
        smoothing = (
            f" Curves of training are moving means over {width} steps (1/{SMOOTHING} of the "
            "longest run); of a variant with one run the unsmoothed values are faint."
        )
    return (
        "Strong: median over the runs of a variant that have a value at the step. Band: smallest "
        "to largest, where at most four variants share the axes. Faint: single runs, where few."
        f"{smoothing} A value that is missing or not finite is a gap."
    )


def _notes(variants: Sequence[Variant], metrics: Sequence[str]) -> list[str]:
    """Caveats about the runs for a reader of the tables, one sentence each."""
    notes = [note for variant in variants for note in _notes_on_runs(variant)]
    for metric in metrics:
        for variant in variants:
            names = [run.name for run in variant.counted if run.last_value(metric) is None]
            if names:
                notes.append(f"{metric}: no last value in {', '.join(names)}; not counted")
    if differing := differing_versions(variants):
        keys = ", ".join(key.removeprefix("versions.") for key in differing)
        notes.append(f"not the same in all runs: {keys}; see the versions")
    if len(variants) > 2:
        notes.append(
            f"{len(variants) - 1} variants are compared with the baseline and the intervals are not"
            " widened for that: of variants that do not differ, about one comparison in twenty says"
            " higher or lower by chance"
        )
    return notes


def _notes_on_runs(variant: Variant) -> list[str]:
    """Runs that are not finished, and seeds of several runs."""
    notes = []
    for run in variant.runs:
        if run.finished:
            continue
        note = f"{run.name}: unfinished, {run.steps_done} of {run.steps_wanted} steps"
        if variant.has_finished:
            note += "; not counted in the tables"
        notes.append(note)
    if variant.repeated_seeds:
        seeds = ", ".join(map(str, variant.repeated_seeds))
        notes.append(f"{variant.label}: several runs of seed {seeds}; their mean counts once")
    return notes
