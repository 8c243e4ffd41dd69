"""tools/method_cards.py writes what is stale, and the tests that its table names exist."""

import re
from pathlib import Path

import pytest

from tests.unit.loss import test_advantages, test_histories, test_shaping, test_token_advantages
from tools import method_cards

ROOT = Path(__file__).resolve().parents[3]


def test_a_stale_page_is_found_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That the committed ones are not stale: ``method_cards.py --check`` in tests/commands.yaml."""
    pages = {tmp_path / "grpo.md": "a card\n"}
    monkeypatch.setattr(method_cards, "pages", lambda: pages)
    monkeypatch.setattr(method_cards, "PAGES", tmp_path)
    assert method_cards.main(["--check"]) == 1
    assert method_cards.main([]) == 0 and method_cards.main(["--check"]) == 0


def test_tests_named_in_the_table_exist() -> None:
    named = set(
        re.findall(
            r"`(test_\w+_by_hand)`", (ROOT / "examples" / "methods" / "README.md").read_text()
        )
    )
    assert len(named) > 15
    files = (test_advantages, test_histories, test_shaping, test_token_advantages)
    assert named <= set().union(*map(vars, files))
