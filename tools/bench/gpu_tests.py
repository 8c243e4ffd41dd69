"""Tests that need a GPU, as a part of the GPU programs: a row for each test.

    python tools/bench/gpu_tests.py --folder DIR tests/gpu/test_engine.py [--again-with NAME=VALUE]

Stops at the first test that fails. ``--again-with`` then runs that file once more with these
variables set, which tells where to look (``VLLM_USE_V2_MODEL_RUNNER=0``: the other model runner of
vLLM); the exit code stays 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def run(
    tests: str, report: Path, variables: Mapping[str, str]
) -> tuple[list[dict[str, object]], bool]:
    """The outcomes of one run of pytest, and whether it ended well."""
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += [tests, f"--junitxml={report}"]
    done = subprocess.run(command, cwd=REPO, env={**os.environ, **variables})
    rows = outcomes(report.read_text(encoding="utf-8")) if report.is_file() else []
    added = ", ".join(f"{name}={value}" for name, value in variables.items())
    return [row | ({"with": added} if added else {}) for row in rows], done.returncode == 0


def outcomes(report: str) -> list[dict[str, object]]:
    """Rows of pytest's report: the test, "passed" or what became of it in one line, seconds."""
    rows = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        outcome = "passed"
        for kind in ("failure", "error", "skipped"):
            found = case.find(kind)
            if found is not None:
                text = " ".join(found.get("message", "").split())
                outcome = f"{kind}: {text[:200]}".replace("|", "/")
        rows.append(
            {"test": case.get("name"), "outcome": outcome, "seconds": float(case.get("time", "0"))}
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", help="file of tests, from the top of the repository")
    parser.add_argument("--folder", type=Path, required=True, help="for pytest's report")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument(
        "--again-with", action="append", default=[], help="NAME=VALUE, may be given several times"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    report = options.folder / f"{Path(options.tests).stem}.xml"
    rows, good = run(options.tests, report, {})
    if not good and options.again_with:
        more, _ = run(
            options.tests, report, dict(each.split("=", 1) for each in options.again_with)
        )
        rows += more
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="ascii")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
