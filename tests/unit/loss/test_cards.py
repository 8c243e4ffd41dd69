"""examples/methods is what tools/method_cards.py writes, and the tests its table names exist."""

import re
from pathlib import Path

import pytest

from tests.unit.loss import test_advantages, test_histories, test_shaping, test_token_advantages
from tools import method_cards

ROOT = Path(__file__).resolve().parents[3]


def test_cards_are_up_to_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = method_cards.pages()
    monkeypatch.setattr(method_cards, "pages", lambda: wanted)
    assert method_cards.main(["--check"]) == 0, "run python tools/method_cards.py"
    stale = {tmp_path / path.name: text for path, text in wanted.items()}
    monkeypatch.setattr(method_cards, "pages", lambda: stale)
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
