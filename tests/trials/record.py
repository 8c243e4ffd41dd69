"""Rows of the trials as lines, as a table by group, and as a markdown record without paths of a
machine."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.trials.groups import NAMES
from tests.trials.place import Case
from tests.trials.verdicts import Verdict

VERDICTS = ("good", "poor", "bad", "not counted")
PATHS = re.compile(r"(?<![\w.])/(?:tmp|work|root|home|opt)/[^\s'\",;:)]*")


@dataclass(frozen=True)
class Row:
    """What became of a case."""

    case: Case
    verdict: Verdict
    seconds: float
    said: str  # first line of the message, or the last line of the output

    def line(self) -> str:
        reasons = "; ".join(self.verdict.reasons)
        tail = f"{reasons}  |  {self.said}" if reasons else self.said
        return f"{self.verdict.name:11} {self.seconds:6.1f} s  {self.case.name:22} {tail}"


def table(rows: Sequence[Row]) -> str:
    """Counts by group; then each row that is not good, with why it is accepted where that was
    argued."""
    counts = {
        name: Counter(row.verdict.name for row in rows if row.case.group == name) for name in NAMES
    }
    lines = [f"{'group':10} {'cases':>6} " + " ".join(f"{name:>11}" for name in VERDICTS)]
    for name, count in counts.items():
        if count:
            lines.append(
                f"{name:10} {count.total():6} "
                + " ".join(f"{count[verdict]:11}" for verdict in VERDICTS)
            )
    everything = Counter(row.verdict.name for row in rows)
    lines.append(
        f"{'all':10} {everything.total():6} "
        + " ".join(f"{everything[verdict]:11}" for verdict in VERDICTS)
    )
    for verdict in ("bad", "poor", "not counted"):
        found = [row for row in rows if row.verdict.name == verdict]
        lines += [f"{verdict}:"] if found else []
        lines += [
            f"  {row.case.name}: {row.case.title}: {'; '.join(row.verdict.reasons)}{_argued(row)}"
            for row in found
        ]
    return "\n".join(lines)


def _argued(row: Row) -> str:
    if row.verdict.name != "poor":
        return ""
    return f"  [argued: {row.case.argued}]" if row.case.argued else "  [not argued]"


def record(rows: Sequence[Row], seconds: float) -> str:
    """The markdown record: all rows, by group."""
    cores = os.cpu_count()
    parts = [
        "# Trials of users and faults",
        "",
        (
            f"{len(rows)} cases in {seconds / 60:.0f} minutes on {cores} cores"
            f" ({platform.machine()}), by `python -m tests.trials.run --record"
            " tests/trials/RECORD.md`. The rules that make a verdict are in"
            " `tests/trials/verdicts.py`."
        ),
        "",
        "```",
        _clean(table(rows)),
        "```",
    ]
    for name in NAMES:
        mine = [row for row in rows if row.case.group == name]
        if not mine:
            continue
        parts += [
            "",
            f"## {name}",
            "",
            "| case | what | how | verdict | s | said |",
            "|---|---|---|---|---|---|",
        ]
        parts += [_markdown(row) for row in mine]
    return "\n".join(parts) + "\n"


def _markdown(row: Row) -> str:
    said = _clean(row.said).replace("|", "\\|").replace("`", "'")
    verdict = "; ".join([row.verdict.name, *row.verdict.reasons]).replace("|", "\\|")
    cells = [
        row.case.name,
        row.case.title.replace("|", "\\|"),
        row.case.how,
        _clean(verdict),
        f"{row.seconds:.1f}",
        said,
    ]
    return "| " + " | ".join(cells) + " |"


def _clean(text: str) -> str:
    """ASCII, and no path of this machine."""
    return PATHS.sub("PATH", text).encode("ascii", "replace").decode()
