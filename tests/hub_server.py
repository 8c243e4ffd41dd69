"""A local Hugging Face hub with one model, and the faults that one meets."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPO = "owner/tiny-model"
COMMIT = "a" * 40


@dataclass
class Hub:
    """What the server answers, and what it was asked.

    Attributes:
        commits: files of each commit; ``branch`` is the one that ``main`` names.
        fault: ``missing``, ``denied``, ``gated``, ``busy`` (503), ``cut`` (half of a body) or
            ``changed`` (a body with other bytes).
        asked: paths of the requests for files.
    """

    commits: dict[str, dict[str, bytes]]
    branch: str = COMMIT
    fault: str = ""
    url: str = ""
    asked: list[str] = field(default_factory=list)


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """A hub that has the files of ``folder`` as REPO."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    hub = Hub({COMMIT: files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{REPO}"):
            return self._describe(path)
        if path.startswith(f"/{REPO}/resolve/"):
            return self._file(*path.removeprefix(f"/{REPO}/resolve/").split("/", 1))
        return self._answer(404, code="RepoNotFound")

    def _describe(self, path: str) -> None:
        faults = {
            "missing": (404, "RepoNotFound"),
            "denied": (401, "RepoNotFound"),
            "gated": (403, "GatedRepo"),
            "busy": (503, ""),
        }
        if self.hub.fault in faults:
            status, code = faults[self.hub.fault]
            return self._answer(status, code=code)
        revision = path.rsplit("/", 1)[1] if path.count("/") > 4 else "main"
        commit = self.hub.branch if revision == "main" else revision
        if commit not in self.hub.commits:
            return self._answer(404, code="RevisionNotFound")
        files = self.hub.commits[commit]
        if "/tree/" in path:
            rows: Any = [
                {"type": "file", "path": name, "size": len(body), "oid": _digest(body)}
                for name, body in files.items()
            ]
        else:
            rows = {"id": REPO, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        return self._answer(200, json.dumps(rows).encode())

    def _file(self, revision: str, name: str) -> None:
        commit = self.hub.branch if revision == "main" else revision
        body = self.hub.commits[commit].get(name)
        if body is None:
            return self._answer(404, code="EntryNotFound")
        if self.command == "GET":
            self.hub.asked.append(name)
        headers = {"ETag": f'"{_digest(body)}"', "X-Repo-Commit": commit}
        is_weight = name.endswith(".safetensors")
        if self.command == "GET" and is_weight and self.hub.fault == "busy file":
            return self._answer(503)
        if self.command == "GET" and is_weight and self.hub.fault == "changed":
            body = body[:-1] + bytes([body[-1] ^ 1])
        is_cut = self.command == "GET" and is_weight and self.hub.fault == "cut"
        return self._answer(200, body, headers=headers, is_cut=is_cut)

    def _answer(
        self,
        status: int,
        body: bytes = b"",
        *,
        code: str = "",
        headers: dict[str, str] | None = None,
        is_cut: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if is_cut else body)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """The tests read ``asked``."""


def _digest(body: bytes) -> str:
    """As the hub does for large files."""
    return hashlib.sha256(body).hexdigest()
