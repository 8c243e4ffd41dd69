"""What servers are asked beside training: answers to held-out prompts, and logprobs of sequences.

Runs in the dispatcher's thread. Whatever a server was asked when it is lost, others are asked
again; the answers are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count, product, starmap, zip_longest

from megatron_rl.rollouts.server_failures import Asked, Failures
from megatron_rl.rollouts.server_tasks import Client, NoServerError, Tasks
from megatron_rl.types import Completion, Image, Prompt, Sampling

_SCORED: Asked = ("of the logprob check", 0)
Place = tuple[int, int]  # of a prompt among those that are asked, number of the response


class Questions:
    """``clients``: of the servers at work, by name, as the dispatcher has them at any time;
    ``able``: waits for those of them that have the newest weights; ``failures``: what servers fail
    at; ``note_failure``: tells the dispatcher that one has not answered a request. It tells
    ``lost`` in turn."""

    def __init__(
        self,
        tasks: Tasks,
        clients: Mapping[str, Client],
        able: Callable[[], Awaitable[list[str]]],
        failures: Failures,
        note_failure: Callable[[str, Asked, Exception], None],
    ) -> None:
        self._tasks = tasks
        self._clients = clients
        self._able = able
        self._failures = failures
        self._note_failure = note_failure
        self._asked: dict[asyncio.Task[Completion], tuple[str, Place, str]] = {}
        self._num_scored = 0

    def lost(self, name: str) -> list[Asked]:
        """A server is given up: nobody waits for its answers any more. Returns what it
        was asked."""
        given_up = []
        for task, (server, (_, number), uid) in self._asked.items():
            if server == name and not task.done():
                task.cancel()
                given_up.append((uid, number))
        return given_up

    async def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> list[Completion] | None:
        """All responses to each prompt, one prompt after the other; None where no server is
        left."""
        places = list(product(range(len(prompts)), range(sampling.num_responses)))
        answers: dict[Place, Completion] = {}
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
        patience = self._tasks.patience
        client = self._clients[name]
        with patience.waiting(name, sampling.max_response_tokens, in_line=True) as answered:
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
            elif isinstance(error, self._tasks.lost):
                self._note_failure(name, (uid, place[1]), error)
            else:
                raise error
        return answers

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[Image]]
    ) -> list[list[float]]:
        """See ``ServerDispatcher.score``."""
        while names := await self._able():
            self._num_scored += 1
            name = names[self._num_scored % len(names)]
            try:
                pairs = zip_longest(sequences, images, fillvalue=())
                # It may wait behind a response of training, so it may take as long as one. Given
                # up, a server has its client closed, which ends this.
                patience = self._tasks.patience
                with patience.waiting(name, self._tasks.longest_response):
                    scores = await asyncio.gather(*starmap(self._clients[name].score, pairs))
            except self._tasks.lost as error:
                self._note_failure(name, _SCORED, error)
            else:
                self._failures.answered(name, _SCORED)
                return scores
        raise NoServerError("no server is left to score sequences")
