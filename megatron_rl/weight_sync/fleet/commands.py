"""Commands to a vLLM server over HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
)
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, ProxyHandler, Request, build_opener

InFlight = Literal["wait", "abort", "keep"]
_PORTS = {"http": 80, "https": 443}
# A machine without power does not even refuse a connection. A running one takes it at once, however
# long its command then takes.
CONNECT_S = 10.0
_SHOWN = 1000  # characters of an error
_REMEDIES = {
    401: "; it was started with another secret than that of this run",
    404: "; start the server with VLLM_SERVER_DEV_MODE=1 in its environment",
}


class NotReachedError(ConnectionError):
    """There is no connection to the server, so it has received nothing."""


class HttpServer:
    """Commands to an OpenAI server of vLLM that was started with VLLM_SERVER_DEV_MODE=1 and
    ``--weight-transfer-config '{"backend": "megatron_rl"}'``.

    Each command returns when it is carried out. It raises ConnectionError when it is not, and
    NotReachedError when the server cannot have received it.
    """

    def __init__(self, url: str, timeout_s: float = 300.0, secret: str = "") -> None:
        """``url``: such as http://127.0.0.1:8000. ``timeout_s``: for one command, and for requests
        under way to end; a connection must be there within CONNECT_S. ``secret``: of the run, which
        the server was started with."""
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.headers = {"Content-Type": "application/json"}
        if secret:
            self.headers["Authorization"] = f"Bearer {secret}"
        # Through no proxy: the weights go to this address directly, so the commands can.
        self.opener = build_opener(ProxyHandler({}), _Plain(), _Encrypted())

    def call(
        self, path: str, body: Mapping[str, Any] | None = None, method: str = "POST", **query: Any
    ) -> Any:
        """The answer of the server, parsed. Raises ConnectionError with what is wrong and what to
        do."""
        url = f"{self.url}/{path}"
        if query:
            url += f"?{urlencode(query)}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(url, data, self.headers, method=method)
            with self.opener.open(request, timeout=self.timeout_s) as answer:
                return json.loads(answer.read() or b"null")  # most commands answer with nothing
        except HTTPError as error:
            remedy = _REMEDIES.get(error.code, "")
            raise ConnectionError(
                f"{method} {url}: the server answers {error.code} {error.reason}:"
                f" {_words(error)}{remedy}"
            ) from error
        except (OSError, ValueError, HTTPException) as error:
            kind = ConnectionError
            if isinstance(error, URLError) and isinstance(error.reason, NotReachedError):
                kind = NotReachedError
            raise kind(
                f"{method} {url}: no answer from a vLLM server ({error}); is it up, and the address"
                " right?"
            ) from error

    def address(self) -> str:
        """The address of this machine, as the server sees it."""
        try:
            url = urlsplit(self.url)
            address = (url.hostname, url.port or _PORTS[url.scheme])
            limit_s = min(CONNECT_S, self.timeout_s)
            with socket.create_connection(address, timeout=limit_s) as connection:
                return connection.getsockname()[0]
        except KeyError as error:
            raise ConnectionError(
                f"{self.url}: the address of a server begins with http:// or https://"
            ) from error
        except (OSError, ValueError) as error:
            raise NotReachedError(
                f"{self.url}: no server is reached ({error}); is it up, and the address right?"
            ) from error

    def num_workers(self) -> int:
        """Workers of all replicas of the server."""
        answer = self.call("get_world_size", method="GET")
        if not isinstance(answer, dict) or "world_size" not in answer:
            raise ConnectionError(
                f"GET {self.url}/get_world_size: no answer of a vLLM server ({answer}); is the"
                " address right?"
            )
        return answer["world_size"]

    def pause(self, in_flight: InFlight) -> None:
        """No request is scheduled until ``resume``. Requests under way are waited for, aborted, or
        kept for later."""
        self.call("pause", mode=in_flight)

    def resume(self) -> None:
        """Schedules requests again."""
        self.call("resume")

    def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Every worker calls ``init_transfer_engine`` of its backend."""
        self.call("init_weight_transfer_engine", {"init_info": info})

    def update(self, info: Mapping[str, Any]) -> None:
        """Every worker takes part in one update."""
        self.call("start_weight_update")
        self.call("update_weights", {"update_info": info})

    def stage(self, info: Mapping[str, Any]) -> None:
        """Every worker begins to take part in an update that touches no weights in use, while
        requests are answered; it may not be over when this returns."""
        self.update({**info, "kind": "stage"})
        # vLLM's part is over; the update continues in threads of the workers.
        self.call("finish_weight_update")

    def switch(self, version: int) -> None:
        """Every worker puts staged weights in the place of the old ones, while the server is
        paused; ``finish`` has to follow."""
        self.update({"step": "", "version": version, "kind": "switch"})

    def alive(self) -> None:
        """Raises ConnectionError where the server is not healthy."""
        self.call("health", method="GET")

    def cancel(self) -> None:
        """Ends an update that was refused."""
        # vLLM has no command that cancels. An update that is finished without a version keeps the
        # old one, and the next may start.
        self.call("finish_weight_update")

    def finish(self, version: int) -> None:
        """Drops all keys and values computed with the old weights, those of a KV connector too, and
        sets the version of the weights."""
        self.call("finish_weight_update", {"weight_version": str(version)})
        # Requests that were kept are computed again from their first token, with the new weights.
        answer = self.call(
            "reset_prefix_cache", reset_running_requests="true", reset_external="true"
        )
        if not isinstance(answer, dict) or not answer.get("success"):
            raise ConnectionError(f"{self.url}: the server did not drop its prefix cache")
        # Features of images that the old tower made; no running request holds any now.
        self.call("reset_encoder_cache")


def switch_weights(server: HttpServer, version: int, in_flight: InFlight) -> None:
    """Makes a server whose workers have all of ``version`` staged continue with it. Raises
    ConnectionError where it does not."""
    server.pause(in_flight)
    server.switch(version)
    server.finish(version)
    server.resume()


def _words(error: HTTPError) -> str:
    """What the server says of it. One that ends at this moment says less, or nothing."""
    try:
        text = error.read()
    except IncompleteRead as cut:
        text = cut.partial
    except (OSError, HTTPException) as cut:
        text = f"({cut})".encode()
    return text.decode(errors="replace")[:_SHOWN]


class _QuickToConnect(HTTPConnection):
    """``timeout`` is for the answer; the connection is there sooner or not at all."""

    def connect(self) -> None:
        limit_s = self.timeout
        self.timeout = CONNECT_S if limit_s is None else min(CONNECT_S, limit_s)
        try:
            super().connect()
        except OSError as error:
            raise NotReachedError(f"no connection within {self.timeout:g} s: {error}") from error
        self.sock.settimeout(limit_s)


class _QuickToConnectEncrypted(_QuickToConnect, HTTPSConnection):
    """The same for https: its handshake is part of the connection."""


class _Plain(HTTPHandler):
    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_QuickToConnect, req)


class _Encrypted(HTTPSHandler):
    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_QuickToConnectEncrypted, req)
