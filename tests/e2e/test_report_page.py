"""The page of a report in a real browser: no complaint on its console, figures of some size."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from megatron_rl import report
from tests.unit.reporting.comparison.made_runs import write_grid

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
]
START_S = 120
LOOK = """JSON.stringify({
    figures: [...document.querySelectorAll('img')].map(
        image => [image.clientWidth, image.clientHeight, image.naturalWidth]),
    tables: document.querySelectorAll('table').length,
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
})"""


class Browser:
    """One tab of Chromium, spoken to by the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.events: list[dict[str, Any]] = []

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    async def wait_for(self, method: str) -> None:
        while not any(event["method"] == method for event in self.events):
            self.events.append(await self._socket.receive_json(timeout=60))

    def complaints(self) -> list[str]:
        """Errors and warnings of the page: of the console, of scripts, of what was refused."""
        said = []
        for event in self.events:
            content = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                said.append(str(content["exceptionDetails"]))
            if event["method"] == "Runtime.consoleAPICalled":
                said.append(str(content["args"]))
            if event["method"] == "Log.entryAdded":
                said.append(str(content["entry"]))
        return said


async def seen(page: Path, scratch: Path, width: int) -> tuple[list[str], dict]:
    """(complaints, what ``LOOK`` says) of a page."""
    assert CHROMIUM is not None
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    profile = scratch / f"profile-{width}"
    command = [CHROMIUM, *words, f"--user-data-dir={profile}", "about:blank"]
    with (scratch / "chromium.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        port = await port_of(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = await answer.json(content_type=None)
            (tab,) = [each for each in tabs if each["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                return await look_at(Browser(socket), page, width)
    finally:
        process.terminate()
        process.wait(30)


async def look_at(browser: Browser, page: Path, width: int) -> tuple[list[str], dict]:
    for domain in ("Runtime", "Log", "Page", "Network"):
        await browser.ask(f"{domain}.enable")
    await browser.ask(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    await browser.ask("Page.navigate", url=page.as_uri())
    await browser.wait_for("Page.loadEventFired")
    answer = await browser.ask("Runtime.evaluate", expression=LOOK, returnByValue=True)
    assert "value" in answer["result"], answer
    return browser.complaints(), json.loads(answer["result"]["value"])


async def port_of(path: Path) -> str:
    """The port that the browser listens on, once it does."""
    end = time.monotonic() + START_S
    while not path.is_file() or not path.read_text().strip():
        assert time.monotonic() < end, "the browser did not start"
        await asyncio.sleep(0.1)
    return path.read_text().split()[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("page")
    write_grid(place / "runs", [["method=grpo"], ["method=dapo"]], [1, 2, 3], num_steps=60)
    assert report.main([str(place / "runs"), "--out", str(place / "report")]) == 0
    return place / "report" / "index.html"


@pytest.mark.parametrize("width", [1400, 420])
def test_a_browser_shows_the_page(page, tmp_path, width):
    complaints, look = asyncio.run(seen(page, tmp_path, width))
    assert complaints == []
    assert len(look["figures"]) == 7 and look["tables"] == 5
    for across, down, pixels in look["figures"]:
        assert across > 300 and down > 150 and pixels > 900, look["figures"]
    assert look["wide"] <= 0  # tables scroll in their boxes, the page does not


def test_a_complaint_of_the_browser_is_noticed(page, tmp_path):
    """A script would be refused by the page's own rule, and said so."""
    text = page.read_text().replace("</body>", "<script>document.title = 1</script></body>")
    broken = tmp_path / "broken.html"
    broken.write_text(text)
    complaints, _ = asyncio.run(seen(broken, tmp_path, 1400))
    assert len(complaints) == 1 and "Content Security Policy" in complaints[0]
