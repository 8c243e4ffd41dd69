"""Requests to a vLLM server: token ids in; sampled token ids, their logprobs and the versions of
the weights out.

The endpoint is vLLM's own ``/inference/v1/generate`` (``--enable-scale-out``). A request says all
that its answer follows from, so it may be sent to another server when one is lost.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import aiohttp
import numpy as np

from megatron_rl.engine.request_tracking import with_places
from megatron_rl.engine.requests import MultimodalConfig, check_expansion, served_request
from megatron_rl.engine.routed_experts import Experts, TokensOf, packed_rows
from megatron_rl.engine.sampling import SCORING, extra_args, request_seed, sampling_values
from megatron_rl.runtime.plain_data import MalformedMessageError, decoded
from megatron_rl.types import Completion, Image, Prompt, Sampling, VersionSpan

_UNKNOWN_VERSION = -1
_NO_LOGPROB = -9999.0  # what a server sends for -inf, which JSON has not
_ENDS = ("stop", "length")
_SHOWN = 500  # characters of a refusal
# Idle connections are closed here before a server does it: vLLM's after 5 s. A request on one that
# is closed from the other side at that moment would be lost.
_KEPT_S = 2.0


class ServerLostError(ConnectionError):
    """A server did not answer a request; another one may."""


class ServerUnreachableError(ServerLostError):
    """There is no connection to the server, for any request."""


class RequestFailedError(ServerLostError):
    """A server that is still running has failed at this request."""


@dataclass(frozen=True)
class _TokenLogprob:
    logprob: float
    token_id: int = -1  # of a prompt's tokens it is the key
    top_logprobs: list[_TokenLogprob] = field(default_factory=list)  # of a sampled token


@dataclass(frozen=True)
class _ChoiceLogprobs:
    content: list[_TokenLogprob]


@dataclass(frozen=True)
class _Span:
    version: str
    end: int


@dataclass(frozen=True)
class _Choice:
    """A response, or a part of one that is streamed; only the last part has the versions."""

    logprobs: _ChoiceLogprobs
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None  # an .npy file in base64


@dataclass(frozen=True)
class _Generated:
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


@dataclass(frozen=True)
class _ScoredPrompt:
    prompt_logprobs: list[dict[str, _TokenLogprob] | None]


class ServerClient:
    """One server, for the event loop in which it is constructed."""

    def __init__(
        self,
        url: str,
        secret: str,
        eos_token_ids: Sequence[int],
        multimodal: MultimodalConfig | None = None,
    ) -> None:
        """``secret``: of the run; ``eos_token_ids``: of the model; ``multimodal``: None where no
        prompt has images."""
        self._multimodal = multimodal
        self.url = url.rstrip("/")
        self._endpoint = f"{self.url}/inference/v1/generate"
        self._eos_token_ids = eos_token_ids
        # No limit of connections or of time: the server queues requests, and a long response may
        # take an hour; who waits for a server that is gone cancels. No proxy from the environment.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Authorization": f"Bearer {secret}"},
            trust_env=False,
        )

    async def generate(
        self, prompt: Prompt, sampling: Sampling, response: int, so_far: Sequence[int] = ()
    ) -> Completion:
        """Response number ``response`` to the prompt: that of ``VllmEngine.generate`` with the same
        ``sampling`` and the same weights, token for token. ``sampling.num_responses`` does not
        matter here, its limit is that of the whole response: of what follows ``so_far``, which is
        returned alone. Cancelled, the server drops the request too.

        Raises:
            ServerLostError: no answer, or none that can be read.
            ServerUnreachableError: there is no connection.
            RequestFailedError: an error of the server (5xx), or it dropped the request.
            ValueError: the server refuses it, as any other would.
            RuntimeError: it read other tokens for the images.
        """
        what = f"prompt {prompt.uid}"
        body = self._request(prompt, sampling, response, so_far)
        answer: _Generated = await self._post(body, _Generated, what)
        if prompt.images:
            asked = (*prompt.token_ids, *so_far)
            check_expansion(asked, answer.prompt_token_ids or (), what)
        (choice,) = answer.choices
        if choice.finish_reason not in _ENDS:
            raise RequestFailedError(
                f"{self.url}: dropped a request to prompt {prompt.uid} ({choice.finish_reason})"
            )
        completion = _with_places(_completion(self.url, choice), choice, sampling, what)
        if not sampling.expert_width:
            return completion
        num_tokens = len(prompt.token_ids) + len(completion.token_ids)
        tokens = TokensOf(num_tokens, sampling.expert_width, what)
        return replace(completion, experts=packed_rows(_experts(self.url, choice), tokens))

    async def generate_until(
        self,
        prompt: Prompt,
        sampling: Sampling,
        response: int,
        so_far: Sequence[int],
        is_enough: Callable[[int], bool],
    ) -> tuple[Completion, bool]:
        """``generate`` that continues behind the tokens ``so_far`` and looks at every new one:
        returns what is new as soon as ``is_enough`` of its number, and whether that ended it. Its
        limit is that of the whole response. Raises as ``generate`` does."""
        what = f"prompt {prompt.uid}"
        body = {**self._request(prompt, sampling, response, so_far), "stream": True}
        token_ids: list[int] = []
        logprobs: list[float] = []
        with _no_answer(self._endpoint):
            async with self._session.post(self._endpoint, json=body) as answer:
                if answer.status != 200:
                    self._refuse(answer.status, await answer.read(), what)
                async for line in answer.content:
                    text = line.removeprefix(b"data: ").strip()
                    if not line.startswith(b"data: ") or text == b"[DONE]":
                        continue
                    part: _Generated = decoded(text, _Generated, self._endpoint)
                    (choice,) = part.choices
                    token_ids += choice.token_ids or []
                    logprobs += [one.logprob for one in choice.logprobs.content]
                    if choice.finish_reason in _ENDS:
                        content = _ChoiceLogprobs(list(map(_TokenLogprob, logprobs, token_ids)))
                        whole = replace(choice, token_ids=token_ids, logprobs=content)
                        return _completion(self.url, whole), False
                    if choice.finish_reason is not None:
                        break
                    if is_enough(len(token_ids)):
                        # Which weights: only a final part says it. In lockstep they are known.
                        return Completion(token_ids, logprobs, False, _UNKNOWN_VERSION), True
        raise RequestFailedError(f"{self.url}: dropped a request to prompt {prompt.uid}")

    def _request(
        self, prompt: Prompt, sampling: Sampling, response: int, so_far: Sequence[int]
    ) -> dict[str, Any]:
        assert sampling.seed is not None, "without a seed no other server could answer alike"
        seed = request_seed(sampling.seed, prompt.uid) + response
        left = replace(sampling, max_response_tokens=sampling.max_response_tokens - len(so_far))
        values = sampling_values(left, seed, self._eos_token_ids)
        extra = extra_args(sampling, len(so_far))
        if extra is not None:
            values["extra_args"] = extra
        what = f"prompt {prompt.uid}"
        asked = served_request(prompt.token_ids, prompt.images, self._multimodal, what)
        asked["token_ids"] += so_far  # an image token that was sampled is none of an image
        return {**asked, "sampling_params": values}

    async def score(self, token_ids: Sequence[int], images: Sequence[Image] = ()) -> list[float]:
        """Logprob at temperature 1 of every token but the first, which follows nothing. Raises as
        ``generate`` does."""
        asked = served_request(token_ids, images, self._multimodal, "score")
        body = {**asked, "sampling_params": SCORING}
        answer: _ScoredPrompt = await self._post(body, _ScoredPrompt, "score")
        by_token = answer.prompt_logprobs[1:]
        return [
            scores[str(token)].logprob
            for token, scores in zip(token_ids[1:], by_token, strict=True)
            if scores is not None
        ]

    async def close(self) -> None:
        """Ends its connections, and with them the requests under way."""
        await self._session.close()

    async def _post(self, body: Mapping[str, Any], schema: Any, what: str) -> Any:
        with _no_answer(self._endpoint):
            try:
                status, text = await self._posted(body)
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                if self._session.closed:  # the answer of this server is not needed any more
                    raise
                # The server may have closed a kept connection when the request was on its way.
                status, text = await self._posted(body)
            if status != 200:
                self._refuse(status, text, what)
            return decoded(text, schema, self._endpoint)

    def _refuse(self, status: int, text: bytes, what: str) -> NoReturn:
        shown = text.decode(errors="replace")[:_SHOWN]
        if status in (400, 422):
            raise ValueError(f"{what}: the server {self.url} refuses it: {shown}")
        kind = RequestFailedError if status >= 500 else ServerLostError
        raise kind(f"{self._endpoint}: answers {status}: {shown}")

    async def _posted(self, body: Mapping[str, Any]) -> tuple[int, bytes]:
        async with self._session.post(self._endpoint, json=body) as answer:
            return answer.status, await answer.read()


@contextmanager
def _no_answer(url: str) -> Iterator[None]:
    """Raises ServerLostError for what is no answer that can be read."""
    try:
        yield
    except ServerLostError:
        raise
    except aiohttp.ClientConnectorError as error:
        raise ServerUnreachableError(f"{url}: no connection ({error})") from error
    except MalformedMessageError as error:
        raise ServerLostError(str(error)) from error
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise ServerLostError(f"{url}: no answer ({type(error).__name__}: {error})") from error


def _with_places(
    completion: Completion, choice: _Choice, sampling: Sampling, what: str
) -> Completion:
    """Raises RuntimeError as ``kept_tokens`` does."""
    content = choice.logprobs.content
    if not (sampling.num_kept or sampling.num_likely) or not content:
        return completion
    # The sampled token comes once more among the most likely ones.
    rows = [(token, *token.top_logprobs) for token in content]
    ids = np.array([[each.token_id for each in row] for row in rows], dtype=np.int32)
    logprobs = np.array([[each.logprob for each in row] for row in rows])
    logprobs[logprobs <= _NO_LOGPROB] = -np.inf
    return with_places(completion, ids, logprobs, sampling.num_likely, what)


def _experts(url: str, choice: _Choice) -> Experts | None:
    """Raises ServerLostError for what is no array."""
    text = choice.routed_experts
    if text is None:
        return None
    try:
        return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ServerLostError(f"{url}: gave experts that cannot be read ({error})") from error


def _completion(url: str, choice: _Choice) -> Completion:
    """Raises ServerLostError where the server samples with weights that no trainer has sent."""
    token_ids = choice.token_ids or []
    content = choice.logprobs.content
    if [token.token_id for token in content] != token_ids:
        raise ServerLostError(f"{url}: gave other logprobs than those of the sampled tokens")
    spans = choice.weight_versions or []
    versions = [span.version for span in spans]
    if not versions or not all(version.isdecimal() for version in versions):
        raise ServerLostError(f"{url}: samples with weights {versions}, which are of no version")
    return Completion(
        token_ids,
        [token.logprob for token in content],
        truncated=choice.finish_reason == "length",
        weight_version=int(versions[0]),
        spans=tuple(VersionSpan(int(span.version), span.end) for span in spans),
    )
