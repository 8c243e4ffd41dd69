r"""A vLLM server that answers its own run alone.

vLLM requires its API key (VLLM_API_KEY) before it generates, but its commands to pause, to take
weights or to run a function in its workers are open. This closes them, with the same key::

    python -m vllm.entrypoints.openai.api_server \
        --middleware megatron_rl.engine.serving.guard.RequireSecret
"""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send  # by vLLM, as its server is made of it
from vllm import envs


class RequireSecret:
    """ASGI middleware: without ``Authorization: Bearer <VLLM_API_KEY>`` every path gives 401."""

    def __init__(self, app: ASGIApp) -> None:
        """Raises ValueError where there is no key."""
        if not envs.VLLM_API_KEY:
            raise ValueError(
                "megatron_rl.engine.serving.guard: set VLLM_API_KEY to the secret of the run"
            )
        self._app = app
        self._expected = f"Bearer {envs.VLLM_API_KEY}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] in ("http", "websocket")  # else one of the server's own start
        given = dict(scope["headers"]).get(b"authorization", b"") if is_request else b""
        if not is_request or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
