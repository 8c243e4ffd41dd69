"""Several turns on servers: as those of engines in the trainer, whoever dies in between, and also
where a checkpoint finds responses that are not scored."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_rl.data.loader import PromptLoader
from megatron_rl.engine.serving.client import ServerLostError
from megatron_rl.rollouts.backends.failures import RequestTimeouts
from megatron_rl.rollouts.backends.requests import ServerParts
from megatron_rl.rollouts.backends.servers import ServerBackend
from megatron_rl.rollouts.jobs import GenerationJob
from megatron_rl.rollouts.prompts import PromptStream
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.rollouts.rows.verdicts import VerdictRules
from megatron_rl.rollouts.sampling import SamplingPlan
from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.types import Completion, Prompt, Sampling
from tests.unit.rollouts import test_turns
from tests.unit.rollouts.server_fakes import Fleet, publish, step
from tests.unit.rollouts.test_turns import SCRIPT, NotAsked, Talking, made

registered, tokenizer = test_turns.registered, test_turns.tokenizer
in_this_process = test_turns.in_this_process
pytestmark = pytest.mark.usefixtures("registered", "bounded_waits", "in_this_process")


class TalkingServer:
    """``Talking`` behind a URL; one called "mortal" dies at its fourth request."""

    def __init__(self, fleet: Fleet, name: str, talking: Talking) -> None:
        self.fleet = fleet
        self.name = name
        self.talking = talking

    async def generate(
        self, prompt: Prompt, sampling: Sampling, response: int, so_far: Sequence[int] = ()
    ) -> Completion:
        self.fleet.asked.append((self.name, 0, prompt.uid, response))
        number = sum(name == self.name for name, *_ in self.fleet.asked)
        await asyncio.sleep(0.001)
        if self.name == "mortal" and number > 3:
            raise ServerLostError("it is dead")
        self.talking.submit(prompt, [response], sampling, {response: so_far})
        _, said = self.talking._open.pop()
        version = self.fleet.versions[self.name]
        return Completion(said.token_ids, said.sampler_logprobs, said.truncated, version)

    async def close(self) -> None: ...


@pytest.fixture
def begin(
    tokenizer: PreTrainedTokenizerFast, made_dispatchers: list[ServerBackend]
) -> Callable[..., ServerBackend]:
    """Starts a backend; ``held``: scores wait until it is set."""

    def begin(
        fleet: Fleet, saved: Any = None, held: threading.Event | None = None
    ) -> ServerBackend:
        ids = tokenizer("<user>two + two@<assistant>", add_special_tokens=False)["input_ids"]
        asked = [Prompt(f"p{number}", tuple(ids), "four", "toy") for number in range(3)]
        job = GenerationJob(
            rules=StepRules(groups_per_step=1, responses_per_group=len(SCRIPT), staleness=1),
            stream=PromptStream(PromptLoader(asked, seed=1, shuffle=True)),
            plan=SamplingPlan(Sampling(len(SCRIPT), 90), seed=5),
            wants_group=lambda verdicts: True,
            verdicts=VerdictRules(1, 0.0),
        )
        if saved is not None:
            job.stream.restore(saved["prompts"])
            job.store.restore(saved["store"])

        def rewards(wake: Callable[[], None]) -> RewardThread:
            thread = RewardThread(NotAsked(), tokenizer.decode, wake=wake)
            if held is not None:
                scores = thread._work
                thread._work = lambda some: [held.wait(20), scores(some)][1]
            return thread

        talking = Talking(tokenizer)
        parts = ServerParts(
            connect=lambda url: TalkingServer(fleet, url.removeprefix("at "), talking),
            switch=fleet.switch,
            rewards=rewards,
            capacity=4,
            timeouts=RequestTimeouts(None),
            longest_response=90,
            turns=made(tokenizer),
        )
        made_dispatchers.append(ServerBackend(job, parts, fleet, saved))
        return made_dispatchers[-1]

    return begin


def trained(backend: ServerBackend, fleet: Fleet, first: int, last: int) -> Iterator[Any]:
    for version in range(first, last + 1):
        for group in step(backend, fleet, version):
            tokens = [one.token_ids.tolist() for one in group.completions]
            spans = [[(one.version, one.end) for one in each.spans] for each in group.completions]
            cut = [one.truncated for one in group.completions]
            yield group.prompt.uid, tokens, spans, cut, group.scores


def started(begin: Callable[..., ServerBackend], fleet: Fleet, **more: Any) -> ServerBackend:
    backend = begin(fleet, **more)
    publish(backend, fleet, 0)
    return backend


def test_turns_of_servers_are_those_of_engines(
    begin: Callable[..., ServerBackend], tokenizer: PreTrainedTokenizerFast
) -> None:
    fleet = Fleet(registered={"a"})
    ((_, tokens, spans, cut, scores),) = trained(started(begin, fleet), fleet, 1, 1)
    expected, _ = test_turns.sampled(tokenizer)
    assert tokens == [ids.tolist() for ids in expected.tokens.views("token_ids")]
    assert spans[2] == [(0, 2), (-3, 34), (0, 36), (-3, 68), (0, 73)]
    assert cut == expected.truncated.tolist()
    assert scores == expected.scores


def test_a_response_whose_server_dies_begins_again_elsewhere(
    begin: Callable[..., ServerBackend],
) -> None:
    alone, two = Fleet(registered={"a"}), Fleet(registered={"a", "mortal"})
    expected = list(trained(started(begin, alone), alone, 1, 3))
    backend = started(begin, two)
    assert list(trained(backend, two, 1, 3)) == expected
    counts = backend.counts()
    assert counts["source/lost_servers"] == 1 and counts["source/reissued_requests"] > 0


def test_what_an_environment_said_of_an_unscored_response_is_in_the_checkpoint(
    begin: Callable[..., ServerBackend],
) -> None:
    fleet = Fleet(registered={"a"})
    expected = list(trained(started(begin, fleet), fleet, 1, 1))
    held = threading.Event()
    fleet = Fleet(registered={"a"})
    backend = started(begin, fleet, held=held)
    while len((saved := backend.state()).get("outcomes", ())) < len(SCRIPT):
        pass
    held.set()
    fleet = Fleet(registered={"a"})
    resumed = begin(fleet, saved)
    publish(resumed, fleet, 0)
    assert list(trained(resumed, fleet, 1, 1)) == expected
