"""The documentation as a site: built, complete without a network, and looked at in a browser."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.load import compose
from tests.e2e.browser import NEEDS_CHROMIUM, seen
from tests.launch import REPO

# Files that a browser fetches to show a page; links to papers are not.
FETCHED = re.compile(
    r"<(?:script|img|source|iframe)[^>]* src=\"?([^\s\">]+)|<link[^>]* href=\"?([^\s\">]+)"
)
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
FOUND = """new Promise(found => {
    const items = '.md-search-result__item a'
    const results = () => [...document.querySelectorAll(items)].map(item => item.href)
    const look = setInterval(() => results().length && (clearInterval(look), found(results())), 100)
    setTimeout(() => found([]), 30000)
})"""


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    words = [sys.executable, "tools/docs/build.py", "--out", str(folder)]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr  # a broken link among them
    return folder


def test_the_site_is_whole(site):
    """Pages of each part, and nothing that is fetched from elsewhere."""
    pages = sorted(site.rglob("*.html"))
    names = {page.relative_to(site).as_posix() for page in pages}
    assert {"guides/data.html", "examples/methods/a_grae.html", "reference/loss.html"} <= names
    for page in pages:
        fetched = [a or b for a, b in FETCHED.findall(page.read_text("utf-8"))]
        assert not [name for name in fetched if re.match(r"[a-z]+:|//", name)], page
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))
    assert any("a_grae" in entry["text"] for entry in index["docs"])


def test_the_reference_has_a_line_for_every_key(site):
    """With its default and what stands beside it; keys of methods are on their cards."""
    page = (site / "reference/configuration.html").read_text("utf-8")
    cells = r"<tr>\n<td><code>([\w.]+)</code></td>\n<td>(.*)</td>\n<td>(.*)</td>\n</tr>"
    lines = {key: (default, said) for key, default, said in re.findall(cells, page)}
    assert lines["batch.prompts_per_minibatch"] == ("<code>128</code>", "one optimizer step")
    assert lines["checkpoint.keep"] == ("<code>2</code>", "newest ones")
    # A comment above, of two lines.
    said = "Run again in the backward: none | selective (feed-forward part of layers) | full (whole"
    assert lines["parallel.recompute"][1].startswith(said)
    missing = [key for key in leaves(compose("config", [])) if key not in lines]
    assert not missing


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Keys of settings, dotted; those of methods are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and name != "method":
            yield from leaves(value, f"{prefix}{name}.")
        elif name != "method":
            yield prefix + name


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *values: object) -> None:
            """Not a line for each file."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@NEEDS_CHROMIUM
@pytest.mark.parametrize("width", [400, 900, 1400])
@pytest.mark.parametrize("page", ["index", "guides/methods", "reference/loss"])
def test_a_browser_shows_the_site(address, tmp_path, page, width):
    complaints, wide = seen(f"{address}/{page}.html", tmp_path, width, WIDE)
    assert complaints == []
    assert wide <= 0


@NEEDS_CHROMIUM
def test_the_search_finds_a_method(address, tmp_path):
    complaints, results = seen(f"{address}/index.html?q=a_grae", tmp_path, 1400, FOUND)
    assert complaints == []
    assert any("methods/a_grae.html" in result for result in results), results
