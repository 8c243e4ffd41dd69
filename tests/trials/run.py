"""Repeats the trials of users and faults as real runs, and judges each.

    python -m tests.trials.run                                  # everything
    python -m tests.trials.run --group passing --group faults
    python -m tests.trials.run --case b01 --case jrn_* --show
    python -m tests.trials.run --record tests/trials/RECORD.md

Prints a line a case and a table by group. Exit code 1: any verdict is bad, or more than 5 % are
poor.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import warm
from tests.trials import groups
from tests.trials.material import Material
from tests.trials.place import SETTINGS, Case, Place, shared_segments
from tests.trials.record import Row, record, table
from tests.trials.verdicts import Outcome, Verdict, first_words, judge

MAX_POOR = 0.05


class Program:
    """One launch of the trials: the folder and the shared inputs."""

    def __init__(self, folder: Path, *, show: bool = False, alone: bool = True) -> None:
        """``alone``: one case at a time, so that what a case leaves in /dev/shm can be told."""
        self.folder, self.show, self.alone = folder, show, alone
        self.material = Material(folder / "shared")

    def judged(self, case: Case) -> Row:
        """Runs one case in a folder of its own and removes the folder when the verdict is good."""
        missing = [name for name in case.needs if not available(name)]
        if missing:
            return Row(case, Verdict("not counted", (f"needs {', '.join(missing)}",)), 0.0, "")
        folder = self.folder / case.name
        folder.mkdir()
        place = Place(folder, self.material, case.limit_s)
        before = shared_segments()
        started = time.monotonic()
        try:
            outcome = case.play(place)
            left = sorted(shared_segments() - before) if self.alone else []
            outcome = outcome.noting(unclear=[f"left in /dev/shm: {name}" for name in left])
            verdict = judge(case.expected, outcome)
        except (TimeoutError, AssertionError, subprocess.CalledProcessError) as error:
            outcome = Outcome(None, f"{type(error).__name__}: {error}", time.monotonic() - started)
            verdict = Verdict("bad", (f"the case did not get to its point: {error}",))
            place.left_behind()
        if self.show:
            print(f"----- {case.name}\n{outcome.text[-6000:]}\n-----", flush=True)
        if verdict.name == "good":
            shutil.rmtree(folder, ignore_errors=True)
        said = (
            first_words(outcome.text)
            .replace(str(folder), "RUN")
            .replace(str(self.folder), "TRIALS")
        )
        return Row(case, verdict, time.monotonic() - started, said)


def available(name: str) -> bool:
    """Whether the machine has what a case asks for: ``root``, or a program."""
    return os.geteuid() == 0 if name == "root" else shutil.which(name) is not None


def chosen(names: Sequence[str], patterns: Sequence[str]) -> list[Case]:
    """The cases of the groups ``names`` (none: all) whose name matches a pattern (none: all)."""
    found = groups.all_cases()
    if names:
        found = [case for case in found if case.group in names]
    if patterns:
        found = [
            case
            for case in found
            if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)
        ]
    return found


def run(cases: Sequence[Case], folder: Path, jobs: int = 1, *, show: bool = False) -> list[Row]:
    """A row for each case, in order; prints them as they come. Cases that load the machine or
    measure its time (``faults``) do not share it with others."""
    before = shared_segments()
    program = Program(folder, show=show, alone=jobs == 1)
    shared = [case for case in cases if case.group not in groups.ALONE]
    rows: dict[str, Row] = {}

    def one(case: Case) -> None:
        row = program.judged(case)
        rows[case.name] = row
        print(row.line(), flush=True)

    os.environ.update(SETTINGS)
    warm.python()  # before there are threads
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, shared))
    program.alone = True
    for case in cases:
        if case not in shared:
            one(case)
    left = sorted(shared_segments() - before)
    if left:
        print(f"left in /dev/shm by these cases, or by other work: {', '.join(left)}")
    return [rows[case.name] for case in cases]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.trials.run",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--group", action="append", default=[], choices=groups.NAMES)
    parser.add_argument("--case", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--jobs", type=int, default=2, help="cases at once (default 2)")
    parser.add_argument(
        "--record", type=Path, help="write the table of all rows there, as markdown"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the cases run; kept (default: a temporary one)"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and leave")
    parser.add_argument("--show", action="store_true", help="print the output of every case")
    options = parser.parse_args(argv)
    cases = chosen(options.group, options.case)
    if options.list:
        print(
            "\n".join(f"{case.group:8} {case.name:22} {case.how:11} {case.title}" for case in cases)
        )
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trials.") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = run(cases, folder, options.jobs, show=options.show)
    warm.close()
    seconds = time.monotonic() - started
    print(table(rows))
    print(f"{len(rows)} cases in {seconds / 60:.1f} min")
    if options.record:
        options.record.write_text(record(rows, seconds), encoding="ascii")
    return int(not passed(rows))


def passed(rows: Sequence[Row]) -> bool:
    """No bad one, and at most 5 % poor."""
    names = [row.verdict.name for row in rows if row.verdict.name != "not counted"]
    return "bad" not in names and names.count("poor") <= MAX_POOR * len(names)


if __name__ == "__main__":
    sys.exit(main())
