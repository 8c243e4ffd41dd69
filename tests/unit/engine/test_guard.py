"""A server that answers nobody but its own run, whatever is asked."""

import asyncio

import pytest

from megatron_rl.engine.serving.guard import RequireSecret

SECRET = "known to this run"


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


def answer(headers, kind="http", path="/pause"):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": headers}
    asyncio.run(RequireSecret(app)(scope, None, send))
    return sent[0]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", SECRET)


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/health", "/inference/v1/generate"])
def test_only_who_knows_the_secret_is_answered(path):
    bearer = f"Bearer {SECRET}".encode()
    assert answer([(b"authorization", bearer)], path=path)["status"] == 200
    for wrong in ([], [(b"authorization", b"Bearer x")], [(b"authorization", bearer + b"x")]):
        assert answer(wrong, path=path)["status"] == 401
    assert answer([(b"x-authorization", bearer)])["status"] == 401


def test_a_web_socket_is_closed_and_the_start_of_the_server_passes():
    assert answer([], kind="websocket") == {"type": "websocket.close", "code": 1008}
    assert answer([], kind="lifespan")["status"] == 200


def test_a_server_without_a_secret_does_not_start(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(ValueError, match="set VLLM_API_KEY"):
        RequireSecret(app)
