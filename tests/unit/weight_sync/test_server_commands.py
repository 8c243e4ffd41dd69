"""Commands to a server over HTTP: what is said when one is not carried out, and how long a server
is waited for that is not there."""

import contextlib
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from megatron_rl.types import TransferOptions
from megatron_rl.weight_sync.fleet import commands
from megatron_rl.weight_sync.fleet.commands import HttpServer, NotReachedError, switch_weights
from megatron_rl.weight_sync.fleet.controller import FleetController


@pytest.fixture
def answering():
    """The address of a server that answers every request alike."""

    class Handler(BaseHTTPRequestHandler):
        status, body, paths_asked = 200, b"{}", []
        length = None  # of the body, as it says
        hold = threading.Event()  # until then the connection stays open
        hold.set()

        def do_GET(self):
            self.do_POST()

        def do_POST(self):
            Handler.paths_asked.append(self.path)
            if self.status is None:
                self.wfile.write(b"SSH-2.0\r\n")
                return
            self.send_response(self.status)
            if self.length is not None:
                self.send_header("Content-Length", str(self.length))
            self.end_headers()
            self.wfile.write(self.body)
            self.wfile.flush()
            self.hold.wait(30.0)

        def log_message(self, *_): ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    yield Handler, HttpServer(f"http://127.0.0.1:{server.server_port}", timeout_s=5)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"", "pause.*404.*VLLM_SERVER_DEV_MODE=1"),
        (500, b"the engine is dead", "pause.*500.*the engine is dead"),
        (200, b"<html>", "no answer from a vLLM server"),
        (None, b"", "no answer from a vLLM server"),
    ],
)
def test_a_command_that_is_not_carried_out_says_why(answering, status, body, words):
    handler, server = answering
    server.pause("wait")
    handler.status, handler.body = status, body
    with pytest.raises(ConnectionError, match=words):
        server.pause("wait")


def test_a_server_that_ends_within_the_words_of_its_error_is_lost_like_any_other(answering):
    """What it says is cut off, or never comes."""
    handler, server = answering
    handler.status, handler.length = 500, 100
    handler.body = b"the engine is"
    with pytest.raises(ConnectionError, match=r"pause.*500.*the engine is"):
        server.pause("wait")
    handler.hold.clear()
    server.timeout_s = 0.2
    try:
        with pytest.raises(ConnectionError, match=r"pause.*500"):
            server.pause("wait")
    finally:
        handler.hold.set()


@pytest.fixture
def without_power():
    """The address of a machine that answers nothing, not even that nobody listens there: its queue
    of connections is full."""
    with contextlib.ExitStack() as sockets:
        listening = sockets.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_machine_without_power_is_called_once_and_not_waited_for(without_power, monkeypatch):
    """Its command could take a minute; the connection must be there long before."""
    monkeypatch.setattr(commands, "CONNECT_S", 0.2)
    server = HttpServer(without_power, timeout_s=60)
    calls, call = [], server.call
    server.call = lambda path, *args, **query: calls.append(path) or call(path, *args, **query)
    lost = FleetController({"a": server}, TransferOptions(), "", "keep").begin(staged=False)
    assert re.search(r"/pause\?mode=keep: .*no connection within 0.2 s", lost["a"])
    with pytest.raises(NotReachedError, match="no server is reached"):
        server.address()
    assert calls == ["pause"], "what it has not heard of is not taken back"


def test_another_server_and_a_proxy_are_no_vllm_server(answering, monkeypatch):
    handler, server = answering
    with pytest.raises(ConnectionError, match="get_world_size: no answer of a vLLM server"):
        server.num_workers()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    handler.body = b'{"world_size": 3}'
    assert HttpServer(server.url, timeout_s=5).num_workers() == 3


def test_old_caches_are_dropped_and_a_kept_one_is_an_error(answering):
    handler, server = answering
    handler.body = b'{"success": true}'
    server.finish(1)
    assert handler.paths_asked[1:] == [
        "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
        "/reset_encoder_cache",
    ]
    handler.body = b'{"success": false}'
    with pytest.raises(ConnectionError, match="prefix cache"):
        server.finish(1)


def test_weights_are_staged_without_a_pause_and_the_switch_is_paused(answering):
    handler, server = answering
    handler.body = b'{"success": true}'
    handler.paths_asked.clear()
    server.stage({"step": "sync1", "version": 1})
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert handler.paths_asked == update
    handler.paths_asked.clear()
    switch_weights(server, 1, "keep")
    resets = handler.paths_asked[4:-1]
    assert handler.paths_asked == ["/pause?mode=keep", *update, *resets, "/resume"]
    assert [path.split("?")[0] for path in resets] == [
        "/reset_prefix_cache",
        "/reset_encoder_cache",
    ]
