"""Chromium without a window: what a page complains of, and what a script says about it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: apt-get install chromium"
)
START_S = 120


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


def seen(url: str, scratch: Path, width: int, script: str) -> tuple[list[str], Any]:
    """(complaints, value of ``script``) of a page that is ``width`` pixels wide."""
    return asyncio.run(_seen(url, scratch, width, script))


async def _seen(url: str, scratch: Path, width: int, script: str) -> tuple[list[str], Any]:
    assert CHROMIUM is not None
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    profile = scratch / f"profile-{width}"
    command = [CHROMIUM, *words, f"--user-data-dir={profile}", "about:blank"]
    with (scratch / "chromium.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        port = await _port_of(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = await answer.json(content_type=None)
            (tab,) = [each for each in tabs if each["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                return await _look(Browser(socket), url, width, script)
    finally:
        process.terminate()
        process.wait(30)


async def _look(browser: Browser, url: str, width: int, script: str) -> tuple[list[str], Any]:
    for domain in ("Runtime", "Log", "Page", "Network"):
        await browser.ask(f"{domain}.enable")
    await browser.ask(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    await browser.ask("Page.navigate", url=url)
    await browser.wait_for("Page.loadEventFired")
    answer = await browser.ask(
        "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
    )
    assert "value" in answer["result"], answer
    return browser.complaints(), answer["result"]["value"]


async def _port_of(path: Path) -> str:
    """The port that the browser listens on, once it does."""
    end = time.monotonic() + START_S
    while not path.is_file() or not path.read_text().strip():
        assert time.monotonic() < end, "the browser did not start"
        await asyncio.sleep(0.1)
    return path.read_text().split()[0]
