"""tools/style_figures.py on sources whose figures are counted by hand."""

from __future__ import annotations

import pytest

from tools.style_figures import HEADINGS, LONG, MANY, RATES, Figures, main, quantile, rows


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


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("a, b = 1, 2", 1),
        ("self.a, self.b = a, b", 1),
        ("a, b = b, a", 0),
        ("x[i], x[j] = x[j], x[i]", 0),
        ("a, b = pair", 0),
        ("a, b = f(x), f(y)", 1),
        ("a = 1, 2", 0),
        ("a = b = 1", 0),
        ("c = a, b = 1, 2", 1),
        ("(\n    a,\n    b,\n) = (\n    1,\n    2,\n)", 1),
        ("a, (b, c) = 1, pair", 1),
    ],
)
def test_multi_assignments(source, count):
    assert counted(source).counts[RATES[0]] == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("[x for x in y]", 0),
        ("[x for y in z for x in y]", 1),
        ("[[x for x in y] for y in z]", 1),
        ("sum(sum(x for x in y) for y in z)", 1),
        ("{k: [v for v in x] for k, x in z}", 1),
        ("[x for x in y if x]", 0),
        ("[x for x in y] + [x for x in z]", 0),
        ("[{x for x in [y for y in z]} for a in b]", 2),
    ],
)
def test_nested_comprehensions(source, count):
    assert counted(source).counts[RATES[1]] == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("a if x else b", 1),
        ("a if x else b if y else c", 2),
        ("f(a if x else b) if y else c", 2),
        ("if x:\n    a\nelse:\n    b", 0),
    ],
)
def test_conditional_expressions(source, count):
    assert counted(source).counts[RATES[2]] == count


@pytest.mark.parametrize(
    ("signature", "many"),
    [
        ("def f(a, b, c, d, e, g)", 0),
        ("def f(a, b, c, d, e, g, h)", 1),
        ("def f(self, a, b, c, d, e, g)", 0),
        ("def f(a, b, /, c, d, *, e, g, h)", 1),
        ("async def f(a, b, c, d, e, g, *args, **kwargs)", 0),
    ],
)
def test_functions_of_more_than_six_parameters(signature, many):
    found = counted(f"{signature}: ...").counts
    assert (found["functions"], found[MANY]) == (1, many)


def test_functions_of_more_than_sixty_lines():
    """61 lines from def to the last statement; the decorator above it is not counted."""
    short = counted("@d\ndef f():\n" + "    x\n" * 59).counts
    assert (short["functions"], short[LONG]) == (1, 0)
    inner = counted(
        "class A:\n    def f(self):\n        def g(): ...\n" + "        x\n" * 59
    ).counts
    assert (inner["functions"], inner[LONG]) == (2, 1)


def test_quantiles_by_hand():
    """Of four values the third is the first that three quarters do not exceed."""
    assert [quantile([4, 1, 3, 2], share) for share in (0.25, 0.75, 0.76, 1.0)] == [1, 3, 4, 4]
    assert quantile(list(range(1, 101)), 0.99) == 99
    assert quantile([], 0.5) == 0


def test_a_row_by_hand():
    """Four code lines, one wider than 100 columns: a quarter; one of each habit: 250 per 1,000."""
    lines = ["a, b = 1, 2", "# why", "[x for y in z for x in y]", "c if x else d if y else e"]
    row = counted("\n".join([*lines, f"x = '{'y' * 100}'"])).row("here")
    assert row == [
        *("here", "1", "5", "4", "25 / 106 / 106", "25.0 %"),
        *("250.0", "250.0", "500.0", "0.250", "0 / 0", "0 / 0"),
    ]


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
    assert [row[HEADINGS.index(RATES[0])] for row in rows(tmp_path, packages=True)] == [
        "0.0",
        "1000.0",
        "333.3",
    ]
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
