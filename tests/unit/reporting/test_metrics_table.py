"""The table of metrics: the page says what the code says, and a real run has no other keys."""

from __future__ import annotations

import pytest

from megatron_rl.reporting.metrics import TABLE, Metric, metric
from tools import metrics_table


def test_the_page_is_up_to_date(monkeypatch, tmp_path):
    assert metrics_table.main(["--check"]) == 0, "run python tools/metrics_table.py"
    monkeypatch.setattr(metrics_table, "PAGE", tmp_path / "metrics.md")
    assert metrics_table.main(["--check"]) == 1
    assert metrics_table.main([]) == 0
    assert metrics_table.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("loss/total", TABLE["loss/total"]),
        ("loss/kl", TABLE["loss/"]),
        ("eval/accuracy/gsm8k/test", TABLE["eval/accuracy/"]),
        ("eval/pass_at_4", TABLE["eval/"]),
        ("losses", None),
        ("reward/mean_of_all", None),
    ],
)
def test_a_key_has_its_own_entry_or_that_of_the_longest_prefix(key: str, entry: Metric | None):
    assert metric(key) == entry


def test_a_page_row_has_key_unit_and_meaning():
    rows = metrics_table.page().splitlines()
    assert (
        "| `mismatch/logprob_abs_diff_mean` | nats |"
        " mean \\|old - sampler\\| over response tokens |"
    ) in rows
    assert "| `memory/...` | GiB |" in " ".join(rows)
    assert len([row for row in rows if row.startswith("| `")]) == len(TABLE)
