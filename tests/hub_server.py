"""A local Hugging Face hub with one model, and the faults that one meets."""

from __future__ import annotations

import base64
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
        pushed: files that were uploaded to a repository, by their names there, and its visibility.
        tokens: what the uploads said who they are.
    """

    commits: dict[str, dict[str, bytes]]
    branch: str = COMMIT
    fault: str = ""
    url: str = ""
    asked: list[str] = field(default_factory=list)
    pushed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    visibility: dict[str, str] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)


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

    def do_POST(self) -> None:
        """What an upload asks, in the order in which it does."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub = self.hub
        self.close_connection = True
        statuses = {"denied": 401, "missing": 404, "busy": 503}
        if hub.fault in statuses:
            return self._answer(statuses[hub.fault])
        hub.tokens.add(self.headers["Authorization"] or "")
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            exists = repo in hub.pushed
            hub.pushed.setdefault(repo, {})
            hub.visibility.setdefault(repo, asked["visibility"])
            about = {"url": f"{hub.url}/{repo}", "name": repo}
            return self._answer(409 if exists else 200, json.dumps(about).encode())
        if self.path == "/api/validate-yaml":
            return self._answer(200, b'{"errors": [], "warnings": []}')
        if self.path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{hub.url}/large/{one['oid']}"}}
            answer = json.dumps({"objects": objects}).encode()
            return self._answer(200, answer, is_cut=hub.fault == "cut")
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            for file in files:
                is_large = file["path"].endswith(".safetensors")
                file |= {"uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
            return self._answer(200, json.dumps({"files": files}).encode())
        if "/commit/" in self.path:
            repo = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in body.splitlines():
                row = json.loads(line)
                value = row["value"]
                if row["key"] == "file":
                    hub.pushed[repo][value["path"]] = base64.b64decode(value["content"])
                if row["key"] == "lfsFile":
                    hub.pushed[repo][value["path"]] = hub.large[value["oid"]]
            about = {"commitUrl": f"{hub.url}/{repo}/commit/{COMMIT}", "commitOid": COMMIT}
            return self._answer(200, json.dumps(about).encode())
        return self._answer(404)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.hub.fault == "busy file":
            return self._answer(503)
        name = self.path.removeprefix("/large/")
        if self.hub.fault == "changed":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if _digest(body) != name:
            return self._answer(422, b"other bytes than announced")
        self.hub.large[name] = body
        return self._answer(200)

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
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if is_cut else body)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """The tests read ``asked``."""


def _digest(body: bytes) -> str:
    """As the hub does for large files."""
    return hashlib.sha256(body).hexdigest()
