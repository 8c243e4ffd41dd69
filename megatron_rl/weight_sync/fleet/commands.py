"""Commands to a vLLM server over HTTP."""

import json
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any, Literal
from urllib.parse import urlencode, urlsplit

InFlight = Literal["wait", "abort", "keep"]
_CONNECTIONS = {"http": HTTPConnection, "https": HTTPSConnection}
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

    def call(
        self, path: str, body: Mapping[str, Any] | None = None, method: str = "POST", **query: Any
    ) -> Any:
        """The parsed answer. Raises ConnectionError with what is wrong and what to do."""
        url = f"{self.url}/{path}" + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        connection = self._connected(f"{method} {url}")
        try:
            connection.request(method, url.partition(urlsplit(url).netloc)[2], data, self.headers)
            answer = connection.getresponse()
            if answer.status == 200:
                return json.loads(answer.read() or b"null")  # most commands answer with nothing
            problem = (
                f"the server answers {answer.status} {answer.reason}: {_words(answer)}"
                f"{_REMEDIES.get(answer.status, '')}"
            )
        except (OSError, ValueError, HTTPException) as error:
            raise ConnectionError(
                f"{method} {url}: no answer from a vLLM server ({error}); is it up, and the address"
                " right?"
            ) from error
        finally:
            connection.close()
        raise ConnectionError(f"{method} {url}: {problem}")

    def _connected(self, what: str) -> HTTPConnection:
        """A connection through no proxy: the weights go to this address directly, so the commands
        can. It is there soon or not at all; ``timeout_s`` is for the answer."""
        url = urlsplit(self.url)
        if url.scheme not in _CONNECTIONS:
            raise ConnectionError(
                f"{self.url}: the address of a server begins with http:// or https://"
            )
        limit_s = min(CONNECT_S, self.timeout_s)
        try:
            connection = _CONNECTIONS[url.scheme](url.netloc, timeout=limit_s)
            connection.connect()
        except (OSError, HTTPException) as error:
            raise NotReachedError(
                f"{what}: no server is reached, no connection within {limit_s:g} s ({error}); is it"
                " up, and the address right?"
            ) from error
        connection.sock.settimeout(self.timeout_s)
        return connection

    def address(self) -> str:
        """The address of this machine, as the server sees it."""
        connection = self._connected(self.url)
        try:
            return connection.sock.getsockname()[0]
        finally:
            connection.close()

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
        """Schedules nothing until ``resume``; requests under way are awaited, aborted or kept."""
        self.call("pause", mode=in_flight)

    def resume(self) -> None:
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


def _words(answer: HTTPResponse) -> str:
    """What the server says of it. One that ends at this moment says less, or nothing."""
    try:
        text = answer.read()
    except IncompleteRead as cut:
        text = cut.partial
    except (OSError, HTTPException) as cut:
        text = f"({cut})".encode()
    return text.decode(errors="replace")[:_SHOWN]
