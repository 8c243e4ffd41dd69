"""What the documents say is so: links lead somewhere, numbers have evidence, commands are those
that CI runs."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.test_size import REPO, text_files

README = REPO / "README.md"
# Pages whose every number links to the record or the test that shows it.
GUIDES = sorted((REPO / "tools/docs/pages").glob("*.md"))
EVIDENT = (README, *GUIDES, REPO / "tools/bench/LOG.md", REPO / ".github/CONTRIBUTING.md")
COMMANDS_WITHIN_LINES = 30
MAX_PAGE_LINES = 80
MAX_README_LINES, MAX_README_WORDS = 150, 900
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A measured quantity: a number with a unit of time, rate, share or gain.
UNITS = r"%|s|ms|min|minutes?|seconds?|hours?|(?:tok|tokens|updates|steps)/s|points|GiB|times|x"
CLAIM = re.compile(rf"(?<![\w.-])\d[\d.,]*\s?({UNITS})(?![\w-])")
# Hosts whose address may stand in the repository: papers, and the source of a library that a
# comment explains.
HOSTS = {"arxiv.org", "github.com", "openreview.net", "doi.org", "www.apache.org"}
# Paths of one machine, addresses of package indexes, and words about how the text came about rather
# than what the project is.
FORBIDDEN = re.compile(
    r"/work/(main|shared)|/root/|/home/\w|/tmp/(?!\$|megatron_rl_)\w|/opt/(wheels|pypi)|"
    r"pypi\.org|pythonhosted|download\.pytorch|"
    r"\b(spikes?|helper session|sub-?agent|claude|anthropic|chatgpt|copilot)\b|"
    r"\blanguage model wrote\b|"
    r"\bissues? (show|[A-Z]\b|#?\d)|\b(FINDINGS|METHODS|DESIGN|HELPER)(\.md|\b)|"
    r"\bthe (lead|brief)\b",
    re.IGNORECASE,
)
CASE_SENSITIVE = {"FINDINGS", "METHODS", "DESIGN", "HELPER"}


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative links of a Markdown text whose target does not exist."""
    targets = (target for target in LINK.findall(text) if not re.match(r"[a-z]+:|#", target))
    return [target for target in targets if not (folder / target.partition("#")[0]).exists()]


def unsupported_claims(text: str) -> list[str]:
    """Paragraphs (or table rows) outside code blocks that state a measured quantity and link to
    nothing."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = [
        row
        for block in re.split(r"\n\s*\n", prose)
        for row in (block.splitlines() if block.startswith("|") else [block])
    ]
    return [
        block
        for block in blocks
        if CLAIM.search(re.sub(r"`[^`]*`", "", block)) and not LINK.search(block)
    ]


def forbidden_words(text: str) -> list[str]:
    found = [match.group(0) for match in FORBIDDEN.finditer(text)]
    return [
        word
        for word in found
        if word.split(".")[0].upper() not in CASE_SENSITIVE or word.split(".")[0] in CASE_SENSITIVE
    ]


def foreign_hosts(text: str) -> list[str]:
    return [
        host
        for host in re.findall(r"https?://([\w.-]+)", text)
        if host not in HOSTS | {"localhost", "127.0.0.1"}
    ]


def first_block_commands(text: str) -> tuple[list[str], int]:
    """(commands of the first code block, the line its end stands on)."""
    lines = text.splitlines()
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    block = lines[fences[0] + 1 : fences[1]]
    return [line for line in block if line.strip() and not line.startswith("#")], fences[1] + 1


def undocumented(source: str) -> list[str]:
    """Public functions and classes of a module without a docstring."""
    tree = ast.parse(source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [
        node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")
    ]
    return [
        *([] if ast.get_docstring(tree) else ["module"]),
        *(node.name for node in public if not ast.get_docstring(node)),
    ]


def documents() -> list[Path]:
    return [path for path in text_files() if path.suffix == ".md"]


def test_links_lead_somewhere():
    broken = {
        str(path.relative_to(REPO)): broken_links(path.read_text(encoding="utf-8"), path.parent)
        for path in documents()
    }
    assert not any(broken.values()), {name: links for name, links in broken.items() if links}


@pytest.mark.parametrize("page", EVIDENT, ids=lambda page: page.stem)
def test_numbers_link_to_their_evidence(page):
    assert unsupported_claims(page.read_text(encoding="utf-8")) == []


def test_the_log_is_newest_first():
    text = (REPO / "tools/bench/LOG.md").read_text(encoding="utf-8")
    dates = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert dates == sorted(set(dates), reverse=True)
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", date) for date in dates)


def test_pages_of_packages_can_be_read_at_one_go():
    pages = [*(REPO / "megatron_rl").rglob("README.md"), REPO / ".github/CONTRIBUTING.md"]
    lengths = {str(page.relative_to(REPO)): len(page.read_text().splitlines()) for page in pages}
    assert len(lengths) >= 7
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_PAGE_LINES}


def test_readme_is_short():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_README_LINES
    assert len(text.split()) <= MAX_README_WORDS


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_opens_with_something_to_run_or_to_see(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ") and lines[2].startswith(("```", "!["))
    assert len(lines) <= MAX_README_LINES


def test_readme_begins_with_the_two_commands():
    """One trains, one tests; both work from nothing, so they start with the set-up."""
    commands, last_line = first_block_commands(README.read_text(encoding="utf-8"))
    assert last_line <= COMMANDS_WITHIN_LINES
    assert commands[0] == "bash examples/quickstart_cpu/run.sh"
    quickstart = REPO / "examples/quickstart_cpu"
    assert '/toy.sh"' in (quickstart / "run.sh").read_text(encoding="utf-8")
    assert "tools/setup_cpu.sh" in (quickstart / "toy.sh").read_text(encoding="utf-8")
    assert re.fullmatch(r"bash tools/setup_cpu\.sh test && \.venv/bin/pytest -n 2", commands[1])
    assert len(commands) == 2


def test_ci_runs_the_command_of_readme():
    printed = subprocess.run(
        ["bash", str(REPO / ".ci/run"), "--print"],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert printed.stdout.strip() == first_block_commands(README.read_text(encoding="utf-8"))[0][1]


def test_text_speaks_of_the_project_alone():
    found = {}
    for path in text_files():
        text = path.read_text(encoding="utf-8")
        # this file lists the words; the licence text and pinned versions are not ours to word
        if path == Path(__file__).resolve() or path.name.startswith("constraints"):
            continue
        found[str(path.relative_to(REPO))] = forbidden_words(text) + foreign_hosts(text)
    assert not any(found.values()), {name: words for name, words in found.items() if words}


@pytest.mark.parametrize(
    "path", sorted((REPO / "megatron_rl/loss").glob("*.py")), ids=lambda path: path.name
)
def test_the_loss_is_documented(path):
    source = path.read_text(encoding="utf-8")
    assert not source.strip() or undocumented(source) == []


def test_each_rule_can_fail(tmp_path):
    (tmp_path / "there.md").touch()
    assert broken_links(
        "[a](there.md#x) [b](gone.md) [c](#d) [e](https://arxiv.org/abs/1)", tmp_path
    ) == ["gone.md"]
    claims = "It takes 5 minutes.\n\nIt takes 5 minutes ([record](r.md)).\n\n```\nsleep 5 s\n```"
    assert unsupported_claims(claims) == ["It takes 5 minutes."]
    assert unsupported_claims("|a|b|\n|-|-|\n|x|0.3 s|\n|y|[0.3 s](r.md)|") == ["|x|0.3 s|"]
    assert (
        unsupported_claims(
            "Python 3.11, two cores, `TP=2`, Qwen2.5-7B and version 0.16.1 are no claims."
        )
        == []
    )
    assert first_block_commands("# t\n```bash\n# say\nrun a\n\nrun b\n```\n") == (
        ["run a", "run b"],
        7,
    )
    assert undocumented("def a(): ...\nclass B:\n  '''b'''\ndef _c(): ...\nclass D: ...") == [
        "module",
        "a",
        "D",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "/work/shared/x",
        "the spike showed",
        "as issue A asks",
        "METHODS.md",
        "/root/x",
        "-i pypi.org",
    ],
)
def test_forbidden_words_are_found(text):
    assert forbidden_words(text)


def test_ordinary_words_are_not_forbidden():
    assert (
        forbidden_words(
            "The methods by design; /tmp/$USER; issues and findings; torchrun's agent; a leading"
            " zero."
        )
        == []
    )
    assert foreign_hosts("https://arxiv.org/abs/2402.03300 http://127.0.0.1:8000") == []
    assert foreign_hosts("https://example.com/x") == ["example.com"]
