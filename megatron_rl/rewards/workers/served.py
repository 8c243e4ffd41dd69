"""Rewards from a server: a judge that writes a score, or a reward model (``reward.server``).

They run as a reward function does, in a process of their own beside each rank, so that requests are
under way while responses are generated.
"""

import asyncio
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import aiohttp

from megatron_rl.config.sections import RewardServerConfig
from megatron_rl.errors import concerning, first_line
from megatron_rl.rewards.base import Task

_FIRST_WAIT_S = 0.5
_MOST_CACHED = 100_000
_CHECK_S = 10.0

Reward = dict[str, float]


class ServerError(RuntimeError):
    """A request has got no reward; the message says why."""


class ServedReward:
    """A reward function (``rewards.function``) whose values a server gives.

    Of equal texts one is asked, unless the judge samples. The parts of a reward count what it cost:
    ``server_tokens`` of prompt and answer, ``server_tries``, and ``server_cached``, 1 where no
    request was sent.
    """

    def __init__(self, config: RewardServerConfig, limit_s: float) -> None:
        """``limit_s``: of a call; responses that have no reward by nine tenths of it get none, so
        that the others keep theirs."""
        self._config = config
        self._limit_s = 0.9 * limit_s
        self._asked: dict[str, asyncio.Task[Reward]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(config.concurrent_requests)

    async def check(self) -> None:
        """Asks for the models that the server has.

        Raises:
            ValueError: no answer, no access, or another model.
        """
        config = self._config
        key = config.api_key_variable
        if key is not None and not os.environ.get(key):
            raise ValueError(
                f"reward.server.api_key_variable = {key}: no such variable here; set it"
            )
        subject = f"reward.server.url = {config.url}: no list of models at /v1/models"
        remedy = "start the server (vllm serve MODEL), or correct the address"
        with concerning(subject, remedy):
            limit = aiohttp.ClientTimeout(total=_CHECK_S)
            async with self._client().get(f"{config.url}/v1/models", timeout=limit) as answer:
                answer.raise_for_status()
                names = [model["id"] for model in (await answer.json())["data"]]
        if config.model not in names:
            raise ValueError(
                f"reward.server.model = {config.model}: the server has {', '.join(names)}; give one"
                " of these"
            )

    async def __call__(
        self, tasks: Sequence[Task], responses: Sequence[str]
    ) -> list[Reward | BaseException]:
        """A reward, or why there is none, for each response, in their order."""

        async def in_time(task: Task, response: str) -> Reward:
            try:
                async with asyncio.timeout(self._limit_s):
                    return await self._reward(self._text(task, response))
            except TimeoutError:
                problem = f"no reward within {self._limit_s:g} s (reward.function_timeout_s)"
                raise ServerError(problem) from None

        given = zip(tasks, responses, strict=True)
        return await asyncio.gather(*(in_time(*each) for each in given), return_exceptions=True)

    def _text(self, task: Task, response: str) -> str:
        values = {"prompt": task.text, "answer": task.answer, "response": response}
        # In one pass: a response may hold "{answer}" itself.
        return re.sub(
            r"\{(prompt|answer|response)\}", lambda found: values[found[1]], self._config.template
        )

    async def _reward(self, text: str) -> Reward:
        if self._config.temperature:
            return await self._ask(text)
        known = self._asked.get(text)
        if known is not None:
            answer = await asyncio.shield(known)
            return answer | {"server_tokens": 0.0, "server_tries": 0.0, "server_cached": 1.0}
        if len(self._asked) >= _MOST_CACHED:
            del self._asked[next(iter(self._asked))]
        request = asyncio.create_task(self._ask(text))
        request.add_done_callback(partial(self._forget_failed, text))
        self._asked[text] = request
        # A response that is late leaves the request to the others.
        return await asyncio.shield(request)

    def _forget_failed(self, text: str, request: asyncio.Task[Reward]) -> None:
        """So that it is asked again when the text comes again."""
        if request.cancelled() or request.exception() is not None:
            self._asked.pop(text, None)

    async def _ask(self, text: str) -> Reward:
        config = self._config
        if config.kind == "judge":
            messages = [{"role": "user", "content": text}]
            limits = {"temperature": config.temperature, "max_tokens": config.max_tokens}
            body, tries = await self._post("/v1/chat/completions", {"messages": messages} | limits)
            reward = self._written(body["choices"][0]["message"]["content"])
            values = {"reward": reward}
        else:
            body, tries = await self._post("/classify", {"input": text, "use_activation": False})
            values = {"reward": self._given(body)}
            assert config.correct_above is not None
            values["accuracy"] = float(values["reward"] > config.correct_above)
        tokens = (body.get("usage") or {}).get("total_tokens", 0)
        return values | {"server_tokens": tokens, "server_tries": tries, "server_cached": 0.0}

    def _written(self, content: str | None) -> float:
        """The last score in a judge's answer, over ``max_score``."""
        assert self._config.pattern is not None and self._config.max_score is not None
        scores = re.findall(self._config.pattern, content or "")
        if not scores:
            end = (content or "")[-60:]
            raise ServerError(f"no score in the judge's answer, which ends with {end!r}")
        reward = float(scores[-1]) / self._config.max_score
        if not 0 <= reward <= 1:
            raise ServerError(f"the score {scores[-1]} is not in 0 to {self._config.max_score:g}")
        return reward

    def _given(self, body: dict[str, Any]) -> float:
        """The number of a reward model."""
        numbers = body["data"][0]["probs"]
        if len(numbers) != 1:
            raise ServerError(f"{len(numbers)} labels, where a reward model has one")
        return float(numbers[0])

    async def _post(self, path: str, values: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The server's answer, and the number of tries.

        Raises:
            ServerError: none in all tries, or a refusal, which is not tried again.
        """
        url = f"{self._config.url}{path}"
        body = {"model": self._config.model, **values}
        problem = ""
        for number in range(1, self._config.num_tries + 1):
            if number > 1:
                await asyncio.sleep(_FIRST_WAIT_S * 2 ** (number - 2))
            try:
                async with self._slots, self._client().post(url, json=body) as answer:
                    if answer.status == 200:
                        return await answer.json(), number
                    problem = f"status {answer.status}: {(await answer.text())[:200]}"
                    if answer.status != 429 and answer.status < 500:
                        raise ServerError(f"{path} refused: {problem}")
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = first_line(error)
        raise ServerError(f"{path}: {self._config.num_tries} tries, the last one: {problem}")

    def _client(self) -> aiohttp.ClientSession:
        """Made inside the event loop that all calls share."""
        if self._session is None:
            key = self._config.api_key_variable
            headers = {"Authorization": f"Bearer {os.environ[key]}"} if key else {}
            limit = aiohttp.ClientTimeout(total=self._config.timeout_s)
            # ``_slots`` is the only bound.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                headers=headers, timeout=limit, connector=connector
            )
        return self._session
