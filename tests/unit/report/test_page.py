"""The two forms of a report: whole, without other files, safe, and the same each time."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from matplotlib.image import imread

from megatron_rl.reporting.scores import digits_of, number
from tests.unit.report.made_runs import (
    curve_rows,
    few_rows,
    sample,
    write_grid,
    write_run,
)
from tools import report

VOID = {"meta", "link", "br", "hr", "img", "input"}
ATTACK = '<script>alert("x")</script> & `</pre>` ``` ````| [a](b) $x$'


class Page(HTMLParser):
    """What a browser would make of the text, with complaints where it would have to guess."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        self.wrong += [f"never closed: {tag}" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data):
        self.words.append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, attrs in self.seen if (value := attrs.get(name)) is not None]

    def count(self, tag: str) -> int:
        return sum(seen == tag for seen, _ in self.seen)


def written(out: Path, *places: Path, more: tuple[str, ...] = ()) -> tuple[str, str]:
    """The texts of HTML and Markdown."""
    assert report.main([*map(str, places), "--out", str(out), *more]) == 0
    return (out / "index.html").read_text(), (out / "report.md").read_text()


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> tuple[Path, str, str]:
    """A report of three methods and two seeds: (its folder, HTML, Markdown)."""
    place = tmp_path_factory.mktemp("grid")
    write_grid(place / "runs", [["method=dapo"], ["method=grpo"], ["method=rloo"]], [1, 2])
    return place / "report", *written(place / "report", place / "runs")


def test_the_page_is_whole_and_needs_nothing_else(grid):
    _, text, _ = grid
    page = Page(text)
    assert page.wrong == []
    assert page.count("script") == page.count("iframe") == 0
    assert page.count("img") == 7 and page.count("table") >= 5
    assert all(source.startswith("data:image/png;base64,") for source in page.values("src"))
    assert len(re.findall("src=", text)) == 7
    assert not [link for link in page.values("href") if re.match(r"(?!data:,)[a-z]+:|/", link)]
    assert "default-src 'none'" in " ".join(page.values("content"))
    assert re.findall(r"url\(|@import", text) == []


def test_without_out_the_report_is_beside_the_runs(tmp_path, capsys):
    write_run(tmp_path / "runs" / "a", curve_rows(1, 5))
    for _ in range(2):  # the second finds the first report there
        assert report.main([str(tmp_path / "runs")]) == 0
        assert "1 run of 1 variant" in capsys.readouterr().out
    assert (tmp_path / "runs" / "report" / "index.html").is_file()


def test_links_lead_to_the_files_of_the_runs(grid):
    out, text, markdown = grid
    links = [link for link in Page(text).values("href") if not link.startswith(("#", "data:,"))]
    assert len(links) == 6 * 4
    assert all((out / unquote(link)).is_file() for link in links)
    twin = re.findall(r"\]\(<([^>]+)>\)", markdown)
    assert twin == links


def test_a_report_that_is_passed_on_leads_nowhere_else(tmp_path):
    write_run(tmp_path / "runs" / "a", few_rows(5), samples=[sample(5, True, "4")])
    text, markdown = written(tmp_path / "report", tmp_path / "runs", more=("--no-links",))
    links = Page(text).values("href")
    assert [link for link in links if not link.startswith(("#", "data:,"))] == []
    assert re.findall(r"(?<!!)\[[^]]*\]\(", markdown) == []
    assert "metrics.jsonl" not in text + markdown


def test_figures_exist_and_have_something_in_them(grid):
    out, _, markdown = grid
    names = re.findall(r"!\[[^]]*\]\(([^)]+)\)", markdown)
    assert len(names) == 7
    for name in names:
        image = imread(out / name)
        assert image.shape[1] > 900 and (image[..., :3] < 0.5).any(axis=-1).mean() > 0.005


def test_the_baseline_comes_first_and_the_methods_differ(grid):
    _, _, markdown = grid
    rows = [
        line.strip("| ").split(" | ")
        for line in markdown.splitlines()
        if line.startswith("| method=")
    ]
    methods = rows[:3]
    assert [row[0] for row in methods] == ["method=grpo", "method=dapo", "method=rloo"]
    assert methods[0][6:10] == ["baseline", "-", "-", "-"]
    assert float(methods[1][6]) < 0 < float(methods[2][6])  # made so: dapo gains less, rloo more
    assert [row[9] for row in methods[1:]] == ["lower", "higher"]
    assert methods[1][7] == "2"


def test_the_same_runs_give_the_same_bytes(grid, tmp_path):
    out, *_ = grid
    again = out.parent / "again"
    again.mkdir()
    stale = again / "figures" / "pass-k.png"
    stale.parent.mkdir()
    stale.write_bytes(b"of an earlier report")
    written(again, out.parent / "runs")
    names = sorted(path.relative_to(out) for path in out.rglob("*.*"))
    assert names == sorted(path.relative_to(again) for path in again.rglob("*.*"))
    assert len(names) == 9
    assert [
        name for name in names if (out / name).read_bytes() != (again / name).read_bytes()
    ] == []


def test_untrusted_text_stays_text(tmp_path):
    rows = curve_rows(1, 5)
    for row in rows:
        if "eval/accuracy" in row:
            row[f"eval/accuracy/{ATTACK}"] = 0.1

    def change(content):
        content["data"]["prompt_suffix"] = ATTACK
        content["data_fingerprint"] = "other"

    samples = [sample(5, False, ATTACK), sample(5, True, ATTACK)]
    samples[0]["answer"] = samples[0]["prompt_text"] = samples[0]["reward"] = ATTACK
    write_run(tmp_path / "runs" / ATTACK.replace("/", "-"), rows, samples=samples, change=change)
    write_run(tmp_path / "runs" / "plain", curve_rows(1, 5), seed=2)
    text, markdown = written(tmp_path / "out", tmp_path / "runs", more=("--title", ATTACK))
    page = Page(text)
    assert page.wrong == [] and page.count("script") == 0
    assert "<script" not in text.lower()
    assert " ".join(page.words).count(ATTACK) >= 7  # title twice, setting, response, prompt, answer
    outside = re.sub(r"(?ms)^(`{3,})[a-z]+\n.*?^\1$", "", markdown)
    assert len(re.findall(r"(?m)^`{5}[a-z]+$", markdown)) == 6 - 2  # longer than any in the text
    assert "<script" not in outside and "&lt;script" in outside
    widths = [
        len(re.findall(r"(?<!\\)\|", line)) for line in outside.splitlines() if line[:1] == "|"
    ]
    assert set(widths) <= {11, 10, 8, 4, 3}  # columns of the tables + 1: no entry was cut in two


def test_missing_metrics_leave_panels_and_entries_out(tmp_path):
    rows = [{"step": step, "reward/mean": 0.1 * step} for step in range(1, 4)]
    rows[1]["reward/mean"] = None
    write_run(tmp_path / "runs" / "a", rows)
    text, markdown = written(tmp_path / "out", tmp_path / "runs")
    page = Page(text)
    assert page.wrong == [] and page.count("img") == 1
    assert "### reward/mean" in markdown and "eval/accuracy" not in markdown
    assert "| method=grpo | 3 | - | - | - | - | - | - | 2 |" in markdown
    assert "## Samples" not in markdown and "<h2>Samples" not in text


def test_what_is_unfinished_or_not_finite_is_said(tmp_path, capsys):
    write_run(tmp_path / "runs" / "a", few_rows(20), seed=1)
    write_run(tmp_path / "runs" / "b", few_rows(20)[:8], seed=2, finished=False)
    rows = few_rows(20)
    rows[-1]["eval/accuracy"] = None
    write_run(tmp_path / "runs" / "c", rows, seed=3)
    write_run(tmp_path / "runs" / "d", [], seed=4)
    text, _ = written(tmp_path / "out", tmp_path / "runs")
    words = " ".join(Page(text).words)
    said = capsys.readouterr().out
    for note in (
        "b: unfinished, 7 of 20 steps; not counted in the tables",
        "eval/accuracy: no last value in c; not counted",
        "d: left out: metrics.jsonl has no row yet",
    ):
        assert note in words and f"note: {note}" in said
    assert "2 (1 unfinished not counted)" in words


def test_samples_are_of_the_first_and_the_last_step(tmp_path):
    samples = [
        sample(1, False, "first wrong"),
        sample(1, False, "not shown"),
        sample(2, True, "between"),
        sample(3, True, "last right"),
        sample(3, False, "x" * 3000),
    ]
    run = write_run(tmp_path / "runs" / "a", few_rows(5), samples=samples)
    with (run / "samples.jsonl").open("a") as file:
        file.write('{"step": 3, "resp')  # cut off by a kill
    text, markdown = written(tmp_path / "out", tmp_path / "runs")
    for form in (text, markdown):
        assert "first wrong" in form and "last right" in form
        assert "between" not in form and "not shown" not in form
        assert "x" * 2000 + "\n[... 1000 more characters in samples.jsonl]" in form
        assert "are damaged" not in form
    assert Page(text).count("pre") == 3 * 3
    (run / "samples.jsonl").write_text('[]\n{"step": 1}\n')
    text, _ = written(tmp_path / "out", tmp_path / "runs")
    assert "a: samples.jsonl: 2 lines are damaged, the first is line 1" in text


def test_a_conversation_is_shown_turn_by_turn(tmp_path):
    turns = [("call", True), ("12", False), ("y" * 3000, True)]
    shown = {
        **sample(1, True, "all of it"),
        "turns": [{"text": text, "is_sampled": is_sampled} for text, is_sampled in turns],
        "ended_by": "done",
    }
    write_run(tmp_path / "runs" / "a", few_rows(5), samples=[shown])
    text, markdown = written(tmp_path / "out", tmp_path / "runs")
    assert "Step 1, right, reward 1.0, ended by: done." in markdown and "all of it" not in markdown
    pieces = ["Prompt:\n\n```prompt\n3 + 4 =", "Turn 1:\n\n```sampled\ncall"]
    pieces += ["Appended:\n\n```appended\n12", "Turn 2:\n\n```sampled\nyyy", "more characters"]
    pieces += ["Right answer:\n\n```answer\n7"]
    places = [markdown.index(piece) for piece in pieces]
    assert places == sorted(places)
    assert text.count('class="language-sampled"') == 2 and Page(text).count("pre") == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["RUNS", "--metric", "eval/acuracy"], "--metric eval/acuracy: no run has it; of these"),
        (["RUNS", "--baseline", "dapo"], "--baseline 'dapo': no variant has this label"),
        (["RUNS/none"], "runs/none: no such folder"),
        (["RUNS", "--out", "RUNS/a/config.json"], "config.json: cannot be written (File exists"),
    ],
)
def test_wrong_input_is_one_error(tmp_path, capsys, options, message):
    write_run(tmp_path / "runs" / "a", curve_rows(1, 5))
    words = [word.replace("RUNS", str(tmp_path / "runs")) for word in options]
    assert report.main(["--out", str(tmp_path / "out"), *words]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") <= 3
    assert not (tmp_path / "out").exists()


def test_more_metrics_are_more_tables(tmp_path):
    also = {"eval/pass_at_8": 0.8, "rollout/entropy": 0.4}
    write_run(tmp_path / "runs" / "a", [row | also for row in few_rows(5)])
    more = ("--metric", "eval/pass_at_8", "rollout/entropy", "--metric", "eval/pass_at_8")
    _, markdown = written(tmp_path / "out", tmp_path / "runs", more=more)
    assert re.findall(r"(?m)^### (\S+)", markdown)[:2] == ["eval/pass\\_at\\_8", "rollout/entropy"]
    assert "mean entropy of the policy at the start of the step \\[nats\\]" in markdown
    # Only what is held out has a course, and only where it was evaluated more than once.
    assert re.findall(r"(?m)^(\S+) over the evaluations", markdown) == ["eval/pass\\_at\\_8"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5344, "0.534"),
        (12.34, "12.3"),
        (12345.6, "12,346"),
        (0.0, "0.000"),
        (2.36e-5, "0.0000236"),
    ],
)
def test_a_number_has_as_many_digits_as_count(value, text):
    assert number(value, digits_of([value])) == text
