"""A client asks again where a connection is gone, since servers close those that nobody uses."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import socket

import numpy as np
import pytest

from megatron_rl.engine.serving.client import (
    RequestFailedError,
    ServerClient,
    ServerLostError,
    ServerUnreachableError,
)
from megatron_rl.types import Completion, Prompt, Sampling

ANSWER = {
    "choices": [
        {
            "finish_reason": "stop",
            "token_ids": [3],
            "logprobs": {"content": [{"token_id": 3, "logprob": -0.5}]},
            "weight_versions": [{"version": "4", "end": 1}],
        }
    ]
}


async def request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    await reader.readexactly(int(length.split(b":")[1]))


def asked(
    num_answers: list[int],
    times: int,
    status: str = "200 OK",
    answer: object = ANSWER,
    expert_width: int = 0,
) -> tuple[list[Completion], int]:
    """Asks a server ``times``, whose n-th connection ends, without a word, instead of giving more
    than ``num_answers[n]`` answers; returns the answers, and how many connections there were."""
    left = list(num_answers)
    text = json.dumps(answer).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n".encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client has closed it
            for _ in range(left.pop(0)):
                await request(reader)
                writer.write(head + text)
                await writer.drain()
            await request(reader)
        writer.close()

    async def run() -> list[Completion]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        client = ServerClient(f"http://{host}:{port}", "secret", [1])
        prompt = Prompt("a", (5, 6), answer="b", data_source="c")
        sampling = Sampling(1, 8, seed=1, expert_width=expert_width)
        try:
            return [await client.generate(prompt, sampling, 0) for _ in range(times)]
        finally:
            await client.close()
            server.close()

    return asyncio.run(run()), len(num_answers) - len(left)


def test_a_connection_that_the_server_has_closed_costs_no_request():
    answers, connections = asked([1, 2], times=3)
    assert [list(answer.token_ids) for answer in answers] == [[3]] * 3
    assert connections == 2


def test_a_server_that_drops_every_request_is_lost():
    with pytest.raises(ServerLostError, match="no answer") as caught:
        asked([0, 0, 0, 0], times=1)
    assert caught.type is ServerLostError, "it was at work"


def test_an_error_of_a_server_and_a_request_that_it_drops_may_be_the_requests() -> None:
    with pytest.raises(RequestFailedError, match=r"answers 500.*out of memory"):
        asked([1], times=1, status="500 Internal Server Error", answer="out of memory")
    (choice,) = ANSWER["choices"]
    dropped = {"choices": [{**choice, "finish_reason": "abort"}]}
    with pytest.raises(RequestFailedError, match="dropped a request to prompt a"):
        asked([1], times=1, answer=dropped)


def test_where_nobody_listens_no_request_arrives() -> None:
    async def run() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            client = ServerClient(f"http://127.0.0.1:{unused.getsockname()[1]}", "secret", [1])
            try:
                await client.score([1, 2])
            finally:
                await client.close()

    with pytest.raises(ServerUnreachableError, match="no connection"):
        asyncio.run(run())


def test_who_waits_for_a_server_that_is_given_up_meanwhile_is_told_so() -> None:
    """Its client is closed: nobody asks it a second time."""

    async def run() -> None:
        is_asked = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request(reader)
            is_asked.set()
            await reader.read()  # it never answers
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        client = ServerClient(f"http://{host}:{port}", "secret", [1])
        score = asyncio.create_task(client.score([1, 2]))
        await is_asked.wait()
        await client.close()
        try:
            await asyncio.wait_for(score, 30.0)
        finally:
            server.close()

    with pytest.raises(ServerLostError):
        asyncio.run(run())


def with_experts(text: str | None) -> dict:
    (choice,) = ANSWER["choices"]
    return {"choices": [{**choice, "routed_experts": text}]}


def test_experts_come_with_a_response() -> None:
    """Of the two tokens of the prompt, one layer: the token that ends it was no input."""
    file = io.BytesIO()
    np.save(file, np.array([[[3, 1]], [[0, 2]]], np.uint8))
    answer = with_experts(base64.b64encode(file.getvalue()).decode())
    ((found,), _) = asked([1], times=1, answer=answer, expert_width=2)
    assert found.experts is not None
    assert found.experts.tolist() == [[3, 1], [0, 2], [255, 255]]
    ((plain,), _) = asked([1], times=1, answer=answer)
    assert plain.experts is None


@pytest.mark.parametrize("text", ["no base64", base64.b64encode(b"no array").decode()])
def test_experts_that_cannot_be_read_lose_the_server(text: str) -> None:
    with pytest.raises(ServerLostError, match="gave experts that cannot be read"):
        asked([1], times=1, answer=with_experts(text), expert_width=2)


def test_a_server_that_returns_none_is_noticed_at_its_first_answer() -> None:
    with pytest.raises(RuntimeError, match="vLLM returned no experts"):
        asked([1], times=1, expert_width=2)
