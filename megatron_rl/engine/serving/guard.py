r"""A vLLM server that answers its own run alone.

vLLM requires its API key (VLLM_API_KEY) before it generates, but its commands to pause, to take
weights or to run a function in its workers are open. This closes them, with the same key::

    python -m vllm.entrypoints.openai.api_server \
        --middleware megatron_rl.engine.serving.guard.RequireSecret
"""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm import envs

_Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
_Send = Callable[[Message], Awaitable[None]]
_App = Callable[[_Scope, Callable[[], Awaitable[Message]], _Send], Awaitable[None]]


class RequireSecret:
    """ASGI middleware: without ``Authorization: Bearer <VLLM_API_KEY>`` every path gives 401."""

    def __init__(self, app: _App) -> None:
        """Raises ValueError where there is no key."""
        if not envs.VLLM_API_KEY:
            raise ValueError(
                "megatron_rl.engine.serving.guard: set VLLM_API_KEY to the secret of the run"
            )
        self._app = app
        self._expected = f"Bearer {envs.VLLM_API_KEY}".encode()

    async def __call__(
        self, scope: _Scope, receive: Callable[[], Awaitable[Message]], send: _Send
    ) -> None:
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
