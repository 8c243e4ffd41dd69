"""Generation over several ranks: whatever the timing and the number of replicas, the same groups
with the same responses and verdicts; and what goes between the ranks meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_rl.config.method import load_method
from megatron_rl.data.loader import PromptLoader
from megatron_rl.rollouts.backends import launch
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.rollouts.rows.experience import Experience
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.types import Completion, Prompt, Sampling, Score
from tests.engines import Answering
from tests.ranks import call
from tests.rollout_sources import rollouts_of, training_job

PROMPTS = [Prompt(f"p{number}", (5, number), str(number % 3), "toy") for number in range(40)]
PER_PROMPT = 4
SAMPLING = Sampling(PER_PROMPT, max_response_tokens=30)
PLAIN, FILTERED = "grpo", "dapo"


class Moody(Answering):
    """Ends responses in another order at every start, sometimes none, and is now and then slow.
    The ranks of a replica are in the same mood."""

    def __init__(self, replica: int, num_replicas: int, mood: int) -> None:
        super().__init__()
        self.replica = replica
        self.num_replicas = num_replicas
        self.mood = random.Random(f"{mood}/{replica}")

    def response(self, prompt: Prompt, sampling: Sampling, number: int) -> Completion:
        draw = random.Random(f"{sampling.seed}/{prompt.uid}/{number}")
        size = draw.randint(1, sampling.max_response_tokens)
        ids = [draw.randrange(100) for _ in range(size)]
        logprobs = [-draw.random() for _ in ids]
        return Completion(ids, logprobs, size == sampling.max_response_tokens, 3)

    def poll(self) -> list[tuple[int, Completion]]:
        self._open.rotate(self.mood.randrange(5))
        if self.mood.random() < 0.1:
            time.sleep(0.01)
        return super().poll() if self.mood.random() < 0.7 else []


class SlowVerdict:
    """Right when the first token is divisible by three; takes its time, in another thread."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        self.threads.add(threading.current_thread().name)
        time.sleep(0.005)
        first = [int(text.split()[0]) for text in texts]
        return [Score(number / 100, number % 3 == 0, {"first": number}) for number in first]


def rollouts(num_replicas: int, mood: int, method: str, sampling: Sampling = SAMPLING) -> Rollouts:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, rank, "test", dist.group.WORLD)
    engine = Moody(rank * num_replicas // size, num_replicas, mood)
    words = " ".join
    sampler = LaunchSampler(
        engine,
        SlowVerdict(),
        lambda ids: words(map(str, ids)),
        world,
        Display(shown=False),
    )
    job = training_job(
        PromptLoader(PROMPTS, seed=1, shuffle=True),
        sampling,
        seed=4,
        prompts_per_step=6,
        method=load_method(method),
    )
    return rollouts_of(sampler, job)


def facts(experience: Experience) -> dict[str, Any]:
    """All that is equal on every rank whatever the layout, and the tokens that are here."""
    responses = experience.responses
    tokens = responses.tokens
    assert (responses.holders[tokens.rows] == dist.get_rank()).all()
    rows = zip(tokens.rows.tolist(), tokens.views("token_ids"), strict=True)
    logprobs = tokens.views("sampler_logprobs")
    return {
        "scalars": [
            [prompt.uid for prompt in responses.prompts],
            responses.group_ids.tolist(),
            responses.lengths.tolist(),
            responses.truncated.tolist(),
            responses.weight_versions.tolist(),
            responses.scores,
            experience.discarded_groups,
            experience.sampling_rounds,
        ],
        "tokens": {
            row: (ids.tolist(), bytes(values))
            for (row, ids), values in zip(rows, logprobs, strict=True)
        },
    }


def steps(num_replicas: int, mood: int, method: str) -> tuple[list[dict[str, Any]], Any]:
    source = rollouts(num_replicas, mood, method)
    return [facts(source.collect(step)) for step in range(1, 5)], source.state()


@pytest.mark.parametrize("method", [PLAIN, FILTERED])
def test_the_same_experience_for_any_number_of_replicas_and_any_timing(method: str) -> None:
    ((expected, position),) = call(1, steps, 1, 0, method)
    uids = [uid for step in expected for uid in step["scalars"][0]]
    assert len(uids) == 4 * 6 * PER_PROMPT
    if method == FILTERED:
        assert sum(step["scalars"][6] for step in expected) > 3, "no group was refused"
    for num_ranks, num_replicas, mood in ((1, 1, 1), (2, 2, 2), (2, 1, 3), (4, 4, 4), (4, 2, 5)):
        got = call(num_ranks, steps, num_replicas, mood, method)
        for rank, (of_rank, at) in enumerate(got):
            assert at == position, "the next step begins elsewhere"
            for step, exact in zip(of_rank, expected, strict=True):
                assert step["scalars"] == exact["scalars"], (num_ranks, num_replicas, rank)
        for number, exact in enumerate(expected):
            together: dict[int, Any] = {}
            for of_rank, _ in got:
                assert not together.keys() & of_rank[number]["tokens"].keys(), "held twice"
                together |= of_rank[number]["tokens"]
            assert together == exact["tokens"]


def mailed() -> tuple[int, int]:
    """Bytes of all messages of this rank in a step, and the tokens it has sampled."""
    sizes = []
    launch.pickle = _Counting(sizes)
    try:
        source = rollouts(2, 1, PLAIN, replace(SAMPLING, max_response_tokens=5000))
        experience = source.collect(1)
    finally:
        launch.pickle = _Counting.plain
    return sum(sizes), int(experience.responses.tokens.lengths.sum())


class _Counting:
    """``pickle`` that notes what it writes."""

    plain = launch.pickle

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.loads = self.plain.loads

    def dumps(self, message: Any) -> bytes:
        written = self.plain.dumps(message)
        self.sizes.append(len(written))
        return written


def test_no_token_is_mailed() -> None:
    for num_bytes, num_tokens in call(2, mailed):
        assert num_tokens > 1000 * PER_PROMPT
        assert 0 < num_bytes < num_tokens / 2, "less than a byte for two tokens"


def failing(num_replicas: int) -> str:
    source = rollouts(num_replicas, 1, PLAIN)

    def broken(*_: Any) -> list[Score]:
        raise ValueError("no verdict today")

    source.engines.backend.rewards._reward.score = broken
    try:
        source.collect(1)
    except ValueError as error:
        return str(error)
    return ""


def test_what_the_reward_raises_ends_the_step_on_its_rank() -> None:
    assert call(1, failing, 1) == ["no verdict today"]


def judged_in() -> set[str]:
    source = rollouts(1, 1, PLAIN)
    source.collect(1)
    return source.engines.backend.rewards._reward.threads


def test_verdicts_come_from_another_thread_than_tokens() -> None:
    assert call(1, judged_in) == [{"reward_0"}]
