"""Requests to servers besides training: answers to held-out prompts, logprobs of sequences.

Runs in the backend's thread. What a server had when it is lost is sent to others; the answers are
the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import count, product, starmap, zip_longest
from typing import Any

from megatron_rl.rollouts.backends.failures import Asked, RequestFailures
from megatron_rl.rollouts.backends.server_parts import Client, NoServerError, ServerParts
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Image, Prompt, Sampling, Score

_SCORED: Asked = ("of the logprob check", 0)
AUXILIARY = -1  # in place of the version of a request
Able = Callable[[], Awaitable[list[str]]]
NoteFailure = Callable[[str, Asked, Exception], None]
Place = tuple[int, int]  # of a prompt among those that are asked, number of the response


class AuxiliaryRequests:
    """Those under way, and the scores of their answers that are waited for."""

    def __init__(
        self,
        parts: ServerParts,
        rewards: RewardThread,
        clients: Mapping[str, Client],
        failures: RequestFailures,
        backend: tuple[Able, NoteFailure],
    ) -> None:
        """
        Args:
            clients: of the servers at work, by name, as the backend has them at any time.
            failures: what servers fail at.
            backend: what waits for the servers with the newest weights, and what is told that one
                has not answered a request; it calls ``lost`` in turn.
        """
        self._parts = parts
        self._rewards = rewards
        self._clients = clients
        self._failures = failures
        self._able, self._note_failure = backend
        self._asked: dict[asyncio.Task[Completion], tuple[str, Place, str]] = {}
        self._awaited: dict[int, asyncio.Future[Score]] = {}
        self._num_awaited = 0
        self._num_scored = 0

    def lost(self, name: str) -> list[Asked]:
        """A server is marked dead: nobody waits for its answers any more. Returns what it
        was asked."""
        given_up = []
        for task, (server, (_, number), uid) in self._asked.items():
            if server == name and not task.done():
                task.cancel()
                given_up.append((uid, number))
        return given_up

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        demonstration: Callable[[Prompt, int], Completion | None],
    ) -> list[Completion] | None:
        """All responses to each prompt, one prompt after the other; None where no server is
        left. ``demonstration``: a response that its prompt
        brings along."""
        places = list(product(range(len(prompts)), range(sampling.num_responses)))
        answers: dict[Place, Completion] = {}
        for place, number in places:
            there = demonstration(prompts[place], number)
            if there is not None:
                answers[place, number] = there
        attempts = count()
        while len(answers) < len(places) and (names := await self._able()):
            attempt = next(attempts)
            for place, number in places:
                if (place, number) not in answers:
                    name = names[(place + attempt) % len(names)]  # again: elsewhere
                    work = self._completion(name, prompts[place], sampling, number)
                    uid = prompts[place].uid
                    self._asked[asyncio.create_task(work)] = name, (place, number), uid
            try:
                await asyncio.wait(self._asked)
            except asyncio.CancelledError:  # nobody wants the answers any more
                for task in self._asked:
                    task.cancel()
                raise
            answers |= self._answers()
        return [answers[place] for place in places] if len(answers) == len(places) else None

    async def _completion(
        self, name: str, prompt: Prompt, sampling: Sampling, number: int
    ) -> Completion:
        timeouts = self._parts.timeouts
        client = self._clients[name]
        with timeouts.waiting(name, sampling.max_response_tokens, in_line=True) as answered:
            completion = await client.generate(prompt, sampling, number)
            answered(len(completion.token_ids))
        return completion

    def _answers(self) -> dict[Place, Completion]:
        """Those that are there, when all that was asked has ended."""
        asked = self._asked
        self._asked = {}
        answers = {}
        for task, (name, place, uid) in asked.items():
            if task.cancelled():
                continue
            error = task.exception()
            if error is None:
                self._failures.answered(name, (uid, place[1]))
                answers[place] = task.result()
            elif isinstance(error, self._parts.lost):
                self._note_failure(name, (uid, place[1]), error)
            else:
                raise error
        return answers

    def scores(
        self, prompts: Sequence[Prompt], answers: Sequence[Completion]
    ) -> Coroutine[Any, Any, list[Score]]:
        """Asks for those of all answers, equally many to each prompt; to be waited for."""
        futures = []
        for place, completion in enumerate(answers):
            self._num_awaited += 1
            number = self._num_awaited
            self._awaited[number] = asyncio.get_running_loop().create_future()
            futures.append(self._awaited[number])
            prompt = prompts[place * len(prompts) // len(answers)]
            self._rewards.give(Request(AUXILIARY, number, 0), prompt, completion)
        return _all(futures)

    def note_score(self, number: int, score: Score) -> None:
        """One that ``scores`` waits for, by the number of its request's group."""
        awaited = self._awaited.pop(number)
        if not awaited.done():
            awaited.set_result(score)

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[Image]]
    ) -> list[list[float]]:
        """See ``ServerBackend.score``."""
        while names := await self._able():
            self._num_scored += 1
            name = names[self._num_scored % len(names)]
            try:
                pairs = zip_longest(sequences, images, fillvalue=())
                # It may wait behind a response of training, so it may take as long as one. Given
                # up, a server has its client closed, which ends this.
                timeouts = self._parts.timeouts
                with timeouts.waiting(name, self._parts.longest_response):
                    scores = await asyncio.gather(*starmap(self._clients[name].score, pairs))
            except self._parts.lost as error:
                self._note_failure(name, _SCORED, error)
            else:
                self._failures.answered(name, _SCORED)
                return scores
        raise NoServerError("no server is left to score sequences")


async def _all(futures: Sequence[asyncio.Future[Score]]) -> list[Score]:
    return list(await asyncio.gather(*futures))
