"""Writes examples/metrics.md: every key of metrics.jsonl, with its meaning and unit.

    python tools/metrics_table.py           writes the page
    python tools/metrics_table.py --check   exit status 1 when the page is not what would be written

The table is that of megatron_rl/reporting/metrics.yaml.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.reporting.metrics import TABLE

PAGE = Path(__file__).resolve().parents[1] / "examples" / "metrics.md"
HEAD = """# Metrics

Every key of `metrics.jsonl`, which has one object a step;
[trackers](../tools/docs/pages/tracking.md) get the same. `...` stands for what follows a prefix. A
value that is not finite is `null`. The keys of `credit/`, `loss/`, `policy/` and `kl/` that a
method reports are listed on its [card](methods/README.md).

"""
FOOT = "\nWritten by `python tools/metrics_table.py`.\n"


def page() -> str:
    lines = ["| key | unit | meaning |", "|---|---|---|"]
    for key, entry in TABLE.items():
        shown = f"{key}..." if key.endswith("/") else key
        meaning = entry.meaning.replace("|", "\\|")
        lines.append(f"| `{shown}` | {entry.unit} | {meaning} |")
    return HEAD + "\n".join(lines) + "\n" + FOOT


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
    if check and not current:
        print(f"{PAGE.name} differs from the code; run python tools/metrics_table.py")
        return 1
    if not current:
        PAGE.write_text(page(), encoding="utf-8")
    print("the page of metrics is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
