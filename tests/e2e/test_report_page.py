"""The page of a report in a real browser: no complaint on its console, figures of some size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.browser import NEEDS_CHROMIUM, seen
from tests.unit.report.made_runs import write_grid
from tools import report

pytestmark = [pytest.mark.full, NEEDS_CHROMIUM]
LOOK = """({
    figures: [...document.querySelectorAll('img')].map(
        image => [image.clientWidth, image.clientHeight, image.naturalWidth]),
    tables: document.querySelectorAll('table').length,
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("page")
    write_grid(place / "runs", [["method=grpo"], ["method=dapo"]], [1, 2, 3], num_steps=60)
    assert report.main([str(place / "runs"), "--out", str(place / "report")]) == 0
    return place / "report" / "index.html"


@pytest.mark.parametrize("width", [1400, 420])
def test_a_browser_shows_the_page(page, tmp_path, width):
    complaints, look = seen(page.as_uri(), tmp_path, width, LOOK)
    assert complaints == []
    assert len(look["figures"]) == 7 and look["tables"] == 6
    for across, down, pixels in look["figures"]:
        assert across > 300 and down > 150 and pixels > 900, look["figures"]
    assert look["wide"] <= 0  # tables scroll in their boxes, the page does not


def test_a_complaint_of_the_browser_is_noticed(page, tmp_path):
    """A script would be refused by the page's own rule, and said so."""
    text = page.read_text().replace("</body>", "<script>document.title = 1</script></body>")
    broken = tmp_path / "broken.html"
    broken.write_text(text)
    complaints, _ = seen(broken.as_uri(), tmp_path, 1400, LOOK)
    assert len(complaints) == 1 and "Content Security Policy" in complaints[0]
