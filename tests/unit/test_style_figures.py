"""tools/style_figures.py on sources whose figures are counted by hand."""

from __future__ import annotations

import pytest

from tools.style_figures import HEADINGS, Figures, main, quantile, rows


def counted(source: str) -> Figures:
    total = Figures()
    total.add(source)
    return total


def test_lines_by_hand():
    """Fourteen: five code lines, two comments, five of docstrings and two blank ones."""
    source = '''"""One

two."""
import a

# why
def f(x):
    """Doc."""
    x = a + 1
    # why
    "a string that stands alone"

y = \\
    f(1) + 1
'''
    found = counted(source)
    assert found.widths == [8, 9, 13, 5, 12]
    assert found.counts["comments"] == 2
    assert found.counts["lines"] == 14


def test_a_string_that_is_a_value_is_code():
    assert counted('x = """a\nb"""\n').widths == [8, 4]


def test_quantiles_by_hand():
    """Of four values the third is the first that three quarters do not exceed."""
    assert [quantile([4, 1, 3, 2], share) for share in (0.25, 0.75, 0.76, 1.0)] == [1, 3, 4, 4]
    assert quantile(list(range(1, 101)), 0.99) == 99
    assert quantile([], 0.5) == 0


def test_a_row_by_hand():
    lines = ["a, b = 1, 2", "# why", "[x for y in z for x in y]", "c if x else d if y else e"]
    row = counted("\n".join([*lines, f"x = '{'y' * 100}'"])).row("here")
    assert row == ["here", "1", "5", "4", "25 / 106 / 106", "0.250"]


def test_packages_and_the_sum_of_a_folder(tmp_path):
    for name, source in {
        "a/x.py": "x = 1\n",
        "a/b/y.py": "y = 2\n",
        "z.py": "z, w = 3, 4\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    found = [tuple(row[:3]) for row in rows(tmp_path, packages=True)]
    assert found == [("a/", "2", "2"), ("its own files", "1", "1"), (f"**{tmp_path}**", "3", "3")]
    assert len(rows(tmp_path, packages=False)) == 1


def test_the_program_prints_a_table(tmp_path, capsys):
    (tmp_path / "a.py").write_text("x = 1\n")
    main([str(tmp_path)])
    heading, rule, row = capsys.readouterr().out.splitlines()
    assert heading.count("|") == rule.count("|") == row.count("|") == len(HEADINGS) + 1


def test_what_cannot_be_counted_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no Python files here"):
        rows(tmp_path, packages=False)
    (tmp_path / "bad.py").write_text("x =\n")
    with pytest.raises(ValueError, match=r"bad\.py: cannot be read by Python 3"):
        rows(tmp_path, packages=False)
    with pytest.raises(SystemExit, match=r"error: .*bad\.py"):
        main([str(tmp_path)])
